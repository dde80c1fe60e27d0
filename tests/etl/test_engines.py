"""Engines: each gives the same rows, groups the same duplicates, and is started as its settings say."""

from __future__ import annotations

import bisect
import itertools
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pytest
from pyspark import SparkContext

from etl import engines
from etl.checks.duplicates import count_copies, find_copies
from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.engines import AUTO, ENGINES, MAX_LOCAL_IMAGES, EngineSettings, engine_that_runs, spark
from etl.engines.local import run_locally
from etl.engines.spark import group_on_spark, own_error
from etl.engines.unit_runner import ForkServer, UnitRunner, end_warm_process, run_in_warm_process
from etl.job import build_dataset
from etl.listing import list_source
from etl.listing.grouping import Group, GroupBy, SpilledRows, group_here
from etl.plan import plan_build
from etl.units.copy_rows import RowCopier
from etl.units.results import Finished, finished_units
from etl.units.units import WorkUnit, encode_task, encode_unit
from shardmill.dataset.build import UnitResult, decode_unit_result
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import CommitConflict, ShardmillError, StorageError, UsageError
from shardmill.formats.rows import RowSchema, StoredRow
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.jobs.spark import one_spark, spark_context
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import ImageSample, ShardInfo, SourceImage
from tests.etl.building import COLLIDING, ETL, digests, facts, images_of, listed
from tests.lab.datasets import build_here

CRASHING_OPENCV = """
import os, signal
import cv2
decode = cv2.imdecode
def crash_or_decode(data, *flags):
    image = decode(data, *flags)
    if image.shape[:2] == (19, 23):
        os.kill(os.getpid(), signal.SIGSEGV)
    return image
cv2.imdecode = crash_or_decode
"""


def local_tree(folder: Path, **etl: object) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        etl=ETL.model_copy(update={"engine": "local", "num_workers": 2, **etl}),
    )


@pytest.mark.starts("jvm", "program")
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_writes_the_shards_of_units_in_order(engine: str, images: Path, monkeypatch: pytest.MonkeyPatch):
    """Also with two keys of one hash: who finds them depends on the engine, what becomes of them does not."""
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    (images / "images" / "a").mkdir()
    for key in COLLIDING:
        shutil.copy(images / "images" / "class_0" / "00000.png", images / "images" / key)
    source = SourceConfig(uri=str(images / "images"))
    dataset = DatasetConfig(uri=str(images / f"by_{engine}"))
    etl = ETL.model_copy(update={"engine": engine})
    etl = etl.model_copy(update={"num_workers": 2})
    tree = EtlTree(source=source, dataset=dataset, etl=etl, spark=SparkConfig(master="local[2]"))
    here = open_dataset(build_here(source.uri, str(images / f"here_{engine}"), ETL)).manifest
    outcome = build_dataset(tree, run_id="r")
    assert (*digests(outcome), outcome.num_task_retries) == (here.content_digest, here.layout_digest, 0)
    assert outcome.engine == ("local" if engine == "auto" else engine)


@pytest.mark.starts("jvm", "program")
@pytest.mark.parametrize("engine", ["local", "spark"])
def test_what_stays_of_changed_shards_is_copied_by_tasks(engine: str, images: Path):
    """The driver copies no row, and the version is that of a full build."""
    tree = local_tree(images, engine=engine)
    build_dataset(tree, run_id="first")
    [gone, *_] = sorted((images / "images" / "class_1").glob("*.png"))
    gone.unlink()
    before = {shard.path for shard in open_dataset(tree.dataset.uri).shards}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RowCopier, "copy", lambda *arguments: pytest.fail("copied in the driver"))
        manifest = build_dataset(tree, run_id="second").manifest
    whole = open_dataset(build_here(str(images / "images"), str(images / "whole"), ETL)).manifest
    assert (manifest.operation, manifest.content_digest) == ("incremental", whole.content_digest)
    dataset = open_dataset(tree.dataset.uri)
    copied = {shard.path for shard in dataset.shards} - before
    assert copied and all("/kept-" in path for path in copied)
    verify_dataset(dataset, deep=True).raise_if_failed()
    assert not list(open_store(tree.dataset.uri).list("pending"))


