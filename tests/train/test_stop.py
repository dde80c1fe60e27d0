"""SIGTERM to the driver of a training: all ranks stop before the same step, and the same command goes on from there."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.process import Terminated
from shardmill.stores import open_store
from shardmill.values import DatasetPin
from tests.lab.scale import exhaustive
from tests.train.driver_process import WORKERS, hearing_signals, start_driver
from tests.train.forked_ranks import forked_ranks
from tests.train.training import MODELS, StepWatcher
from train.checkpoints.checkpoint import complete_checkpoints
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.launching import LAUNCHERS
from train.launching.exchanges import StopAgreement, StopPoint
from train.models.user import source_sha256
from train.planning.auto import resolve
from train.reporting.observer import GlobalStep

TORCH = "tests.train.torch_models:stateful"
# Steps of a few milliseconds, and no checkpoint but those of the epochs' ends.
CONFIG = {"epochs": 2, "global_batch_size": 6, "num_streams": 6, "checkpoint_every_steps": 0, "record_samples": True,
          "checkpoint": {"keep": 100}, "watch": {"stop_timeout_seconds": 60}}  # fmt: skip


@dataclass
class Stopping(StepWatcher):
    """Sends SIGTERM to its own process when it is told of global step `at_step`."""

    at_step: int = -1

    def step(self, step: GlobalStep) -> None:
        super().step(step)
        if step.epoch * step.num_steps + step.step == self.at_step:
            os.kill(os.getpid(), signal.SIGTERM)


def trained_here(
    train: dict[str, object], pin: DatasetPin, models: Path, at_step: int = -1
) -> tuple[list[list[str]], str]:
    """-> what each step took, and the last weights, or what the driver said when it had stopped."""
    config = resolve(TrainConfig.model_validate(train), SparkConfig()).config
    task = WorkerTask(config, pin, str(models), "trainings/test", source_sha256(config.model))
    watcher = Stopping(at_step=at_step)
    with forked_ranks(config.backend), hearing_signals():
        try:
            last = LAUNCHERS[config.launcher].launch(task, SparkConfig(), watcher).weights_sha256
        except Terminated as stopped:
            last = str(stopped)
    return [list(ids) for _, ids in sorted(watcher.sample_ids.items())], last


def assert_stopped_in_order(first_ids: list[list[str]], said: str, models: Path) -> None:
    """The newest checkpoint is of the very step before which all ranks stopped."""
    newest = next(complete_checkpoints(open_store(models), "trainings/test"))
    assert newest.path in said and f"(after {newest.marker.global_step} steps)" in said
    assert len(first_ids) == newest.marker.global_step > 0


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    ("launcher", "strategy", "world_size", "model"),
    [
        ("inline", "single", 1, f"{MODELS}:stateful"),
        ("local", "torch_ddp", 2, TORCH),
        exhaustive("local", "horovod", 3, f"{MODELS}:stateful"),
    ],
)
def test_sigterm_stops_all_ranks_before_one_step_and_the_end_is_the_same(
    tiny_uri, tmp_path, launcher, strategy, world_size, model
):
    train = {"launcher": launcher, "strategy": strategy, "num_workers": world_size, "model": model, **CONFIG}
    pin, at_step = open_dataset(tiny_uri).pin, random.randrange(10)
    print("at step", at_step)
    first_ids, said = trained_here(train, pin, tmp_path / "stopped", at_step)
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
def test_sigterm_to_a_driver_of_ranks_elsewhere_stops_them_likewise(tiny_uri, tmp_path, launcher, strategy, model):
    train = {"launcher": launcher, "strategy": strategy, "num_workers": 2, "model": model, **CONFIG, "epochs": 4}
    pin = open_dataset(tiny_uri).pin
    first = start_driver(tmp_path, train, dataset=pin, models="stopped").stopped_somewhere()
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
