"""Ranks as real processes that end in every way there is; the driver is one too, so that it can be killed as well."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from dataclasses import asdict

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.jobs.reach import planted
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from tests.lab.datasets import make_dataset
from tests.train.driver_process import PIN, WORKERS, Driver, start_driver
from tests.train.training import check_terms
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.launching import LAUNCHERS
from train.launching.rank import EXIT_ABORTED
from train.reporting.run_log import RunLog

MODELS = "tests.train.launch_models"
# What the driver would wait for a silent rank or for one without progress: it is told of an end, and waits for neither.
SHORTEST_PATIENCE_SECONDS = min(TrainConfig().watch.silent_seconds, TrainConfig().watch.progress_timeout_seconds)
# Promised for a rank that is dead; with every launcher it takes 1.1, or 1.4 with what these ranks do between their last
# step and their end.
DEAD_SECONDS = 10.0

# Every launcher with the world sizes at which it is tried.
WORLDS = [
    ("inline", 1),
    ("local", 1),
    ("local", 2),
    ("local", 3),
    ("horovod_spark", 2),
    ("spark_barrier", 2),
    ("attach", 3),
]


@pytest.fixture
def start(tmp_path):
    """start(launcher, num_workers, worker, **train) -> a running Driver."""
    drivers = []

    def start(
        launcher: str,
        num_workers: int,
        worker: str = "",
        dataset: DatasetPin = PIN,
        reach: dict | None = None,
        **train: object,
    ) -> Driver:
        strategy = "single" if num_workers == 1 else "horovod"
        given = {"launcher": launcher, "num_workers": num_workers, "strategy": strategy, **train}
        drivers.append(start_driver(tmp_path, given, worker=worker, dataset=dataset, reach=reach))
        return drivers[-1]

    yield start
    for driver in drivers:
        driver.kill()


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> DatasetPin:
    return open_dataset(make_dataset(tmp_path_factory.mktemp("data"))).pin


def test_every_launcher_is_tried():
    assert {launcher for launcher, _ in WORLDS} == set(LAUNCHERS)


@pytest.mark.parametrize(("launcher", "world_size"), WORLDS)
def test_every_rank_runs_and_rank_0_answers(start, launcher, world_size):
    driver = start(launcher, world_size, f"{WORKERS}:well")
    outcome = driver.outcome()
    assert (outcome.get("weights_sha256"), outcome.get("world_size")) == ("0" * 64, world_size), outcome
    # Each rank gives two ids a step, which tell step and place: all of them, in rank order.
    expected = [[f"{step:08x}{place:08x}" for place in range(2 * world_size)] for step in range(4)]
    assert outcome["sample_ids"] == expected
    assert sorted(rank for rank, name in outcome["events"] if name == "resumed") == list(range(world_size))
    # Whatever the frameworks of a launcher print beside it. In the driver's own process what is written to a descriptor
    # stays where it goes.
    written = ["no end of a line"] if launcher != "inline" else []
    for rank in range(world_size):
        assert {f"hello from {rank}", *written} <= set(outcome["output"][str(rank)].splitlines()), outcome
    driver.assert_nothing_left()
    driver.assert_no_file_left()


@pytest.mark.parametrize(
    ("worker", "error", "said"),
    [
        (
            "raises_on_last_rank",
            "TrainingError",
            ["rank 1", "step 0 of epoch 0", "ValueError: the third layer exploded"],
        ),
        (
            "finds_altered_shard",
            "IntegrityError",
            ["shard a.parquet was altered (rank 1", "expected CRC 1; run verify"],
        ),
        ("is_killed", "RankLost", ["rank 1", "was killed by SIGKILL after step 0 of epoch 0", "host "]),
        (
            "is_stopped",
            "RankLost",
            ["rank 1", "stopped sending heartbeats after step 0", "train.watch.silent_seconds = 3"],
        ),
        (
            "hangs",
            "RankLost",
            [
                "rank 1 (host ",
                "hangs after step 0 of epoch 0: no progress for",
                "train.watch.progress_timeout_seconds = 8",
                "in its own work; rank 0 waiting in an allreduce",
            ],
        ),
        # By nothing but what steps took: without progress a rank has 600 s.
        (
            "sleeps_in_a_step",
            "RankLost",
            ["rank 1 (host ", "watch.silent_seconds = 3, the longest so far took 0.0", "in a step; rank 0 waiting in"],
        ),
        ("exits_early", "TrainingError", ["rank 1", "exited with code 7", "no licence found"]),
    ],
)
def test_the_first_failing_rank_is_reported_and_nothing_is_left(start, worker, error, said):
    # Who hangs is heard all the while; with the shorter of its limits it is only named.
    limits = {"silent_seconds": 6, "progress_timeout_seconds": 8} if worker == "hangs" else {"silent_seconds": 3}
    driver = start("local", 2, f"{WORKERS}:{worker}", watch=limits)
    outcome = driver.outcome()
    assert outcome["error"] == error, outcome
    assert all(part in outcome["message"] for part in said), outcome["message"]
    assert "closed by peer" not in outcome["message"]
    paused = [rank for rank, name in outcome["events"] if name == "rank_paused"]
    assert paused == ([1] if worker == "hangs" else [])
    assert outcome["seconds_after_step"] < SHORTEST_PATIENCE_SECONDS
    assert worker != "is_killed" or 0 < outcome["named_after_step_seconds"] < DEAD_SECONDS
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("launcher", "worker"),
    [
        ("attach", "is_killed"),
        ("attach", "is_stopped"),
        ("spark_barrier", "is_killed"),
        pytest.param("spark_barrier", "is_stopped", marks=pytest.mark.drill),
        pytest.param("horovod_spark", "is_killed", marks=pytest.mark.drill),
        pytest.param("horovod_spark", "is_stopped", marks=pytest.mark.drill),
    ],
)
def test_dead_rank_elsewhere_ends_the_job_in_time(start, launcher, worker):
    driver = start(launcher, 2, f"{WORKERS}:{worker}", watch={"silent_seconds": 5})
    outcome = driver.outcome()
    how = {"is_killed": "was killed by SIGKILL after step 0", "is_stopped": "stopped sending heartbeats after step 0"}[
        worker
    ]
    assert outcome["error"] == "RankLost" and how in outcome["message"], outcome
    assert outcome["seconds_after_step"] < SHORTEST_PATIENCE_SECONDS
    assert worker != "is_killed" or 0 < outcome["named_after_step_seconds"] < DEAD_SECONDS
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("model", "said"),
    [
        # Its own line, and what it printed last.
        ("exploding", ("the third layer exploded", "launch_models.py:4", "the second layer smokes")),
        ("killed", ("was killed by SIGKILL after step",)),
    ],
)
def test_real_training_tells_the_cause_and_not_the_survivors_echo(start, dataset, model, said):
    train = {"model": f"{MODELS}:{model}", "global_batch_size": 24, "num_streams": 6, "epochs": 2}
    driver = start("local", 2, dataset=dataset, **train)
    outcome = driver.outcome()
    assert outcome["error"] == {"exploding": "TrainingError", "killed": "RankLost"}[model], outcome
    assert outcome["exit_code"] == 5
    told = outcome["message"] + outcome["notes"]
    assert outcome["message"].startswith("rank 1 ") and all(part in told for part in said), outcome
    assert outcome["seconds_after_step"] < SHORTEST_PATIENCE_SECONDS
    driver.assert_nothing_left()
    driver.assert_no_file_left()


@pytest.mark.parametrize("lost", ["models", "dataset"])
def test_a_rank_on_a_host_without_the_drivers_storage_ends_before_it_works(start, tmp_path, dataset, lost):
    models = open_store(tmp_path / "models")
    with planted(models) as nonce:
        if lost == "models":
            # Another host's folder of the same name.
            models.delete(nonce.path)
        pin = PIN if lost == "dataset" else dataset
        driver = start("local", 2, f"{WORKERS}:well", pin, asdict(nonce))
        outcome = driver.outcome()
    assert outcome["error"] == "UsageError", outcome
    place = str(tmp_path / "models") if lost == "models" else PIN.uri
    assert f"host {socket.gethostname()} does not" in outcome["message"] and place in outcome["message"]
    assert [name for _, name in outcome["events"]].count("resumed") == 0


@pytest.mark.parametrize("launcher", ["inline", "local"])
def test_a_worker_that_leaves_with_0_has_failed(start, launcher):
    outcome = start(launcher, 1, f"{WORKERS}:leaves").outcome()
    assert outcome["error"] == "TrainingError", outcome
    assert "rank 0" in outcome["message"] and "SystemExit: 0" in outcome["message"]


@pytest.mark.parametrize(
    ("worker", "limits"),
    [("is_slow", {"silent_seconds": 2, "progress_timeout_seconds": 1}), ("plods", {"progress_timeout_seconds": 2})],
)
def test_straggler_is_not_killed(start, worker, limits):
    driver = start("local", 2, f"{WORKERS}:{worker}", watch=limits)
    outcome = driver.outcome()
    assert outcome.get("world_size") == 2, outcome


@pytest.mark.parametrize(
    "launcher", ["local", "attach", pytest.param("horovod_spark", marks=pytest.mark.drill), "spark_barrier"]
)
def test_killed_driver_leaves_no_rank(start, launcher):
    driver = start(launcher, 2, f"{WORKERS}:sleeps")
    driver.wait_for_step()
    driver.process.kill()
    driver.process.wait()
    driver.assert_nothing_left()


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "Terminated")], ids=["INT", "TERM"]
)
def test_interrupted_driver_ends_its_ranks(start, number, error):
    """On SIGTERM ranks that come to no other step are waited for, but not for long."""
    driver = start("local", 2, f"{WORKERS}:sleeps", watch={"stop_timeout_seconds": 1})
    driver.wait_for_step()
    driver.process.send_signal(number)
    assert driver.outcome()["error"] == error
    driver.assert_nothing_left()


def test_a_rank_whose_parent_died_before_it_started_ends_at_once():
    # Nothing else is set: it must end before it looks for its driver.
    orphan = subprocess.run([sys.executable, "-m", "train.launching.rank", "0"], timeout=60, check=False)
    assert orphan.returncode == EXIT_ABORTED


def test_inline_runs_one_rank_only():
    task = WorkerTask(TrainConfig(num_workers=2, strategy="horovod"), PIN, "/nowhere", "trainings/test", "")
    with pytest.raises(UsageError, match="num_workers = 2.*'local' or 'spark_barrier'"):
        LAUNCHERS["inline"].launch(task, SparkConfig(), RunLog(SilentObserver()))


def test_spark_with_too_few_slots_is_refused_before_it_starts():
    config = TrainConfig(num_workers=3, strategy="horovod", launcher="horovod_spark")
    task = WorkerTask(config, PIN, "/nowhere", "trainings/test", "")
    with pytest.raises(UsageError, match=r"a training of 3 ranks, but Spark at 'local\[2\]' runs 2 task.*local\[3\]"):
        LAUNCHERS["horovod_spark"].launch(task, SparkConfig(master="local[2]"), RunLog(SilentObserver()))


def test_dynamic_allocation_is_refused_with_the_setting_to_change():
    config = TrainConfig(num_workers=2, strategy="torch_ddp", launcher="spark_barrier")
    conf = {"spark.dynamicAllocation.enabled": "true"}
    spark = SparkConfig(master="yarn", train=SparkApplicationConfig(conf=conf))
    with pytest.raises(UsageError, match=r"set spark.dynamicAllocation.enabled = false and spark.executor.instances"):
        check_terms(config, spark)


def test_unknown_launcher_gets_the_nearest_name():
    with pytest.raises(UsageError, match="'horovod-spark'.*did you mean 'horovod_spark'"):
        LAUNCHERS["horovod-spark"]