@pytest.mark.starts("program")
def test_an_image_that_hangs_its_decoder_costs_one_rejection_and_no_neighbour(images: Path):
    """A worker that decodes itself is ended by the image, and its unit is repeated by one that decodes in a child."""
    big = np.random.default_rng(0).integers(0, 255, (6000, 6000, 3), np.uint8)
    assert cv2.imwrite(str(images / "images" / "class_1" / "slow.png"), big)
    # Less time than this one needs, and far more than the small ones do.
    outcome = build_dataset(local_tree(images, decode_timeout_seconds=0.15, max_source_bytes=10**9), run_id="r")
    assert outcome.manifest.counts.by_reason == {"decoder_timeout": 1, "not_an_image": 1, "not_an_image_name": 1}
    assert outcome.manifest.counts.accepted == 160


@pytest.mark.starts("program")
def test_an_image_that_needs_too_much_memory_is_refused_by_name(images: Path):
    assert cv2.imwrite(str(images / "images" / "class_1" / "bomb.png"), np.zeros((7000, 7000, 3), np.uint8))
    outcome = build_dataset(local_tree(images, decode_memory_bytes=100_000_000), run_id="r")
    assert outcome.manifest.counts.by_reason == {"decoder_memory": 1, "not_an_image": 1, "not_an_image_name": 1}


@pytest.mark.starts("program")
@pytest.mark.parametrize("engine", ["local", pytest.param("spark", marks=pytest.mark.drill)])
def test_an_image_that_crashes_its_decoder_is_refused_and_no_neighbour_is(engine: str, images: Path, monkeypatch):
    """No file is known that crashes OpenCV, so every process of the job gets one that crashes at images of 23 x 19."""
    (images / "sitecustomize.py").write_text(CRASHING_OPENCV)
    monkeypatch.syspath_prepend(images)
    assert cv2.imwrite(str(images / "images" / "class_1" / "crashing.png"), np.zeros((19, 23, 3), np.uint8))
    outcome = build_dataset(local_tree(images, engine=engine), run_id="r")
    assert outcome.manifest.counts.by_reason == {"decoder_crash": 1, "not_an_image": 1, "not_an_image_name": 1}
    assert outcome.manifest.counts.accepted == 160
    refused = {each.key: each for each in read_rejections(open_store(str(images / "dataset")), outcome.manifest)}
    assert refused["class_1/crashing.png"].detail == "ends the decoding process by SIGSEGV"
    assert outcome.num_task_retries == 1
    verify_dataset(open_dataset(str(images / "dataset")), deep=True).raise_if_failed()


@pytest.mark.starts("program")
def test_a_workers_error_reaches_the_driver_as_itself_and_no_worker_is_left(images: Path):
    (images / "dataset").mkdir()
    (images / "dataset" / "shards").write_bytes(b"a file where a folder must be")
    with pytest.raises(StorageError, match="cannot access .*/dataset/shards"):
        build_dataset(local_tree(images), run_id="r")
    assert unit_workers() == []


@pytest.mark.starts("program")
def test_a_killed_worker_is_replaced_and_changes_nothing(images: Path):
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    tree = local_tree(images)
    plan = plan_build(tree, run_id="r")
    results = run_locally(plan.units, plan.task, EngineSettings(tree.spark, num_workers=2))
    finished = [next(results)]
    os.kill(unit_workers()[0], signal.SIGKILL)
    finished += results
    manifest = commit_results(plan, Finished(plan.listing, finished))
    assert (manifest.content_digest, manifest.layout_digest) == (here.content_digest, here.layout_digest)
    assert unit_workers() == []


@pytest.mark.starts("program")
def test_a_fork_server_forks_from_a_single_thread_and_its_loss_costs_nothing_but_time(images: Path):
    here = open_dataset(build_here(str(images / "images"), str(images / "here"), ETL)).manifest
    plan = plan_build(local_tree(images), run_id="r")
    with closing(ForkServer()) as server:
        runner = UnitRunner(encode_task(plan.task), server.start_worker)
        server_process = server._process.pid
        assert os.listdir(f"/proc/{server_process}/task") == [str(server_process)]
        finished = [run_unit(runner, plan.units[0])]
        os.kill(server_process, signal.SIGKILL)
        finished += [run_unit(runner, unit) for unit in plan.units[1:]]
        runner.close()
    assert unit_workers() == []
    manifest = commit_results(plan, Finished(plan.listing, finished))
    assert (manifest.content_digest, manifest.layout_digest) == (here.content_digest, here.layout_digest)


@pytest.mark.starts("program")
def test_a_fork_server_ends_a_worker_once_and_reports_how_it_ended(images: Path, capfd: pytest.CaptureFixture[str]):
    with closing(ForkServer()) as server:
        first, second = server.start_worker(), server.start_worker()
        # A worker without requests ends by itself.
        os.close(first.requests)
        assert server._end_worker(first.process_id, 120.0) == 0
        # Its id may be that of a stranger now: this one is the server's child no more, and another is still alive.
        assert server._end_worker(first.process_id, 0.0) is None
        assert server._end_worker(os.getppid(), 0.0) is None
        os.kill(second.process_id, signal.SIGSEGV)
        assert server._end_worker(second.process_id, 120.0) == -signal.SIGSEGV
        third = server.start_worker()
        assert server._end_worker(third.process_id, 0.0) is None
    assert "Error" not in capfd.readouterr().err


