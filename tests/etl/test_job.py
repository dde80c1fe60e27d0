"""The ETL on real Spark: equal digests whatever runs it, retries and restarts that lose nothing, limits that hold."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome, build_dataset, commit_results
from etl.pending import PENDING, kept_result
from etl.plan import plan_build
from etl.write_unit import write_unit
from shardmill.dataset import open_dataset, verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import RejectLimitExceeded, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig, SparkApplicationConfig, SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.support import build_here, write_images

ETL = EtlConfig(image_size=16, encoding="png", unit_min_images=20, chunk_bytes=8_000, formats=("parquet", "tfrecord"))


def tree_for(folder: Path, dataset: str, spark: SparkConfig | None = None, etl: EtlConfig = ETL) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / dataset)),
        etl=etl,
        spark=spark or SparkConfig(),
    )


class Recorder:
    def __init__(self) -> None:
        self.events: dict[str, Mapping[str, FieldValue]] = {}

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.events[name] = fields


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("etl")
    write_images(folder / "images", num_images=160)
    (folder / "images" / "class_0" / "broken.jpg").write_bytes(b"<html>not found</html>")
    (folder / "images" / "class_0" / ".DS_Store").write_bytes(b"x")
    return folder


def digests(outcome: BuildOutcome) -> tuple[str, str]:
    return outcome.manifest.content_digest, outcome.manifest.layout_digest


def test_digests_are_equal_on_any_engine_master_and_partitioning(images: Path):
    settings = {"spark.sql.shuffle.partitions": "3", "spark.default.parallelism": "7",
                "spark.sql.execution.arrow.maxRecordsPerBatch": "1"}  # fmt: skip
    one = build_dataset(tree_for(images, "one", SparkConfig(master="local[1]")), run_id="a")
    two = build_dataset(
        tree_for(images, "two", SparkConfig(master="local[2]", etl=SparkApplicationConfig(conf=settings))), run_id="b"
    )
    assert one.num_units > 4
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    assert digests(one) == digests(two) == (here.content_digest, here.layout_digest)
    counts = one.manifest.counts
    assert (counts.listed, counts.accepted, counts.rejected) == (162, 160, 2)
    assert counts.by_reason == {"not_an_image": 1, "not_an_image_name": 1}
    verify_dataset(open_dataset(str(images / "two")), deep=True).raise_if_failed()

    # Running it again with nothing changed makes no version, and starts no Spark.
    started = time.monotonic()
    again = build_dataset(tree_for(images, "two"), run_id="c")
    assert again.skipped and again.pin == two.pin and time.monotonic() - started < 3
    assert list(open_store(images / "two").list(PENDING)) == []


def test_a_task_whose_python_worker_is_killed_is_retried_and_changes_nothing(images: Path):
    # local[2,4]: two slots, and up to four tries for each task, as on a cluster.
    tree = tree_for(images, "retried", SparkConfig(master="local[2,4]"))
    killed: list[int] = []
    done = threading.Event()

    def kill_one_worker() -> None:
        while not done.is_set() and not killed:
            # Wait until a task has published something, so that the attempt is lost half-way.
            if any((images / "retried" / "shards").rglob("*.parquet")):
                workers = spark_python_workers()
                if workers:
                    os.kill(workers[0], signal.SIGKILL)
                    killed.append(workers[0])
            time.sleep(0.01)

    killer = threading.Thread(target=kill_one_worker)
    killer.start()
    try:
        outcome = build_dataset(tree, run_id="a")
    finally:
        done.set()
        killer.join()
    assert killed, "no Python worker was seen"
    here = open_dataset(build_here(str(images / "images"), str(images / "undisturbed"), ETL)).manifest
    assert digests(outcome) == (here.content_digest, here.layout_digest)
    verify_dataset(open_dataset(str(images / "retried")), deep=True).raise_if_failed()


def spark_python_workers() -> list[int]:
    """Forked Python workers (children of a `pyspark.daemon`) below this process."""
    table = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in table.splitlines()[1:]]
    daemons = {pid for pid, _, args in rows if "pyspark.daemon" in args}
    return [int(pid) for pid, parent, args in rows if "pyspark.daemon" in args and parent in daemons]


def test_a_killed_run_keeps_its_finished_units(images: Path):
    # What a run that was killed leaves: some units published with their records, one record of it damaged.
    tree = tree_for(images, "resumed")
    plan = plan_build(tree, run_id="killed")
    finished = [write_unit(unit, plan.task) for unit in plan.units[:4]]
    damaged = finished[3].shards[0]
    (images / "resumed" / damaged.path).unlink()
    recorder = Recorder()
    outcome = build_dataset(tree, run_id="again", observer=recorder)
    assert outcome.num_units_kept == 3
    assert recorder.events["etl.units_kept"] == {"kept": 3, "missing": outcome.num_units - 3}
    kept = {shard.path for result in finished[:3] for shard in result.shards}
    assert kept <= {shard.path for shard in open_dataset(str(images / "resumed")).shards}
    here = open_dataset(build_here(str(images / "images"), str(images / "fresh"), ETL)).manifest
    assert digests(outcome) == (here.content_digest, here.layout_digest)
    assert list(open_store(images / "resumed").list(PENDING)) == []


def test_sigkill_of_the_whole_run_leaves_nothing_visible_and_a_rerun_completes(images: Path):
    root = images / "killed"
    config = images / "killed.toml"
    config.write_text(
        f'[source]\nuri = "{images}/images"\n[dataset]\nuri = "{root}"\n'
        '[etl]\nimage_size = 16\nencoding = "png"\nunit_min_images = 20\nchunk_bytes = 8000\n'
        'formats = ["parquet", "tfrecord"]\n[spark]\nmaster = "local[1]"\n'
    )
    command = [sys.executable, "etl/job.py", "--config", str(config), "--workdir", str(images / "work")]
    run = subprocess.Popen(command, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        deadline = time.monotonic() + 240
        while not any(root.glob(f"{PENDING}/*.json")):
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    num_finished = len(list(root.glob(f"{PENDING}/*.json")))
    assert latest_version(open_store(root)) == 0
    outcome = build_dataset(tree_for(images, "killed"), run_id="again")
    assert outcome.num_units_kept == num_finished >= 1
    here = open_dataset(build_here(str(images / "images"), str(images / "whole"), ETL)).manifest
    assert digests(outcome) == (here.content_digest, here.layout_digest)


def test_too_many_rejects_publish_nothing_and_name_reasons_and_ledger(images: Path):
    strict = ETL.model_copy(update={"max_reject_fraction": 0.001})
    expected = r"1 of 162 inputs were rejected \(not_an_image 1\), such as class_0/broken.jpg.*--rejects .*/rejects/"
    with pytest.raises(RejectLimitExceeded, match=expected):
        build_dataset(tree_for(images, "strict", etl=strict), run_id="a")
    assert latest_version(open_store(images / "strict")) == 0
    # With a limit that allows it, the units that were finished are kept.
    assert build_dataset(tree_for(images, "strict"), run_id="b").num_units_kept > 0


def test_a_lowered_limit_is_also_held_against_what_was_committed(images: Path):
    build_here(str(images / "images"), str(images / "committed"), ETL)
    strict = ETL.model_copy(update={"max_reject_fraction": 0.001})
    with pytest.raises(RejectLimitExceeded, match=r"1 of 162 inputs"):
        build_dataset(tree_for(images, "committed", etl=strict), run_id="a")


def test_sources_that_change_or_vanish_after_the_listing_are_counted(images: Path, tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    plan = plan_build(tree_for(tmp_path, "dataset"), run_id="a")
    first, second = sorted((tmp_path / "images" / "class_1").iterdir())[:2]
    first.unlink()
    second.write_bytes(second.read_bytes() + b"grown")
    rejections = [rejection for unit in plan.units for rejection in write_unit(unit, plan.task).rejections]
    assert {(rejection.key, str(rejection.reason)) for rejection in rejections} == {
        (f"class_1/{first.name}", "missing"),
        (f"class_1/{second.name}", "source_changed"),
    }


def test_duplicates_are_accepted_counted_and_in_one_split(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    original = next((tmp_path / "images" / "class_0").iterdir())
    for number in range(5):
        (tmp_path / "images" / "class_0" / f"copy{number}.png").write_bytes(original.read_bytes())
    dataset = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL))
    assert dataset.manifest.counts.duplicate_content == 5
    copies = {f"class_0/copy{number}.png" for number in range(5)} | {f"class_0/{original.name}"}
    splits = {
        split
        for split, info in dataset.manifest.splits.items()
        for sample in dataset.read_samples(split, info.num_rows)
        if sample.source in copies
    }
    assert len(splits) == 1


def test_channel_statistics_are_those_of_the_train_pixels(tmp_path: Path):
    import numpy as np

    write_images(tmp_path / "images", num_images=60)
    dataset = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL))
    pixels = np.stack([sample.image_HWC for sample in dataset.read_samples("train", 100)]).astype(np.float64)
    assert np.allclose(dataset.manifest.channel_mean, pixels.mean((0, 1, 2)), rtol=1e-12)
    assert np.allclose(dataset.manifest.channel_std, pixels.std((0, 1, 2)), rtol=1e-9)


def test_an_executor_with_another_decoder_is_refused(tmp_path: Path):
    import dataclasses

    write_images(tmp_path / "images", num_images=4)
    plan = plan_build(tree_for(tmp_path, "dataset"), run_id="a")
    other = dataclasses.replace(plan.task, decoder_id="simplejpeg-0")
    with pytest.raises(UsageError, match="the driver with simplejpeg-0"):
        write_unit(plan.units[0], other)


def test_an_error_of_a_task_reaches_the_driver_as_itself(tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "shards").write_bytes(b"a file where a folder must be")
    with pytest.raises(StorageError, match="cannot access .*/blocked/shards"):
        build_dataset(tree_for(tmp_path, "blocked"), run_id="a")


@pytest.mark.parametrize("inside", ["images", "images/class_0/work/dataset"])
def test_a_dataset_inside_its_own_source_is_refused(inside: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    with pytest.raises(UsageError, match="lies inside source.uri.*--workdir"):
        build_dataset(tree_for(tmp_path, inside), run_id="a")


@pytest.mark.parametrize("missing", ["source", "dataset"])
def test_an_unset_uri_is_named(missing: str, tmp_path: Path):
    tree = tree_for(tmp_path, "dataset")
    section = SourceConfig() if missing == "source" else DatasetConfig()
    with pytest.raises(UsageError, match=f"{missing}.uri is not set"):
        build_dataset(tree.model_copy(update={missing: section}), run_id="a")


def test_a_passing_fault_of_the_store_fails_the_run_and_is_forgotten(images: Path, monkeypatch: pytest.MonkeyPatch):
    plan = plan_build(tree_for(images, "faulty"), run_id="a")
    read, calls = LocalStore.read, []

    def sometimes(self: LocalStore, path: str) -> bytes:
        calls.append(path)
        if path.endswith(".png") and len(calls) == 5:
            raise StorageError("cannot access it: Input/output error")
        return read(self, path)

    monkeypatch.setattr(LocalStore, "read", sometimes)
    with pytest.raises(StorageError, match="Input/output"):
        write_unit(plan.units[0], plan.task)
    assert kept_result(plan.store, plan.units[0]) is None
    assert write_unit(plan.units[0], plan.task).rejections == ()


def test_what_passed_once_is_asked_again(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    tree = tree_for(tmp_path, "dataset", etl=ETL.model_copy(update={"max_changed_fraction": 0.5}))
    plan = plan_build(tree, run_id="a")
    gone = tmp_path / "images" / "class_1" / "00001.png"
    data = gone.read_bytes()
    gone.rename(tmp_path / "elsewhere.png")
    results = [write_unit(unit, plan.task) for unit in plan.units]
    (tmp_path / "elsewhere.png").rename(gone)
    assert gone.read_bytes() == data
    kept = [kept_result(plan.store, unit) for unit in plan.units]
    assert kept.count(None) == 1
    commit_results(plan, results)
    assert open_dataset(str(tmp_path / "dataset")).manifest.counts.by_reason == {"missing": 1}
    again = build_dataset(tree, run_id="b")
    assert not again.skipped and again.published
    assert again.manifest.version == 2 and again.manifest.counts.rejected == 0


def test_a_lost_shard_is_rebuilt_by_the_next_run(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    tree = tree_for(tmp_path, "dataset")
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)
    before = open_dataset(str(tmp_path / "dataset"))
    (tmp_path / "dataset" / before.shards[0].path).unlink()
    outcome = build_dataset(tree, run_id="again")
    assert (outcome.skipped, outcome.published, outcome.manifest.version) == (False, True, 2)
    assert outcome.manifest.content_digest == before.manifest.content_digest
    verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).raise_if_failed()


def test_touched_files_make_no_version_and_are_processed_once(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build_here(str(tmp_path / "images"), str(tmp_path / "dataset"), ETL)
    for file in (tmp_path / "images").rglob("*.png"):
        os.utime(file, ns=(1, 1))
    first = build_dataset(tree_for(tmp_path, "dataset"), run_id="touched")
    assert (first.manifest.version, first.published, first.num_units_kept) == (1, False, 0)
    num_files = sum(1 for _ in (tmp_path / "dataset").rglob("*"))
    second = build_dataset(tree_for(tmp_path, "dataset"), run_id="again")
    assert (second.manifest.version, second.num_units_kept) == (1, second.num_units)
    assert sum(1 for _ in (tmp_path / "dataset").rglob("*")) == num_files


def test_a_pinned_dataset_cannot_be_built(tmp_path: Path):
    write_images(tmp_path / "images", num_images=4)
    with pytest.raises(UsageError, match="names one version.*set dataset.uri to .*/dataset$"):
        build_dataset(tree_for(tmp_path, "dataset@2"), run_id="a")


def test_a_full_scratch_disk_names_the_path_and_the_bytes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    code = (
        "import resource, sys; from pathlib import Path; from tests.etl.test_job import *\n"
        "plan = plan_build(tree_for(Path(sys.argv[1]), 'dataset'), run_id='a')\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try: write_unit(plan.units[0], plan.task)\n"
        "except StorageError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert re.search(r"no room to write /.*\.parquet \(\d+ bytes\)", done.stdout), done.stderr


def test_executors_with_another_working_directory_read_and_write_the_same_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # Real executors: JVMs of their own, each in a folder of its own.
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", num_images=60)
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    tree = EtlTree(
        source=SourceConfig(uri="images"),
        dataset=DatasetConfig(uri="dataset"),
        etl=ETL,
        spark=SparkConfig(
            master="local-cluster[2,1,512]",
            etl=SparkApplicationConfig(conf={"spark.executor.memory": "512m", "spark.ui.enabled": "false"}),
        ),
    )
    outcome = build_dataset(tree, run_id="a")
    assert outcome.manifest.counts.accepted == 60
    verify_dataset(open_dataset("dataset"), deep=True).raise_if_failed()
