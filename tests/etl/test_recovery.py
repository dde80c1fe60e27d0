"""Builds that end early, by an error, a kill or a full disk, and are finished by the same command."""

from __future__ import annotations

import json
import os
import random
import re
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from etl.commit import commit_results
from etl.config import EtlConfig
from etl.engines import ENGINES
from etl.job import build_dataset
from etl.plan import plan_build
from etl.units.results import Finished, kept_result
from etl.units.write_unit import write_unit
from shardmill.dataset.build import PENDING
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.dataset.versions import latest_version
from shardmill.errors import AccessDenied, StorageError
from shardmill.failpoints import FAILPOINTS, VARIABLE
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from shardmill.loader.samples import read_samples
from shardmill.stores import open_store
from tests.etl.building import ETL, Recorder, digests, tree_for
from tests.lab.commands import BIN, ENVIRONMENT, MODULES
from tests.lab.datasets import build_here, write_images
from tests.lab.scale import in_drills, usually
from tests.polling import polled
from tests.quick_start.forked import Program, run_forked
from tests.services.faulty_store import FaultyStore
from tests.services.marked import MARK, end_marked, marked

SPARK = ETL.model_copy(update={"engine": "spark"})


@pytest.mark.drill
def test_tasks_whose_python_workers_are_killed_are_retried_and_change_nothing(images: Path):
    # A unit stops when it has published something, so that the attempt is lost half-way. It goes on by its loss alone.
    stopped = images / "stopped"
    conf = {f"spark.executorEnv.{VARIABLE}": f"stop:shard_mid@{stopped}"}
    # local[2,4]: two slots, and up to four tries for each task, as on a cluster.
    spark = SparkConfig(master="local[2,4]", etl=SparkApplicationConfig(conf=conf))
    tree = tree_for(images, "retried", spark, SPARK)
    killed: list[int] = []
    done = threading.Event()

    def kill_workers() -> None:
        while not done.wait(0.01):
            if not stopped.exists():
                continue
            for worker in set(workers_of_stopped_units()).difference(killed):
                # The next one stops as well. With three lost, a task still has one try left.
                if len(killed) < 2:
                    stopped.unlink()
                os.kill(worker, signal.SIGKILL)
                killed.append(worker)
                break

    killer = threading.Thread(target=kill_workers)
    killer.start()
    try:
        outcome = build_dataset(tree, run_id="a")
    finally:
        done.set()
        killer.join()
    assert outcome.num_task_retries == len(killed) == 3
    here = open_dataset(build_here(str(images / "images"), str(images / "undisturbed"), ETL)).manifest
    assert digests(outcome) == (here.content_digest, here.layout_digest)
    verify_dataset(open_dataset(str(images / "retried")), deep=True).raise_if_failed()


def workers_of_stopped_units() -> list[int]:
    """Spark's Python workers below this process that have a stopped unit process."""
    command = ["ps", "-ww", "-eo", "pid,ppid,stat,args"]
    table = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # One that begins or ends has no arguments.
    rows = [row for line in table.splitlines()[1:] if len(row := line.split(None, 3)) == 4]
    parents = {int(pid): int(parent) for pid, parent, *_ in rows}
    daemons = {int(pid) for pid, _, _, args in rows if "pyspark.daemon" in args}
    stopped = {int(parent) for _, parent, state, args in rows if state.startswith("T") and "unit_worker" in args}
    # Tests beside this one have their own.
    return [pid for pid in stopped & daemons if os.getpid() in ancestors(pid, parents)]


def ancestors(pid: int, parents: dict[int, int]) -> set[int]:
    found: set[int] = set()
    while pid in parents:
        pid = parents[pid]
        found.add(pid)
    return found


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


@pytest.mark.drill
def test_sigkill_of_the_whole_run_leaves_nothing_visible_and_a_rerun_completes(images: Path):
    root = images / "killed"
    config = images / "killed.toml"
    config.write_text(
        f'[source]\nuri = "{images}/images"\n[dataset]\nuri = "{root}"\n'
        '[etl]\nengine = "spark"\nimage_size = 16\nencoding = "png"\nunit_min_images = 20\nchunk_bytes = 8000\n'
        'formats = ["parquet", "tfrecord"]\n[spark]\nmaster = "local[1]"\n'
    )
    command = [sys.executable, "etl/job.py", "--config", str(config), "--workdir", str(images / "work")]
    # The first unit stops after it has put its record: nothing changes while the run is killed, or afterwards.
    environment = {**os.environ, VARIABLE: f"stop:task_report@{images}/stopped"}
    run = subprocess.Popen(
        command, env=environment, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )
    try:
        while not (images / "stopped").exists():
            assert run.poll() is None
            time.sleep(0.01)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    num_finished = len(list(root.glob(f"{PENDING}/*.json")))
    assert latest_version(open_store(root)) == 0
    outcome = build_dataset(tree_for(images, "killed", etl=SPARK), run_id="again")
    assert outcome.num_units_kept == num_finished == 1
    here = open_dataset(build_here(str(images / "images"), str(images / "whole"), ETL)).manifest
    assert digests(outcome) == (here.content_digest, here.layout_digest)