def run_unit(runner: UnitRunner, unit: WorkUnit) -> UnitResult:
    runner.send(encode_unit(unit))
    while (result := runner.receive()) is None:
        pass
    return decode_unit_result(result)


@pytest.mark.starts("program")
def test_a_warm_process_runs_unit_after_unit_and_is_replaced_if_it_is_lost(images: Path):
    """What a task of Spark's does, without Spark."""
    plan = plan_build(local_tree(images), run_id="r")
    first, second, third, *rest = map(encode_unit, plan.units)
    try:
        run_in_warm_process(encode_task(plan.task), [first])
        [worker] = unit_workers()
        run_in_warm_process(encode_task(plan.task), [second])
        assert unit_workers() == [worker]
        os.kill(worker, signal.SIGKILL)
        run_in_warm_process(encode_task(plan.task), [third, *rest])
        assert unit_workers() != [worker]
        (images / "images").rename(images / "gone")
        with pytest.raises(StorageError, match="does not see the source"):
            run_in_warm_process(encode_task(plan.task), [first])
        assert unit_workers() == []
    finally:
        end_warm_process()
    here = open_dataset(build_here(str(images / "gone"), str(images / "here"), ETL)).manifest
    manifest = commit_results(plan, Finished(plan.listing, finished_units(plan.store, plan.units)))
    assert (manifest.content_digest, manifest.layout_digest) == (here.content_digest, here.layout_digest)


@pytest.mark.starts("program")
def test_a_unit_that_an_ended_process_never_read_is_run_again(images: Path):
    plan = plan_build(local_tree(images), run_id="r")
    runner = UnitRunner(encode_task(plan.task))
    try:
        [worker] = unit_workers()
        os.kill(worker, signal.SIGKILL)
        os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
        result = run_unit(runner, plan.units[0])
    finally:
        runner.close()
    assert result.unit_index == plan.units[0].index


def unit_workers() -> list[int]:
    """The processes of this one's `UnitRunner`s, whether it started them or its fork server has."""
    started = [(int(each.split()[0]), each) for each in children(os.getpid()) if "unit_worker" in each]
    servers = [pid for pid, line in started if "import serve" in line]
    forked = [int(each.split()[0]) for server in servers for each in children(server)]
    return sorted({pid for pid, _ in started} - set(servers)) + forked


def children(parent: int) -> list[str]:
    """`pid command line` of every process that `parent` started."""
    found = subprocess.run(["ps", "-ww", "-o", "pid,args", "--ppid", str(parent)], capture_output=True, text=True)
    return [line.strip() for line in found.stdout.splitlines()[1:]]


def test_auto_takes_spark_for_a_cluster_and_for_very_many_images():
    local, cluster = (EngineSettings(SparkConfig(master=master), 0) for master in ("local[*]", "spark://host:7077"))
    assert [engine_that_runs("auto", 1000, each) for each in (local, cluster)] == ["local", "spark"]
    chosen = [engine_that_runs("auto", number, local) for number in (MAX_LOCAL_IMAGES, MAX_LOCAL_IMAGES + 1)]
    assert chosen == ["local", "spark"]


CLASS_NAMES = ("a", "b")
SCHEMA = RowSchema("raw", (1, 1, 1), CLASS_NAMES)
CONFIG = EtlConfig()
# Of the shards: their first rows, and the end of the last; their splits.
_BOUNDS, _SPLITS = (0, 7, 8, 30, 60), ("train", "test", "train", "validation")


def row(number: int, source_sha256: str, label_id: int) -> StoredRow:
    source = SourceImage(f"{number}.png", 1, label=CLASS_NAMES[label_id], sample_id=number)
    return StoredRow.of(source, label_id, ImageSample(b"x", 1, 1, 1, source_sha256, (120,), (14400,)))


def in_small_parts(group: Group) -> Group:
    return lambda asked: group(replace(asked, rows_per_part=9))


@pytest.fixture
def rows() -> list[StoredRow]:
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Few digests, so that they repeat; of each prefix there are two, so that a prefix alone proves nothing.
    prefixes = [rng.randbytes(8).hex() for _ in range(20)]
    digests = [prefix + rest for prefix in prefixes for rest in ("00" * 24, "11" * 24)]
    return [row(number, rng.choice(digests), rng.randrange(2)) for number in rng.sample(range(10_000), 60)]


