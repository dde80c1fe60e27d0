"""A training that loses ranks goes on without them, and stays the training that it was."""

from __future__ import annotations

import signal
import subprocess
import sys
from functools import partial
from typing import Any

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.values import Cursor
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import forked_ranks
from tests.train.multi_rank_workers import KILL_AT
from tests.train.training import Recorder, StepWatcher, check_terms, task_of, train_here
from train.config import TrainConfig
from train.contracts.world import Role
from train.launching import LAUNCHERS
from train.launching.faults import FaultKind, RankFault, RankLost, error_of_all, failure_of
from train.planning.auto import resolve
from train.restarts import launch_until_done
from train.strategies import STRATEGIES, roles_of
from train.training import check_fewer

GELU = "tests.train.torch_models:smooth"
# Smoothed labels keep the loss from 0, where a relative bound means nothing.
CONFIG = {"num_streams": 12, "global_batch_size": 24, "epochs": 5, "label_smoothing": 0.1, "record_samples": True,
          "checkpoint_every_steps": 5}  # fmt: skip


def launch_on(uri, models, launcher, watcher, worker, **config):
    """Ranks of which the last is lost: at step 6 of three, at step 13 of two."""
    settings = {**CONFIG, "launcher": launcher, **config}
    asked = resolve(TrainConfig(**settings), SparkConfig())
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
    watcher, one = StepWatcher(), Recorder()
    how = {"strategy": strategy, "model": model, "num_workers": 3, "max_restarts": 2, "watch": {"silent_seconds": 5}}
    result, restarts = launch_on(tiny_uri, tmp_path / "several", launcher, watcher, worker, **how)
    assert (result.world_size, [(each.lost_ranks, each.world_size) for each in restarts]) == (1, [((2,), 2), ((1,), 1)])
    assert [how_lost in each.cause for each in restarts] == [True, True], restarts
    warnings = [fields["warning"] for name, fields in watcher.events if name == "restarted"]
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


def go_on_through(faults, check=lambda now: None, **config):
    """`launch_until_done` for a launch that raises these, one after the other. -> (world sizes, what it raised)."""
    sizes, waiting = [], list(faults)

    def launch(now) -> Any:
        sizes.append(now.config.num_workers)
        if waiting:
            raise waiting.pop(0)

    settings = {"num_workers": 4, "strategy": "horovod", "launcher": "local", "max_restarts": 9, **config}
    try:
        launch_until_done(launch, resolve(TrainConfig(**settings), SparkConfig()), StepWatcher(), check)
    except (TrainingError, UsageError) as error:
        return sizes, error
    return sizes, None


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


def test_weights_of_ranks_end_with_the_world_that_they_were_for():
    sizes, error = go_on_through([lost(1, {3})], rank_weights=[1, 1, 1, 0.5])
    assert (sizes, error) == ([4, 3], None)


@pytest.mark.parametrize("step", [None, 7])
def test_a_fault_that_comes_again_at_the_same_step_ends_it_with_its_first_cause(step):
    faults = [lost(step, {3}, "rank 3 hangs"), lost(2, {0}), lost(step, {1}, "rank 1 hangs")]
    sizes, error = go_on_through(faults)
    assert sizes == [4, 3, 2] and isinstance(error, RankLost)
    assert error.what == "rank 3 hangs (and again after a restart: rank 1 hangs)"


@pytest.mark.parametrize("launcher", ["inline", "attach"])
def test_restarts_are_refused_where_nothing_can_start_a_rank_again(launcher):
    with pytest.raises(UsageError, match=r"max_restarts = 1 with .*; set train.launcher to 'local' or 'spark_barrier'"):
        check_terms(TrainConfig(max_restarts=1, launcher=launcher), SparkConfig())


def test_what_a_restart_cannot_cure_is_raised_at_once():
    error = TrainingError("rank 1 failed: ValueError")
    assert go_on_through([error]) == ([4], error)

    def refuse(now):
        raise UsageError(f"windows need more memory on {now.num_workers} ranks")

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
    dataset, observer = open_dataset(tiny_uri), StepWatcher()
    divided = {"strategy": "tensor_parallel", "model": "tests.train.torch_models:tiny_vit"}
    assert go_on_through([lost(1, {3})], partial(check_fewer, dataset, observer), **divided) == ([4, 2], None)


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
    secondary = STRATEGIES["horovod"].secondary_error
    survivor = RankFault(
        FaultKind.COLLECTIVE,
        0,
        "host a",
        0.5,
        failure=failure_of(RuntimeError("Connection closed by peer"), secondary),
    )
    error = error_of_all([survivor, RankFault(kind, 1, "host b", 1.0, "what", Cursor(0, 3), **more)], secondary)
    assert isinstance(error, RankLost) == is_lost
    if isinstance(error, RankLost):
        assert (error.ranks, error.last_step) == (frozenset({1}), Cursor(0, 3))