def test_a_passing_fault_of_the_store_fails_the_run_and_is_forgotten(images: Path, faulty: dict[str, Any]):
    plan = plan_build(tree_for(images, "dataset", scheme="faulty://"), run_id="a")
    calls = []

    def sometimes(store: FaultyStore, path: str) -> bytes:
        calls.append(path)
        if len(calls) == 5:
            raise StorageError("cannot access it: Input/output error")
        return store.sound.read(path)

    faulty["read"] = sometimes
    with pytest.raises(StorageError, match="Input/output"):
        write_unit(plan.units[0], plan.task)
    assert kept_result(plan.store, plan.units[0]) is None
    assert write_unit(plan.units[0], plan.task).rejections == ()


def test_a_check_that_passed_once_is_repeated(tmp_path: Path):
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
    commit_results(plan, Finished(plan.listing, results))
    assert open_dataset(str(tmp_path / "dataset")).manifest.counts.by_reason == {"missing": 1}
    again = build_dataset(tree, run_id="b")
    assert not again.skipped and again.published
    assert again.manifest.version == 2 and again.manifest.counts.rejected == 0


def test_what_stays_unreadable_is_read_again_alone_and_rebuilds_nothing(tmp_path: Path, faulty: dict[str, Any]):
    write_images(tmp_path / "images", num_images=60)
    locked = "class_1/00001.png"

    def denied(store: FaultyStore, path: str) -> bytes:
        if path == locked:
            raise AccessDenied(f"{path} may not be read")
        return store.sound.read(path)

    faulty["read"] = denied
    etl = ETL.model_copy(update={"max_unreadable_fraction": 0.1})
    tree = tree_for(tmp_path, "dataset", etl=etl, scheme="faulty://")
    first = build_dataset(tree, run_id="1").manifest
    assert first.counts.by_reason == {"unreadable": 1}
    for run_id in ("2", "3"):
        again = build_dataset(tree, run_id=run_id)
        assert (again.manifest, again.published, again.num_images_read) == (first, False, 1)
    # Beside a change it is read once, too, and every shard stays.
    before = {shard.path for shard in open_dataset(str(tmp_path / "dataset")).shards}
    shutil.copy(tmp_path / "images" / "class_0" / "00000.png", tmp_path / "images" / "class_0" / "new.png")
    grown = build_dataset(tree, run_id="4")
    assert (grown.manifest.version, grown.manifest.counts.rejected, grown.num_images_read) == (2, 1, 2)
    assert before <= {shard.path for shard in open_dataset(str(tmp_path / "dataset")).shards}
    del faulty["read"]
    done = build_dataset(tree, run_id="5")
    assert (done.manifest.version, done.manifest.counts.rejected, done.num_images_read) == (3, 0, 1)
    verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).raise_if_failed()


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


@pytest.mark.starts("program")
def test_a_full_disk_names_the_path_and_the_bytes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    done = subprocess.run(
        [sys.executable, "-m", "tests.programs.build_on_a_full_disk", str(tmp_path)], capture_output=True, text=True
    )
    assert re.search(r"no space to write /.*/dataset/.*\.parquet \(\d+ bytes\)", done.stdout), done.stderr


def test_a_lost_shard_whose_sources_are_gone_too_is_left_out_by_the_next_run(tmp_path: Path):
    for split, num_images in (("train", 12), ("test", 6)):
        write_images(tmp_path / "images" / split, num_images=num_images)
    tree = tree_for(tmp_path, "dataset")
    build_dataset(tree, run_id="1")
    for shard in open_dataset(str(tmp_path / "dataset")).shards:
        if shard.split == "test":
            (tmp_path / "dataset" / shard.path).unlink()
    shutil.rmtree(tmp_path / "images" / "test")
    # Six of eighteen: rows of lost shards count among those that vanished.
    with pytest.raises(StorageError, match="6 of the 18 images of version 1 .*max_vanished_fraction allows 0.3"):
        strict = ETL.model_copy(update={"max_vanished_fraction": 0.3})
        build_dataset(tree_for(tmp_path, "dataset", etl=strict), run_id="2")
    assert build_dataset(tree, run_id="3").manifest.version == 2
    verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).raise_if_failed()
    assert build_dataset(tree, run_id="4").skipped


