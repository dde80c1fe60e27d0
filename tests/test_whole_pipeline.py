"""The demo, whole: real digits and broken files through Spark, Horovod on Spark, evaluation, export, promotion."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from pipeline.demo.data import odd_files
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.verify import verify_dataset
from shardmill.formats.encodings import decode_stored
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.loader.samples import read_samples
from tests.demo import Demo


@pytest.mark.timeout(1000)
def test_the_demo_keeps_its_promises(demo: Demo):
    summary = demo.summary
    assert summary["status"] == "ok" and summary["exit_code"] == 0
    assert summary["evaluation"]["split"] == "test" and summary["evaluation"]["accuracy"] >= 0.97
    assert summary["evaluation"]["num_samples"] == summary["dataset"]["counts"]["by_split"]["test"]
    assert (summary["train"]["strategy"], summary["train"]["world_size"]) == ("horovod", 2)
    assert summary["etl"]["engine"] == "spark"
    assert summary["export"]["parity_max_abs_diff"] <= 1e-5
    assert summary["promotion"]["decision"] == "promoted"
    assert sum(summary["train"]["time_shares"].values()) == pytest.approx(1, abs=0.02)
    of_ranks = summary["train"]["rank_times"]
    assert [each["rank"] for each in of_ranks] == [0, 1] and all(each["seconds"]["allreduce"] > 0 for each in of_ranks)
    assert "A step of each rank" in (demo.run / "report.html").read_text()
    assert (demo.run / "report.html").stat().st_size > 50_000
    assert not (demo.work / "images" / "7" / "left_over.jpg").exists()
    assert (demo.work / "mine.txt").read_text() == "keep me"


def test_every_input_is_accepted_or_in_the_ledger_by_path(demo: Demo):
    dataset = open_dataset(str(demo.work / "dataset"))
    accepted = Counter(
        sample.source
        for split, info in dataset.manifest.splits.items()
        for sample in read_samples(dataset, split, info.num_rows)
    )
    rejected = Counter(rejection.key for rejection in read_rejections(dataset.store, dataset.manifest))
    on_disk = Counter(
        str(Path(directory, name).relative_to(demo.work / "images"))
        for directory, _, names in os.walk(demo.work / "images")
        for name in names
    )
    assert accepted + rejected == on_disk
    assert sum(on_disk.values()) == dataset.manifest.counts.listed
    verify_dataset(dataset, deep=True).raise_if_failed()


def test_each_odd_file_ends_as_documented(demo: Demo):
    dataset = open_dataset(str(demo.work / "dataset"))
    reasons = {rejection.key: str(rejection.reason) for rejection in read_rejections(dataset.store, dataset.manifest)}
    odd = odd_files()
    assert len(odd) >= 16
    for file in odd:
        assert reasons.get(file.key) == file.expected_reason, file.key
        if file.expected_note:
            assert dataset.manifest.counts.by_note.get(file.expected_note, 0) >= 1, file.key


def test_both_formats_hold_the_same_epoch(demo: Demo):
    dataset = open_dataset(str(demo.work / "dataset"))
    spec = dataset.plan_spec("train", seed=0, global_batch_size=64, num_streams=8)
    readers = [
        read_batches(dataset, dataset.plan_epoch(spec, 0), options=ReaderOptions(format=name))
        for name in dataset.manifest.formats
    ]
    assert dataset.manifest.formats == ("parquet", "tfrecord")
    with readers[0] as parquet, readers[1] as tfrecord:
        num_rows = 0
        for one, other in zip(parquet, tfrecord, strict=True):
            assert np.array_equal(one.images_NHWC, other.images_NHWC)
            assert np.array_equal(one.sample_ids_N, other.sample_ids_N)
            num_rows += int(one.weights_N.sum())
    assert num_rows == dataset.manifest.splits["train"].num_rows


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_petastorm_reads_the_demos_parquet_files(demo: Demo):
    from petastorm import make_batch_reader

    dataset = open_dataset(str(demo.work / "dataset"))
    options = dataset.manifest.normalize
    expected = {sample.sample_id: sample for sample in read_samples(dataset, "train", 10**6)}
    urls = [Path(uri).as_uri() for uri in dataset.files("train", "parquet")]
    seen = []
    with make_batch_reader(urls, num_epochs=1, reader_pool_type="dummy") as reader:
        for batch in reader:
            for image, label, sample_id in zip(batch.image, batch.label, batch.sample_id, strict=True):
                image_HWC = decode_stored(bytes(image), options.encoding, options.image_shape_HWC)
                assert np.array_equal(image_HWC, expected[int(sample_id)].image_HWC)
                assert int(label) == expected[int(sample_id)].label
                seen.append(int(sample_id))
    assert sorted(seen) == sorted(expected)


@pytest.mark.timeout(1000)
def test_running_it_again_does_nothing_again(demo: Demo):
    before = demo.summary
    again = demo.shardmill("run", "examples/demo.toml", "--workdir", "demo-work", "--json")
    assert again.returncode == 0, again.stderr[-2000:]
    after = json.loads(again.stdout)
    assert after["run_id"] != before["run_id"]
    assert {name: stage["status"] for name, stage in after["stages"].items() if name in ("etl", "train", "export")} == {
        "etl": "skipped",
        "train": "skipped",
        "export": "skipped",
    }
    assert after["dataset"]["version"] == before["dataset"]["version"] == 1
    assert after["train"]["weights_sha256"] == before["train"]["weights_sha256"]
    assert after["promotion"]["decision"] == "already_current"


@pytest.mark.timeout(1000)
def test_the_promoted_model_reads_ordinary_files(demo: Demo):
    # Also the odd ones: the model gets what the ETL's own function makes of them.
    chosen = [file.key for file in odd_files() if file.expected_reason is None and file.key[0].isdigit()][:6]
    refused = next(file.key for file in odd_files() if file.expected_reason == "truncated")
    paths = [str(demo.work / "images" / key) for key in (*chosen, refused)]
    done = demo.shardmill("predict", str(demo.work / "models"), *paths, "--json")
    assert done.returncode == 0, done.stderr[-2000:]
    predictions = {entry["path"]: entry for entry in json.loads(done.stdout)}
    right = sum(predictions[path]["label"] == key[0] for path, key in zip(paths, chosen, strict=False))
    assert right >= len(chosen) - 1 and len(chosen) >= 4
    assert predictions[paths[-1]]["label"] == "" and predictions[paths[-1]]["rejection"].startswith("truncated")


def test_a_flipped_byte_is_found_by_verify_and_named(demo: Demo, tmp_path: Path):
    root = Path(shutil.copytree(demo.work / "dataset", tmp_path / "dataset"))
    shard = sorted((root / "shards" / "train").glob("*.tfrecord"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    done = demo.shardmill("verify", str(root), "--deep")
    assert done.returncode == 3
    assert done.stderr.strip().splitlines()[-1].startswith("ERROR 3:") and shard.name in done.stderr
