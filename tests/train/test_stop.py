"""A training that a signal stops or that loses ranks: all stop before the same step, and it goes on from there."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import Terminated, error_line
from shardmill.stores import open_store
from shardmill.values import Cursor, DatasetPin
from tests.lab.scale import exhaustive
from tests.processes import hears_all_signals
from tests.services.marked import MARK
from tests.train.driver_process import ROOT, WORKERS, Driver, hearing_signals, start_driver
from tests.train.forked_ranks import forked_ranks
from tests.train.multi_rank_workers import HELD_FROM, KILL_AT
from tests.train.training import MODELS, DriverRecorder, Recorder, task_of, train_here
from train.checkpoints.checkpoint import complete_checkpoints
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.world import Role
from train.launching import LAUNCHERS
from train.launching.connection import StopAgreement, StopPoint
from train.launching.rank import DEFAULT_WORKER
from train.launching.rank_failures import FaultKind, RankFault, RankLost, error_of_all, failure_of
from train.models.user import source_sha256
from train.planning.checks import check
from train.planning.plan import TrainingPlan
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.restarts import launch_until_done
from train.strategies import roles_of
from train.strategies.horovod import HOROVOD
from train.training import check_fewer

TORCH = "tests.train.torch_models:stateful"
HELD = "tests.train.multi_rank_workers:every_rank_is_held"
# Steps of a few milliseconds, and no checkpoint but those of the epochs' ends.
SHORT = {"epochs": 2, "global_batch_size": 6, "num_streams": 6, "checkpoint_every_steps": 0, "record_samples": True,
          "checkpoint": {"keep": 100}, "watch": {"stop_timeout_seconds": 60}}  # fmt: skip


@dataclass
class Stopping(DriverRecorder):
    """Sends a signal to this process when the observer gets the report of global step `at_step`."""

    at_step: int = -1
    number: signal.Signals = signal.SIGTERM

    def step(self, step: GlobalStep) -> None:
        super().step(step)
        if step.epoch * step.num_steps + step.step == self.at_step:
            os.kill(os.getpid(), self.number)


def trained_here(
    train: dict[str, object], pin: DatasetPin, models: Path, at_step: int = -1, number: signal.Signals = signal.SIGTERM
) -> tuple[list[list[str]], str]:
    """-> what each step took, and the last weights, or what the driver said when it had stopped."""
    config = resolve(TrainConfig.model_validate(train), SparkConfig()).config
    task = WorkerTask(config, pin, str(models), "trainings/test", source_sha256(config.model))
    watcher = Stopping(at_step=at_step, number=number)
    # Who is to be stopped must not end before it is asked to. In this process the signal is there at once.
    worker = HELD if at_step >= 0 and config.launcher != "inline" else DEFAULT_WORKER
    with forked_ranks(config.backend), hearing_signals():
        try:
            last = LAUNCHERS[config.launcher].launch(task, SparkConfig(), watcher, worker=worker).weights_sha256
        except Terminated as stopped:
            last = error_line(stopped)
            assert watcher.named("stopping")
    return [list(ids) for _, ids in sorted(watcher.sample_ids.items())], last


def assert_stopped_in_order(first_ids: list[list[str]], said: str, models: Path) -> None:
    """The newest checkpoint is of the very step before which all ranks stopped."""
    newest = next(complete_checkpoints(open_store(models), "trainings/test"))
    assert newest.path in said and f"(after {newest.marker.global_step} steps)" in said
    assert len(first_ids) == newest.marker.global_step > 0


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("number", "launcher", "strategy", "world_size", "model"),
    [
        (signal.SIGINT, "inline", "single", 1, f"{MODELS}:stateful"),
        (signal.SIGTERM, "local", "torch_ddp", 2, TORCH),
        exhaustive(signal.SIGINT, "local", "horovod", 3, f"{MODELS}:stateful"),
    ],
)
def test_a_signal_stops_all_ranks_before_one_step_and_the_end_is_the_same(
    tiny_uri, tmp_path, monkeypatch, number, launcher, strategy, world_size, model
):
    monkeypatch.setenv(HELD_FROM, "20")
    train = {"launcher": launcher, "strategy": strategy, "num_workers": world_size, "model": model, **SHORT}
    pin, at_step = open_dataset(tiny_uri).pin, random.randrange(10)
    print("at step", at_step)
    first_ids, said = trained_here(train, pin, tmp_path / "stopped", at_step, number)
    cause = "interrupted by Ctrl-C" if number == signal.SIGINT else "terminated by SIGTERM"
    assert re.match(f"{cause}; stopped before step .*run the same command again", said), said
    assert_stopped_in_order(first_ids, said, tmp_path / "stopped")
    # No step is done twice and none is left out; it ends as if nothing had happened.
    second_ids, second_weights = trained_here(train, pin, tmp_path / "stopped")
    undisturbed_ids, undisturbed_weights = trained_here(train, pin, tmp_path / "undisturbed")
    assert first_ids + second_ids == undisturbed_ids
    assert second_weights == undisturbed_weights


@pytest.mark.drill
@pytest.mark.parametrize(
    ("launcher", "strategy", "model"),
    [
        ("spark_barrier", "torch_ddp", TORCH),
        exhaustive("horovod_spark", "horovod", f"{MODELS}:stateful"),
        exhaustive("attach", "torch_ddp", TORCH),
    ],
)
def test_sigterm_to_a_driver_of_ranks_elsewhere_stops_them_likewise(
    tiny_uri, tmp_path, monkeypatch, launcher, strategy, model
):
    monkeypatch.setenv(HELD_FROM, "50")
    train = {"launcher": launcher, "strategy": strategy, "num_workers": 2, "model": model, **SHORT, "epochs": 4}
    pin = open_dataset(tiny_uri).pin
    first = start_driver(tmp_path, train, worker=HELD, dataset=pin, models="stopped").stopped_somewhere()
    assert_stopped_in_order(first["sample_ids"], first["message"], tmp_path / "stopped")
    second = start_driver(tmp_path, train, dataset=pin, models="stopped").outcome()
    # Wherever its ranks had been.
    undisturbed_ids, undisturbed_weights = trained_here({**train, "launcher": "local"}, pin, tmp_path / "undisturbed")
    assert first["sample_ids"] + second["sample_ids"] == undisturbed_ids
    assert second["weights_sha256"] == undisturbed_weights


@pytest.mark.starts("program")
def test_a_second_sigterm_ends_the_training_at_once(tmp_path):
    train = {"launcher": "local", "strategy": "horovod", "num_workers": 2, "watch": {"stop_timeout_seconds": 3600}}
    driver = start_driver(tmp_path, train, worker=f"{WORKERS}:sleeps")
    driver.wait_for_step()
    driver.process.send_signal(signal.SIGTERM)
    # Two signals at once would be one.
    driver.wait_for("stopping")
    driver.process.send_signal(signal.SIGTERM)
    assert driver.outcome()["error"] == "Terminated"
    driver.assert_nothing_left()


@pytest.mark.parametrize("seed", range(50))
def test_ranks_in_lockstep_stop_behind_the_same_step_whenever_they_are_asked(seed):
    """Each rank begins a step when all have ended the one before; the driver's messages come at random moments."""
    chance, num_ranks = random.Random(seed), 3
    points, agreement, done = [StopPoint() for _ in range(num_ranks)], StopAgreement(), [0] * num_ranks
    is_inside = [False] * num_ranks
    to_ask, last = list(range(num_ranks)), None
    to_tell = list(range(num_ranks))
    stopped = [False] * num_ranks
    agreement.is_asked = True
    while not all(stopped):
        rank = chance.randrange(num_ranks)
        if to_ask and chance.random() < 0.1:
            asked = to_ask.pop(chance.randrange(len(to_ask)))
            agreement.answer(asked, points[asked].hold())
            continue
        if last is None:
            last = agreement.agreed(set(range(num_ranks)))
        elif to_tell and chance.random() < 0.5:
            points[to_tell.pop()].stop_after(last)
            continue
        may_wait = rank not in to_ask and rank in to_tell
        if is_inside[rank]:
            # The collective: a step ends when every rank has begun it.
            if all(is_inside[other] or done[other] > done[rank] for other in range(num_ranks)):
                is_inside[rank], done[rank] = False, done[rank] + 1
        elif not may_wait and not stopped[rank]:
            if points[rank].may_begin(done[rank]):
                is_inside[rank] = True
            else:
                stopped[rank] = True
    assert len(set(done)) == 1