ROOT = Path(__file__).parents[2]
_SETTINGS = EtlConfig(engine="local", num_workers=2, image_size=16, encoding="png", unit_min_images=8)
_NUM_OLD = 24
_NUM_KILLS = usually(1, 30)
_WORKER_POINTS = ("decode", "shard_open", "shard_mid", "shard_close", "task_report")


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 24 images and version 1 of them in `dataset`, then 12 images more; `full` is built of all."""
    return write_before(tmp_path_factory.mktemp("before"), num_images=36)


def write_before(folder: Path, num_images: int) -> Path:
    write_images(folder / "images", num_images=_NUM_OLD)
    build_here(str(folder / "images"), str(folder / "dataset"), _SETTINGS)
    write_images(folder / "more", num_images=num_images, seed=1)
    for path in (folder / "more").rglob("*.png"):
        if int(path.stem) >= _NUM_OLD:
            shutil.copy(path, folder / "images" / path.relative_to(folder / "more"))
    build_here(str(folder / "images"), str(folder / "full"), _SETTINGS)
    return folder


@pytest.fixture
def folder(before: Path, tmp_path: Path) -> Path:
    shutil.copytree(before / "dataset", tmp_path / "dataset")
    return tmp_path


def run_etl(before: Path, folder: Path, failpoint: str = "") -> subprocess.CompletedProcess[str]:
    """`spark-submit etl/job.py` without Spark, to its end; forked from a process that has imported the job."""
    environment = {**os.environ, VARIABLE: failpoint}
    _, *arguments = map(str, etl_command(before, folder))
    return run_forked(MODULES, Program("etl.job:main", arguments, str(folder), environment), 200)


def etl_command(before: Path, folder: Path) -> list[str | Path]:
    config = folder / "config.toml"
    config.write_text(
        f'[source]\nuri = "{before}/images"\n[dataset]\nuri = "{folder}/dataset"\n[etl]\nengine = "local"\n'
        'num_workers = 2\nimage_size = 16\nencoding = "png"\nunit_min_images = 8\n'
    )
    return [sys.executable, ROOT / "etl" / "job.py", "--config", config, "--workdir", folder / "work"]


def look_at(root: Path, num_images: int = 36) -> None:
    """The dataset as a reader opens it: one whole version, and the old one behind it."""
    dataset = open_dataset(str(root))
    assert dataset.manifest.counts.accepted == {1: _NUM_OLD, 2: num_images}[dataset.pin.version]
    old = open_dataset(f"{root}@1")
    assert len(read_samples(old, "train", 1000)) == old.manifest.splits["train"].num_rows


def check_finished(before: Path, folder: Path) -> None:
    """Version 2 is what a full build makes of the same images, nothing lost or doubled."""
    done, full = open_dataset(str(folder / "dataset")), open_dataset(str(before / "full"))
    assert (done.pin.version, done.manifest.content_digest) == (2, full.manifest.content_digest)
    verify_dataset(done, deep=True).raise_if_failed()


@pytest.mark.drill
@pytest.mark.parametrize("point", _WORKER_POINTS)
def test_a_worker_that_is_killed_once_costs_the_build_nothing_but_time(before: Path, folder: Path, point: str):
    with polled(partial(look_at, folder / "dataset")):
        done = run_etl(before, folder, f"{point}@{folder}/once")
        assert done.returncode == 0, done.stderr
    assert (folder / "once").exists()
    assert json.loads(done.stdout)["sections"]["etl"]["num_task_retries"] == 1
    check_finished(before, folder)


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "point", ["manifest_put", "decode:5", *in_drills("list", "post_commit", "shard_open:2", *_WORKER_POINTS[2:])]
)
def test_a_build_that_is_killed_is_finished_by_the_same_command(before: Path, folder: Path, point: str):
    name = point.partition(":")[0]
    assert name in FAILPOINTS
    with polled(partial(look_at, folder / "dataset")):
        # A worker that dies twice ends the build with exit 4; the others kill the driver itself.
        killed = run_etl(before, folder, point)
        assert killed.returncode == (4 if name in _WORKER_POINTS else -9), killed.stderr
        named = (
            "ERROR 4: the process of work unit \\d+ ended twice .*the last image that it started was "
            "class_\\d/\\d+\\.png"
        )
        assert name not in _WORKER_POINTS or re.search(named, killed.stderr), killed.stderr
        assert open_dataset(str(folder / "dataset")).pin.version == (2 if name == "post_commit" else 1)
        again = run_etl(before, folder)
        assert again.returncode == 0, again.stderr
    check_finished(before, folder)


@pytest.mark.drill
@pytest.mark.timeout(600 + 60 * _NUM_KILLS)
def test_a_build_that_is_killed_at_any_time_loses_nothing(tmp_path: Path):
    seed, num_images = random.SystemRandom().randrange(2**32), 400
    print(f"seed {seed}")
    rng, before = random.Random(seed), write_before(tmp_path / "before", num_images)
    num_units = len(plan_build(tree_for(before, "other", etl=_SETTINGS), run_id="r").units)
    for number in range(_NUM_KILLS):
        folder = tmp_path / f"{number}"
        shutil.copytree(before / "dataset", folder / "dataset")
        with polled(partial(look_at, folder / "dataset", num_images)):
            print(kill_at_any_time(before, folder, rng, num_units))
            again = run_etl(before, folder)
            assert again.returncode == 0, again.stderr
        check_finished(before, folder)
        assert not list(folder.glob("dataset/pending/*.json"))
        shutil.rmtree(folder)


def kill_at_any_time(before: Path, folder: Path, rng: random.Random, num_units: int) -> str:
    """A build that is killed a while after a number of its units have finished; where that was."""
    wanted, seconds, mark = rng.randint(0, num_units), rng.uniform(0, 0.5), f"{folder} killed"
    with open(folder / "output", "w") as output:
        command, environment = etl_command(before, folder), {**os.environ, MARK: mark}
        build = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)
    while not list(folder.glob("dataset/leases/*")) or finished_units(folder) < wanted:
        if build.poll() is not None:
            break  # it was too quick for us to see so many
        time.sleep(0.005)
    with suppress(subprocess.TimeoutExpired):
        build.wait(seconds)
    build.kill()
    status, deadline = build.wait(), time.monotonic() + 240
    while left := marked(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
    assert status in (0, -signal.SIGKILL), (folder / "output").read_text()
    version = open_dataset(str(folder / "dataset")).pin.version
    return f"{seconds:.2f} s after {wanted} units: status {status}, version {version}, {finished_units(folder)} records"


def finished_units(folder: Path) -> int:
    return len(list(folder.glob("dataset/pending/*.json")))


_NUM_IMAGES, _OF_A_UNIT, _IMAGE_BYTES = 144, 8, 256 * 256 * 3
_NUM_WORKERS = 2


def bytes_below(folder: Path, mark: str = "") -> int:
    """Of its files; with those that processes with the mark still have open, and nobody can see."""
    paths = [os.path.join(directory, name) for directory, _, names in os.walk(folder) for name in names]
    for descriptors in (f"/proc/{pid}/fd" for pid in (marked(mark) if mark else ())):
        # It may have ended.
        with suppress(OSError):
            paths += [f"{descriptors}/{number}" for number in os.listdir(descriptors)]
    found: dict[int, int] = {}
    for path in paths:
        with suppress(OSError):
            if not path.startswith("/proc/") or os.readlink(path).startswith(str(folder)):
                status = os.stat(path)
                found[status.st_ino] = status.st_blocks * 512
    return sum(found.values())


@pytest.mark.starts("program")
@pytest.mark.parametrize("engine", ["local", *in_drills(*(name for name in ENGINES if name not in ("auto", "local")))])
def test_local_disks_hold_no_more_than_the_units_under_way(engine: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=_NUM_IMAGES, image_size=256)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    settings = {
        "etl.engine": engine, "etl.image_size": 256, "etl.encoding": "raw", "etl.unit_min_images": _OF_A_UNIT,
        "spark.master": f"local[{_NUM_WORKERS}]", "etl.num_workers": _NUM_WORKERS,
    }  # fmt: skip
    chosen = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [str(BIN / "shardmill"), "etl", str(tmp_path / "images"), "--workdir", str(tmp_path / "work")]
    mark = f"disks-{secrets.token_hex(8)}"
    java = f"-Djava.io.tmpdir={scratch}"
    # One unit is stopped until the size of the scratch folder has been measured.
    said, stopped, peak = tmp_path / "said", tmp_path / "stopped", 0
    own = {"TMPDIR": str(scratch), "SPARK_LOCAL_DIRS": str(scratch), "JAVA_TOOL_OPTIONS": java, MARK: mark}
    own[VARIABLE] = f"stop:shard_open@{stopped}"
    try:
        with said.open("w") as output:
            job = subprocess.Popen([*command, *chosen], env={**ENVIRONMENT, **own}, stdout=output, stderr=output)
        while job.poll() is None:
            is_stopped = stopped.exists()
            peak = max(peak, bytes_below(scratch, mark))
            for pid in marked(mark) if is_stopped else ():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)
    finally:
        end_marked(mark)
    assert job.returncode == 0, said.read_text()[-3000:]
    assert bytes_below(tmp_path / "work" / "dataset" / "shards") > _NUM_IMAGES * _IMAGE_BYTES
    assert 0 < peak < 2 * _NUM_WORKERS * _OF_A_UNIT * _IMAGE_BYTES, f"{peak:,} bytes of scratch"
