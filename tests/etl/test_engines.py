"""Every engine of the registry does the same work: equal bytes, whatever runs the units."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from contextlib import closing
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.commit import commit_results
from etl.config import EtlTree, SourceConfig
from etl.engines import ENGINES, EngineSettings, spark
from etl.engines.auto import MAX_LOCAL_IMAGES, choose_engine
from etl.engines.local import run_locally
from etl.engines.unit_json import encode_task, encode_unit
from etl.engines.unit_runner import UnitRunner, end_warm_process, run_in_warm_process
from etl.engines.worker_process import ForkServer
from etl.job import build_dataset
from etl.plan import plan_build
from etl.units.finished import Finished
from etl.units.pending import finished_units
from etl.units.shard_rows import RowCopier
from etl.units.units import WorkUnit
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.open import open_dataset
from shardmill.dataset.unit_result import UnitResult, decode_unit_result
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import StorageError
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.stores import open_store
from tests.etl.building import COLLIDING, ETL, digests
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
def test_an_image_that_crashes_its_decoder_is_refused_and_no_neighbour_is(
    engine: str, images: Path, monkeypatch: pytest.MonkeyPatch
):
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
        [server_process] = [int(each.split()[0]) for each in children(os.getpid()) if "import serve" in each]
        assert os.listdir(f"/proc/{server_process}/task") == [str(server_process)]
        finished = [run_unit(runner, plan.units[0])]
        os.kill(server_process, signal.SIGKILL)
        finished += [run_unit(runner, unit) for unit in plan.units[1:]]
        runner.close()
    assert unit_workers() == []
    manifest = commit_results(plan, Finished(plan.listing, finished))
    assert (manifest.content_digest, manifest.layout_digest) == (here.content_digest, here.layout_digest)


@pytest.mark.starts("program")
def test_a_fork_server_ends_a_worker_once_and_tells_how_it_ended(images: Path, capfd: pytest.CaptureFixture[str]):
    with closing(ForkServer()) as server:
        first, second = server.start_worker(), server.start_worker()
        # A worker without requests ends by itself.
        os.close(first.requests)
        assert server._end_worker(first.process_id, 10.0) == 0
        # Its id may be that of a stranger now: this one is the server's child no more, and another is still alive.
        assert server._end_worker(first.process_id, 0.0) is None
        assert server._end_worker(os.getppid(), 0.0) is None
        os.kill(second.process_id, signal.SIGSEGV)
        assert server._end_worker(second.process_id, 10.0) == -signal.SIGSEGV
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
    assert (choose_engine(1000, local), choose_engine(1000, cluster)) == ("local", "spark")
    assert (choose_engine(MAX_LOCAL_IMAGES, local), choose_engine(MAX_LOCAL_IMAGES + 1, local)) == ("local", "spark")
