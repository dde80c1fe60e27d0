"""Predictions as a dataset."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, SourceConfig
from etl.job import BuildOutcome
from etl.sources import COMMITTED
from shardmill.calls.predictions import Predictions
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import UsageError
from shardmill.failpoints import VARIABLE
from shardmill.loader.dataset import open_dataset as open_for_training
from shardmill.stores import open_store
from tests.etl.annotations import as_table, with_masks
from tests.etl.brightness import brightness, mapping, predict
from tests.etl.incremental import build_from
from tests.lab.datasets import HERE, build_here, make_dataset, write_images
from tests.lab.scale import in_drills
from tests.quick_start.forked import Program, run_forked


def table_of(out: Path) -> pa.Table:
    """All rows of the latest version, as any reader of Parquet sees them, after every rule was checked."""
    dataset = open_dataset(str(out))
    verify_dataset(dataset, deep=True).raise_if_failed()
    return pa.concat_tables([pq.read_table(file) for split in dataset.manifest.splits for file in dataset.files(split)])


def digests(outcome: BuildOutcome) -> tuple[str, str]:
    return outcome.manifest.content_digest, outcome.manifest.ledger_digest


def test_each_image_has_one_row_and_every_other_input_a_reason(images: Path):
    outcome = predict(images / "images", images / "out")
    manifest = outcome.manifest
    counts = manifest.counts
    assert (counts.listed, counts.accepted, counts.rejected) == (162, 160, 2)
    ledger = {each.key: str(each.reason) for each in read_rejections(open_store(str(images / "out")), manifest)}
    assert ledger == {"class_0/broken.jpg": "not_an_image", "class_0/.DS_Store": "not_an_image_name"}
    table = table_of(images / "out")
    assert table.column_names == [
        "sample_id", "label", "source", "source_sha256", "notes", "prediction", "probability"
    ]  # fmt: skip
    found = dict(zip(table.column("source").to_pylist(), table.column("probability").to_pylist(), strict=True))
    assert len(found) == table.num_rows == 160
    for key, probability in found.items():
        pixels = cv2.imread(str(images / "images" / key))
        assert probability == pytest.approx(brightness(pixels), rel=1e-5)
    assert manifest.predicted_by is not None and str(manifest.predicted_by) == "/models@1"


def test_a_notebook_shows_predictions_by_their_first_shards_alone(images: Path):
    predict(images / "images", images / "out")
    dataset = open_for_training(str(images / "out"))
    [split] = dataset.manifest.splits
    whole = Predictions("r", dataset, 160, 1.0, True)
    rows, index = whole.to_arrow(), dataset.index(split)
    # The first two have the 8 rows that are shown.
    assert index.num_shards > 3
    for number in range(2, index.num_shards):
        (images / "out" / index.shard(number).rows_path).unlink()
    shown = whole._repr_html_()
    assert all(f">{source}</td>" in shown for source in rows.column("source").to_pylist()[:8])


@pytest.mark.starts("program")
def test_a_worker_opens_the_model_once(images: Path):
    opened = images / "opened"
    opened.mkdir()
    outcome = predict(images / "images", images / "out", mapping(opened), "local")
    lines = [file.read_text() for file in opened.iterdir()]
    assert outcome.num_units > 2 >= len(lines) and set(lines) == {"opened\n"}


@pytest.mark.starts("jvm", "program")
def test_engines_agree(images: Path):
    engines = (HERE, "local", "spark")
    outcomes = [predict(images / "images", images / str(place), engine=each) for place, each in enumerate(engines)]
    assert len({(*digests(each), each.manifest.layout_digest) for each in outcomes}) == 1


def test_only_what_is_new_or_has_changed_is_predicted(images: Path):
    first = predict(images / "images", images / "out")
    again = predict(images / "images", images / "out")
    assert again.skipped and again.manifest == first.manifest

    # One changed, one new, one gone.
    changed, gone = images / "images" / "class_1" / "00001.png", images / "images" / "class_2" / "00002.png"
    for file in (changed, changed.with_name("new.png")):
        assert cv2.imwrite(str(file), np.full((16, 16, 3), 200, np.uint8))
        os.utime(file, (1, 1))
    gone.unlink()
    later = predict(images / "images", images / "out")
    assert (later.num_images_read, later.manifest.version, later.manifest.counts.accepted) == (2, 2, 160)
    full = predict(images / "images", images / "full")
    assert digests(later) == digests(full)
    table_of(images / "out")


def test_another_model_predicts_everything_anew(images: Path):
    predict(images / "images", images / "out")
    other = predict(images / "images", images / "out", mapping(export=2))
    assert (other.num_images_read, other.manifest.version) == (161, 2)
    assert other.manifest.predicted_by is not None and other.manifest.predicted_by.export == 2


def test_vectors_are_stored_beside_the_answers_and_stay_when_shards_are_rewritten(images: Path):
    predict(images / "images", images / "out", mapping(vector_size=5))
    before = table_of(images / "out").sort_by("sample_id")
    vectors_N5 = np.array(before.column("embedding").to_pylist(), np.float32)
    assert vectors_N5.shape == (160, 5)
    expected_N = before.column("probability").to_numpy()
    assert np.allclose(vectors_N5, expected_N[:, None] + np.arange(5), rtol=1e-6)
    (images / "images" / "class_2" / "00002.png").unlink()
    predict(images / "images", images / "out", mapping(vector_size=5))
    compact_dataset(open_dataset(str(images / "out")), "run")
    after = table_of(images / "out").sort_by("sample_id")
    assert after.equals(before.filter(pc.not_equal(before.column("source"), "class_2/00002.png")))


def test_columns_and_labels_of_the_source_are_kept_if_they_are_asked_for(images: Path):
    source = SourceConfig(uri=str(images / "images"), label_kind="class")
    manifest = predict(source, images / "out").manifest
    assert manifest.class_names == ("class_0", "class_1", "class_2")
    table = table_of(images / "out")
    names = [manifest.class_names[label] for label in table.column("label").to_pylist()]
    assert names == [key.partition("/")[0] for key in table.column("source").to_pylist()]


def dataset_source(uri: str) -> SourceConfig:
    return SourceConfig(uri=uri, kind=COMMITTED)


@pytest.mark.parametrize("encoding", ["png", "raw", "jpeg"])
def test_a_dataset_version_is_a_source(encoding: str, tmp_path: Path):
    uri = make_dataset(tmp_path, encoding=encoding, formats=("parquet",))
    made_by = mapping()
    fingerprint = open_dataset(uri).manifest.normalization_fingerprint
    made_by = replace(made_by, normalization_fingerprint=fingerprint)
    outcome = predict(dataset_source(uri), tmp_path / "out", made_by)
    made = outcome.manifest.predicted_by
    assert made is not None and made.predicted == open_dataset(uri).pin
    assert outcome.manifest.source.uri == uri
    stored, table = open_dataset(uri), table_of(tmp_path / "out")
    assert outcome.manifest.counts.by_split == stored.manifest.counts.by_split
    rows = pa.concat_tables([pq.read_table(file) for split in stored.manifest.splits for file in stored.files(split)])
    ids = ["sample_id", "source", "label"]
    assert table.select(ids).sort_by("sample_id") == rows.select(ids).sort_by("sample_id").cast(
        table.select(ids).schema
    )
    assert predict(dataset_source(uri), tmp_path / "out", made_by).skipped


def test_a_later_version_of_a_dataset_is_predicted_as_far_as_it_differs(tmp_path: Path):
    config = EtlConfig(image_size=16, encoding="png", unit_min_images=40)
    write_images(tmp_path / "images", num_images=60)
    uri = build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), config)
    predict(dataset_source(uri), tmp_path / "out")
    write_images(tmp_path / "images", num_images=70)
    for number in range(60):
        file = next((tmp_path / "images").rglob(f"{number:05d}.png"))
        os.utime(file, (1, 1))
    build_here(str(tmp_path / "images"), uri, config)
    later = predict(dataset_source(uri), tmp_path / "out")
    assert (later.num_images_read, later.manifest.counts.accepted) == (10, 70)
    made = later.manifest.predicted_by
    assert made is not None and made.predicted is not None and made.predicted.version == 2


def test_a_dataset_of_other_pixels_is_refused(tmp_path: Path):
    uri = make_dataset(tmp_path, image_size=24, formats=("parquet",))
    with pytest.raises(UsageError, match="were not normalized like those that /models@1 learned"):
        predict(dataset_source(uri), tmp_path / "out")


def test_images_and_predictions_do_not_share_a_folder(images: Path):
    predict(images / "images", images / "out")
    config = EtlConfig(image_size=16, encoding="png")
    dataset = build_here(str(images / "images"), str(images / "dataset"), config)
    for replace_source in (False, True):
        with pytest.raises(UsageError, match="dataset@1 holds images; .* for predictions alone; name another --out$"):
            predict(images / "images", Path(dataset), replace_source=replace_source)
    with pytest.raises(UsageError, match="^--out .*/out is inside source.uri .*; set --out to a folder outside"):
        predict(images / "images", images / "images" / "out")


def test_readers_of_images_say_that_there_are_none(images: Path):
    predict(images / "images", images / "out")
    with pytest.raises(UsageError, match="holds predictions, and no images"):
        open_for_training(str(images / "out")).batches("test", global_batch_size=8, seed=0, num_streams=1)
    with pytest.raises(UsageError, match="holds predictions, and no images"):
        predict(dataset_source(str(images / "out")), images / "again")
    assert not (images / "again").exists()


def test_sources_with_boxes_and_masks_are_predicted_without_them(tmp_path: Path):
    for name in ("coco", "table"):
        (tmp_path / name).mkdir()
    parts = {"coco": with_masks(tmp_path / "coco", {}), "table": as_table(tmp_path / "table")}
    manifest = predict(SourceConfig(kind="several", parts=parts), tmp_path / "out").manifest
    assert (manifest.counts.accepted, manifest.counts.rejected) == (13, 0)
    assert not {"boxes", "mask"} & set(table_of(tmp_path / "out").column_names)
    tar = SourceConfig(kind="webdataset", uri=str(tmp_path), mask_field="seg.png")
    with pytest.raises(
        UsageError, match=r"predictions read no masks.*set source\.mask_field = \"\" and source\.image_field"
    ):
        predict(tar, tmp_path / "of_tar")
    # Without labels, COCO's files give masks alone.
    masks = parts["coco"].model_copy(update={"label_kind": "none"})
    assert build_from(masks, tmp_path / "masks", image_size=16).manifest.columns.keys() >= {"mask"}
    assert "boxes" not in open_dataset(str(tmp_path / "masks")).manifest.columns


_MODULES = ("etl.job", "etl.commit", "etl.engines.local", "tests.programs.predict_brightness")


def run(images: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: failpoint}
    arguments = [sys.executable, str(images / "images"), str(images / "out")]
    return run_forked(
        _MODULES, Program("tests.programs.predict_brightness:main", arguments, str(images), environment), 200
    )


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "point", ["decode:40", "manifest_put", *in_drills("list", "shard_close:3", "task_report:3", "post_commit")]
)
def test_the_same_command_finishes_what_was_killed(point: str, images: Path):
    whole = predict(images / "images", images / "whole")
    killed = run(images, point)
    # A worker that dies twice ends the build with exit 4; the others kill the driver itself.
    assert killed.returncode in (4, -9), killed.stderr
    is_worker = point.partition(":")[0] in ("decode", "shard_close", "task_report")
    assert killed.returncode == (4 if is_worker else -9)
    again = run(images)
    assert again.returncode == 0, again.stderr
    done = open_dataset(str(images / "out"))
    assert (done.pin.version, done.manifest.content_digest) == (1, whole.manifest.content_digest)
    verify_dataset(done, deep=True).raise_if_failed()
    if point == "manifest_put":
        # All units were finished: nothing was predicted twice.
        assert again.stdout == f"{whole.num_units} kept, 0 retries\n"


@pytest.mark.starts("program")
def test_a_worker_that_is_killed_once_costs_nothing_but_time(images: Path):
    whole = predict(images / "images", images / "whole")
    done = run(images, f"decode:40@{images}/once")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "0 kept, 1 retries\n"
    assert open_dataset(str(images / "out")).manifest.content_digest == whole.manifest.content_digest
