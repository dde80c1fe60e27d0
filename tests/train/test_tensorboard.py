"""The scalars of a run, as TensorFlow's own reader of event files sees them."""

from __future__ import annotations

import glob
from pathlib import Path

from shardmill.stores.local import LocalStore
from tests.train.training import Killed, Recorder, train_here
from train.launching.inline import ObserverReporter
from train.run_log import RunLog
from train.tensorboard import TensorBoardLog


class Silent:
    def event(self, name, fields):
        return


class UntilStep(ObserverReporter):
    """Reports to an observer, and ends as a crash would before global step `killed_at` is on record."""

    def __init__(self, observer, killed_at: int | None = None) -> None:
        super().__init__(observer)
        self._recorder = Recorder(killed_at)

    def step(self, report) -> None:
        self._recorder.step(report)
        super().step(report)


def scalars_of(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value, of all files in the order of their times; a start drops what came before at later steps."""
    import tensorflow as tf

    found: dict[str, dict[int, float]] = {}
    for file in sorted(glob.glob(f"{folder}/events.out.tfevents.*")):
        for event in tf.compat.v1.train.summary_iterator(file):
            if event.session_log.status == event.session_log.START:
                found = {
                    tag: {step: value for step, value in values.items() if step < event.step or "/epoch" in tag}
                    for tag, values in found.items()
                }
            for value in event.summary.value:
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def test_every_step_and_epoch_is_there_once_also_after_a_crash(tiny_uri, tmp_path):
    config = {"epochs": 2, "global_batch_size": 24, "checkpoint_every_steps": 2}
    for killed_at in (5, None):
        log = RunLog(Silent(), [TensorBoardLog(LocalStore(str(tmp_path)), f"run/{killed_at}")])
        try:
            result = train_here(tiny_uri, tmp_path / "models", UntilStep(log, killed_at), **config)
        except Killed:
            continue
        finally:
            log.close()
    first, second = (scalars_of(tmp_path / "run" / str(each)) for each in (5, None))
    assert list(first["step/loss"]) == [0, 1, 2, 3, 4]
    assert list(second["step/loss"]) == [4, 5, 6, 7], "the second attempt began at the checkpoint after step 3"
    assert second["step/loss"][4] == first["step/loss"][4]
    last = result.history[-1]
    assert second["epoch/validation_accuracy"][1] == last.validation.accuracy
    assert abs(second["epoch/train_loss"][1] - last.train_loss) < 1e-6
    assert all(value > 0 for value in second["step_seconds/compute"].values())