def write_shards(store: Store, rows: list[StoredRow]) -> list[ShardInfo]:
    bounds = list(itertools.pairwise(_BOUNDS))
    return [
        publish_shard(store, split, f"{first}", "parquet", [rows[first:end]], schema=SCHEMA)
        for split, (first, end) in zip(_SPLITS, bounds, strict=True)
    ]


def counted_by_hand(rows: list[StoredRow]) -> DuplicateCounts:
    times = Counter(row.sample.source_sha256 for row in rows)
    labels = {digest: {row.label_id for row in rows if row.sample.source_sha256 == digest} for digest in times}
    conflicting = sum(count for digest, count in times.items() if len(labels[digest]) > 1)
    splits = {digest: set() for digest in times}
    for place, each in enumerate(rows):
        splits[each.sample.source_sha256].add(_SPLITS[bisect.bisect(_BOUNDS, place) - 1])
    leaked = sum(count for digest, count in times.items() if len(splits[digest]) > 1)
    return DuplicateCounts(len(rows) - len(times), conflicting, leaked)


def copies_by_hand(rows: list[StoredRow]) -> dict[str, str]:
    """Key of a copy -> key of its original."""
    originals: dict[str, str] = {}
    for each in rows:
        digest = each.sample.source_sha256
        originals[digest] = min(originals.get(digest, each.source.key), each.source.key)
    return {
        each.source.key: originals[each.sample.source_sha256]
        for each in rows
        if originals[each.sample.source_sha256] != each.source.key
    }