COMMANDS = {"job.py": (sys.executable, str(ROOT / "train/job.py"), "--config"),
            "shardmill": (str(Path(sys.executable).with_name("shardmill")), "train")}  # fmt: skip


def begun(folder: Path, dataset: str, command: tuple[str, ...], launcher: str) -> Driver:
    """The command with two ranks that have made a step, run `run` of the workdir `work`."""
    file, mark = folder / "config.toml", f"mark-{uuid.uuid4()}"
    file.write_text(
        f"""
        dataset.uri = "{dataset}"
        models.uri = "{folder / "models"}"
        spark.master = "local[2]"
        [train]
        launcher = "{launcher}"
        strategy = "horovod"
        num_workers = 2
        epochs = 100_000
        global_batch_size = 24
        num_streams = 6
        record_samples = true
        """
    )
    temporary = folder / "temporary"
    temporary.mkdir()
    process = subprocess.Popen([*command, str(file), "--workdir", str(folder / "work"), "--run-id", "run"], cwd=folder,
                               env={**os.environ, MARK: mark, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True, start_new_session=True,
                               preexec_fn=hears_all_signals)  # fmt: skip
    driver, steps = Driver(process, mark), folder / "work/runs/run/steps.jsonl"
    try:
        while not (steps.exists() and steps.stat().st_size):
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        assert len(driver.processes_left()) >= 2
    except BaseException:
        process.kill()
        raise
    return driver


@pytest.mark.drill
@pytest.mark.parametrize(
    ("command", "launcher", "number", "kill"),
    [
        ("shardmill", "local", signal.SIGINT, os.killpg),
        # Spark's JVM, a member of the group, dies first; what then fails in our clean-up is not why we end.
        ("shardmill", "horovod_spark", signal.SIGTERM, os.killpg),
        exhaustive("job.py", "local", signal.SIGTERM, os.kill),
        exhaustive("job.py", "horovod_spark", signal.SIGTERM, os.kill),
        exhaustive("job.py", "horovod_spark", signal.SIGINT, os.killpg),
    ],
)
def test_interrupted_command_ends_its_ranks_and_says_so(tmp_path, tiny_uri, command, launcher, number, kill):
    driver = begun(tmp_path, tiny_uri, COMMANDS[command], launcher)
    process = driver.process
    try:
        kill(process.pid, number)
        _, errors = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == 128 + number, errors
    assert errors.rstrip().splitlines()[-1].startswith(f"ERROR {128 + number}: "), errors
    assert "Traceback" not in errors
    summary = json.loads((tmp_path / "work/runs/run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 128 + number)
    driver.assert_nothing_left()
    # Of TensorFlow and of Spark: `spark-*`, `blockmgr-*`, compiled functions.
    assert not list((tmp_path / "temporary").iterdir())


@pytest.mark.drill
@pytest.mark.parametrize("command", ["shardmill", exhaustive("job.py")])
def test_a_training_whose_shell_is_killed_stops_in_order_and_leaves_nothing(tmp_path, tiny_uri, command):
    script = ("bash", "-c", '"$@"; true', "script", *COMMANDS[command])
    driver = begun(tmp_path, tiny_uri, script, "local")
    os.kill(driver.process.pid, signal.SIGKILL)
    # Until all that hold the pipes are gone.
    _, errors = driver.process.communicate(timeout=180)
    assert errors.rstrip().splitlines()[-1].startswith("ERROR 143: "), errors
    driver.assert_nothing_left()
    summary = json.loads((tmp_path / "work/runs/run/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 143)
    assert list((tmp_path / "models").rglob("MARKER.json")), "it ended with a checkpoint"


GELU = "tests.train.torch_models:smooth"
# Smoothed labels keep the loss from 0, where a relative bound means nothing.
CONFIG = {"num_streams": 12, "global_batch_size": 24, "epochs": 5, "label_smoothing": 0.1, "record_samples": True,
          "checkpoint_every_steps": 5}  # fmt: skip


def launch_on(uri, models, launcher, watcher, worker, **config):
    """Ranks of which the last is lost: at step 6 of three, at step 13 of two."""
    settings = {**CONFIG, "launcher": launcher, **config}
    asked = TrainingPlan(resolve(TrainConfig(**settings), SparkConfig()))
    with forked_ranks(asked.config.backend):
        done = launch_until_done(
            lambda now: LAUNCHERS[launcher].launch(
                task_of(uri, models, **{**settings, "num_workers": now.config.num_workers}),
                SparkConfig(master="local[3]"),
                watcher,
                worker=f"tests.train.multi_rank_workers:{worker}",
            ),
            asked,
            watcher,
            check=lambda now: None,
        )
    return done.result, done.restarts


@pytest.mark.parametrize(
    ("launcher", "strategy", "model", "worker", "how_lost"),
    [
        pytest.param("local", "torch_ddp", GELU, "last_rank_dies", "was killed", marks=pytest.mark.starts("ranks")),
        pytest.param("spark_barrier", "torch_ddp", GELU, "last_rank_dies", "was killed", marks=pytest.mark.drill),
        exhaustive("local", "torch_ddp", GELU, "last_rank_freezes", "stopped sending heartbeats"),
        exhaustive("local", "horovod", "small_cnn", "last_rank_dies", "was killed"),
    ],
)
def test_ranks_that_are_lost_are_done_without_and_the_losses_stay(
    tiny_uri, tmp_path, monkeypatch, own_jvm, launcher, strategy, model, worker, how_lost
):
    monkeypatch.setenv(KILL_AT, "3:6 2:13")
    watcher, one = DriverRecorder(), Recorder()
    watch = {"silent_seconds": 5} if worker == "last_rank_freezes" else {}
    how = {"strategy": strategy, "model": model, "num_workers": 3, "max_restarts": 2, "watch": watch}
    result, restarts = launch_on(tiny_uri, tmp_path / "several", launcher, watcher, worker, **how)
    assert (result.world_size, [(each.lost_ranks, each.world_size) for each in restarts]) == (1, [((2,), 2), ((1,), 1)])
    assert [how_lost in each.cause for each in restarts] == [True, True], restarts
    warnings = [fields["warning"] for fields in watcher.named("restarted")]
    assert ["3 -> 2 ranks (restart 1 of at most 2)" in warnings[0], "2 -> 1 ranks" in warnings[1]] == [True, True]

    undisturbed = train_here(tiny_uri, tmp_path / "one", one, **{**CONFIG, "model": model})
    assert len(watcher.losses) == len(one.losses) == undisturbed.num_steps
    for step, loss in one.losses.items():
        assert float.fromhex(watcher.losses[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)
    assert watcher.sample_ids == {(report.epoch, report.step): report.sample_ids for report in one.steps}


def lost(step: int | None, ranks: set[int], what: str = "rank 1 was killed") -> RankLost:
    error = RankLost(what, fix="run it again")
    error.ranks, error.last_step = frozenset(ranks), None if step is None else Cursor(0, step)
    return error


def go_on_through(faults, check=lambda now: None, dataset=None, **config):
    """`launch_until_done` for a launch that raises these, one after the other. -> (world sizes, what it raised)."""
    sizes, waiting = [], list(faults)

    def launch(now) -> Any:
        sizes.append(now.config.num_workers)
        if waiting:
            raise waiting.pop(0)

    settings = {"num_workers": 4, "strategy": "horovod", "launcher": "local", "max_restarts": 9, **config}
    try:
        plan = TrainingPlan(resolve(TrainConfig(**settings), SparkConfig(), dataset))
        launch_until_done(launch, plan, DriverRecorder(), check)
    except (TrainingError, UsageError) as error:
        return sizes, error
    return sizes, None


@pytest.mark.needs("horovod")
def test_as_many_restarts_as_allowed_each_with_the_ranks_that_are_left():
    assert go_on_through([lost(1, {3}), lost(5, {0, 1}), lost(7, {0})]) == ([4, 3, 1, 1], None)
    # Only a connection was lost, and no rank.
    assert go_on_through([lost(1, set())]) == ([4, 4], None)
    faults = [lost(1, {3}), lost(2, {0}), lost(3, {0})]
    assert go_on_through(faults, max_restarts=2) == ([4, 3, 2], faults[2])
    assert go_on_through(faults[:1], max_restarts=0) == ([4], faults[0])


def test_a_lost_server_or_chief_is_replaced_and_costs_no_worker():
    config = {"strategy": "parameter_server", "parameter_server": {"num_servers": 2}, "num_workers": 3}
    roles = roles_of(TrainConfig(**config))
    chief, worker, server = (roles.index(role) for role in (Role.CHIEF, Role.WORKER, Role.SERVER))
    faults = [lost(1, {server}), lost(2, {chief}), lost(3, {worker}), lost(4, {worker, server})]
    assert go_on_through(faults, **config) == ([3, 3, 3, 2, 1], None)


@pytest.mark.starts("program")
def test_a_signal_that_comes_while_the_ranks_leave_is_not_forgotten():
    program = [sys.executable, "-m", "tests.programs.signalled_while_ranks_leave"]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n") == ["launched", "terminated by SIGTERM; the ranks had ended already", ""]


@pytest.mark.needs("horovod")
def test_weights_of_ranks_end_with_the_world_that_they_were_for():
    sizes, error = go_on_through([lost(1, {3})], rank_weights=[1, 1, 1, 0.5])
    assert (sizes, error) == ([4, 3], None)


@pytest.mark.needs("horovod")
@pytest.mark.parametrize("step", [None, 7])
def test_a_fault_that_comes_again_at_the_same_step_ends_it_with_its_first_cause(step):
    faults = [lost(step, {3}, "rank 3 hangs"), lost(2, {0}), lost(step, {1}, "rank 1 hangs")]
    sizes, error = go_on_through(faults)
    assert sizes == [4, 3, 2] and isinstance(error, RankLost)
    assert error.what == "rank 3 hangs (and again after a restart: rank 1 hangs)"


@pytest.mark.needs("horovod")
def test_what_a_restart_cannot_cure_is_raised_at_once():
    error = TrainingError("rank 1 failed: ValueError")
    assert go_on_through([error]) == ([4], error)

    def refuse(now):
        raise UsageError(f"windows need more memory on {now.config.num_workers} ranks")

    sizes, told = go_on_through([lost(1, {3})], refuse)
    assert sizes == [4] and isinstance(told, RankLost)
    assert "it could not continue with 3 ranks or fewer: windows need more memory on 3 ranks" in told.__notes__[0]


@pytest.mark.starts("ranks")
def test_ranks_that_hold_a_model_together_go_on_in_a_layout_that_is_allowed(tiny_uri):
    """Sizes of `train.mesh` that were set stay: a rank may have no memory for more than its share."""
    fsdp = {"strategy": "torch_fsdp", "model": GELU}
    assert go_on_through([lost(1, {3})], **fsdp) == ([4, 3], None)
    assert go_on_through([lost(1, {3})], **fsdp, mesh={"data": 2}) == ([4, 2], None)
    assert go_on_through([lost(1, {3}), lost(2, {0})], **fsdp, mesh={"fsdp": 2})[0] == [4, 2]
    sizes, error = go_on_through([lost(1, {3})], **fsdp, num_workers=6, mesh={"fsdp": 6})
    assert sizes == [6] and isinstance(error, RankLost) and error.exit_code == 5
    assert "it could not continue with 5 ranks or fewer" in error.__notes__[0]
    assert "it can have these numbers of ranks: 6" in error.__notes__[0]
    # Four heads, and three ranks that are left: a process that builds the model refuses them.
    dataset, observer = open_dataset(tiny_uri), DriverRecorder()
    divided = {"strategy": "tensor_parallel", "model": "tests.train.torch_models:tiny_vit"}
    assert go_on_through([lost(1, {3})], partial(check_fewer, observer=observer), dataset, **divided) == ([4, 2], None)


def test_a_schedule_that_the_ranks_that_are_left_cannot_run_is_refused_before_they_start():
    """Sixteen microbatches make no equal rounds on three ranks."""
    rounds = {"schedule": "interleaved_1f1b", "num_microbatches": 16}
    settings = {"strategy": "pipeline_parallel", "model": GELU, "global_batch_size": 64, "pipeline_parallel": rounds}
    piped = TrainConfig.model_validate(settings)
    fewer = {number: resolve(piped.model_copy(update={"num_workers": number}), SparkConfig()) for number in (2, 3)}
    check(fewer[2], of_ranks=True)
    with pytest.raises(UsageError, match="num_microbatches = 16"):
        check(fewer[3], of_ranks=True)


@pytest.mark.parametrize(
    ("kind", "more", "is_lost"),
    [
        (FaultKind.KILLED, {"returncode": -signal.SIGKILL}, True),
        (FaultKind.KILLED, {"returncode": None}, True),
        (FaultKind.KILLED, {"returncode": 7}, False),
        (FaultKind.SILENT, {}, True),
        (FaultKind.STALLED, {}, True),
        (FaultKind.ABSENT, {}, False),
        (FaultKind.LAUNCHER, {}, False),
        (FaultKind.FAILED, {"failure": failure_of(ValueError("x"))}, False),
    ],
)
def test_only_ranks_that_something_outside_took_away_are_lost(kind, more, is_lost):
    secondary = HOROVOD.secondary_error
    survivor = RankFault(FaultKind.COLLECTIVE, 0, "host a", 0.5,
                         failure=failure_of(RuntimeError("Connection closed by peer"), secondary))  # fmt: skip
    error = error_of_all([survivor, RankFault(kind, 1, "host b", 1.0, "what", Cursor(0, 3), **more)], secondary)
    assert isinstance(error, RankLost) == is_lost
    if isinstance(error, RankLost):
        assert (error.ranks, error.last_step) == (frozenset({1}), Cursor(0, 3))