def test_counts_and_copies_are_those_of_all_rows(rows: list[StoredRow], tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    for group in (group_here, in_small_parts(group_here)):
        assert count_copies(store, shards, CONFIG, group) == counted_by_hand(rows)
        found = pa.concat_tables(find_copies(store, shards, CONFIG, group)).to_pylist()
        assert {each["source"]: each["original"] for each in found} == copies_by_hand(rows)
        places = {(each["shard"], each["row"]): each["source"] for each in found}
        assert all(rows[_BOUNDS[shard] + number].source.key == key for (shard, number), key in places.items())
    assert count_copies(store, [], CONFIG, group_here) == DuplicateCounts(0, 0, 0)


@pytest.mark.starts("jvm", "program")
def test_spark_gives_what_one_machine_gives_and_leaves_no_file(rows: list[StoredRow], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    settings = EngineSettings(SparkConfig(master="local[2]"), 0)

    def on_spark(asked: GroupBy) -> Iterator[pa.Table]:
        return group_on_spark(asked, settings)

    with one_spark():
        here, there = (
            list(find_copies(store, shards, CONFIG, in_small_parts(each))) for each in (group_here, on_spark)
        )
        assert len(here) == len(there) == 7
        assert here == there
        # And a listing, which the tasks see only because its ids and its images are copied below the dataset.
        keys = [*COLLIDING, *(f"a/{number % 20}.jpg" for number in range(30))]
        monkeypatch.setattr(list_source, "SEGMENT_ROWS", 5)
        listings = [
            listed(
                *([SourceImage(key, 1)] for key in keys),
                group=lambda asked, group=group: in_small_parts(group)(replace(asked, dataset_uri=store.uri)),
            )
            for group in (group_here, on_spark)
        ]
        assert facts(listings[0]) == facts(listings[1]) and images_of(listings[0]) == images_of(listings[1])
        assert listings[0].segments == listings[1].segments and len(listings[0].segments) == 4
        assert [len(listing.rejections) for listing in listings] == [10, 10]
        with spark_context("another", settings.spark, {}) as context:
            application = context.applicationId
        assert count_copies(store, shards, CONFIG, in_small_parts(on_spark)) == counted_by_hand(rows)
        with spark_context("another", settings.spark, {}) as context:
            assert context.applicationId == application
    assert SparkContext._active_spark_context is None
    assert [file.path for file in store.list("listings")] == []


def test_a_part_is_read_in_the_order_in_which_its_rows_were_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("etl.listing.grouping.ROWS_PER_PART", 10)
    spilled = SpilledRows(tmp_path, pa.schema([("number", pa.int64())]))
    numbers = pa.array(range(95))
    spilled.add(pa.table([numbers[:0]], names=["number"]), np.empty(0, np.int64))
    assert spilled.read(0).num_rows == 0
    for first in range(0, 95, 4):
        part = pa.table([numbers[first : first + 4]], names=["number"])
        spilled.add(part, part.column("number").to_numpy() % 3)
    assert [spilled.read(part).column("number").to_pylist() for part in range(4)] == [
        list(range(part, 95, 3)) if part < 3 else [] for part in range(4)
    ]


def test_without_a_cluster_auto_groups_any_number_of_rows_here(rows: list[StoredRow], tmp_path: Path, monkeypatch):
    monkeypatch.setattr(engines, "MAX_LOCAL_IMAGES", 1)
    monkeypatch.setattr(spark, "MIN_ROWS", 0)
    monkeypatch.setattr(spark, "open_spark", None)
    store = open_store(tmp_path / "dataset")
    shards = write_shards(store, rows)
    settings = EngineSettings(SparkConfig(master="local[2]"), 0)
    counts = count_copies(store, shards, CONFIG, lambda asked: AUTO.group_rows(asked, settings))
    assert counts == counted_by_hand(rows)


def test_a_disk_that_is_full_of_rows_is_one_line_of_storage(tmp_path: Path):
    spilled = SpilledRows(tmp_path, pa.schema([("number", pa.int64())]))
    (tmp_path / "part-000000").symlink_to("/dev/full")
    spilled.add(pa.table([pa.array(range(10))], names=["number"]), np.zeros(10, np.int64))
    with pytest.raises(StorageError, match=r"no space to write .*/part-000000 \(\d+ bytes\)"):
        spilled.read(0)


# As PySpark 4.0 reports it.
FAILED = """An error occurred while calling z:org.apache.spark.api.python.PythonRDD.collectAndServe.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 0.0 failed 4 times, most recent \
failure: Lost task 0.3 in stage 0.0 (TID 3) (worker-7.example executor 0): {cause}
\tat org.apache.spark.api.python.BasePythonRunner$ReaderIterator.handlePythonException(PythonRunner.scala:581)
\tat java.base/java.lang.Thread.run(Thread.java:840)

Driver stacktrace:
\tat org.apache.spark.scheduler.DAGScheduler.$anonfun$abortStage$3(DAGScheduler.scala:2935)
\t... 1 more
"""
PYTHON = """org.apache.spark.api.python.PythonException: Traceback (most recent call last):
  File "/opt/spark/python/lib/pyspark.zip/pyspark/worker.py", line 1239, in main
    func, profiler, deserializer, serializer = read_command(pickleSer, infile)
{raised}
"""


def error_of_java(cause: str) -> ShardmillError:
    return own_error(RuntimeError(FAILED.format(cause=cause)))


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        ("botocore.exceptions.ClientError: An error", StorageError, "botocore.exceptions.ClientError: An error"),
        ("pyarrow.lib.ArrowInvalid: no footer", StorageError, "try: pyarrow.lib.ArrowInvalid: no footer; nothing"),
        ("KeyError: 'x'", StorageError, "on every try: KeyError: 'x'; nothing was committed"),
        ("some.lib.Timeout\n", StorageError, "on every try: some.lib.Timeout; nothing"),
        ("shardmill.errors.CommitConflict: another; was first", CommitConflict, "another; was first"),
        ("ModuleNotFoundError: No module named 'cv2'", UsageError, "worker-7.example cannot .*'cv2'; expected Py"),
        (
            "pyspark.errors.exceptions.base.PySparkRuntimeError: [PYTHON_VERSION_MISMATCH] Python in worker has "
            "different version: 3.9 than that in driver: 3.11, PySpark cannot run with different minor versions.",
            UsageError,
            "host worker-7.example cannot run our tasks: .*3.9 than that in driver.*set spark.pyspark.python",
        ),
    ],
)  # fmt: skip
def test_the_cause_is_pythons_last_line(raised: str, kind: type[ShardmillError], said: str):
    error = error_of_java(PYTHON.format(raised=raised))
    assert type(error) is kind
    with pytest.raises(kind, match=said):
        raise error


@pytest.mark.parametrize(
    ("cause", "kind", "said"),
    [
        ('java.io.IOException: Cannot run program "python3.9": error=2, No such file', UsageError, "3.9.*set spark"),
        ("ExecutorLostFailure (executor 0 exited caused by one of the running tasks)", StorageError, "on every try: "),
    ],
)  # fmt: skip
def test_a_cause_of_java_is_reported_without_its_stack(cause: str, kind: type[ShardmillError], said: str):
    error = error_of_java(cause)
    assert type(error) is kind and "\tat " not in str(error) and "more" not in str(error).split("; ")[0]
    with pytest.raises(kind, match=said):
        raise error
