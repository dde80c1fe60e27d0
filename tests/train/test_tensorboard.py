"""The scalars of a run, as TensorFlow's own reader of event files sees them."""

from __future__ import annotations

import glob
import json
import sys
from pathlib import Path

from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.jobs.line_log import Warn, read_lines, warn_on_stderr
from shardmill.jobs.observer import SilentObserver
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.services.s3 import s3_client
from tests.train.training import Killed, Recorder, train_here
from train.config import TrainConfig
from train.contracts.values import StepReport
from train.launching.inline import InlineWatch, ObserverReporter
from train.reporting.observer import GlobalStep
from train.reporting.run_log import RunLog, StepsLog
from train.reporting.trackers.tensorboard import TensorBoardTracker
from train.reporting.trackers.tracker import TrackedRun


class UntilStep(ObserverReporter):
    """Reports to an observer, and ends as a crash would before global step `killed_at` is on record."""

    def __init__(self, observer, killed_at: int | None = None) -> None:
        super().__init__(observer, InlineWatch(TrainConfig(strategy="single", num_workers=1), observer))
        self._recorder = Recorder(killed_at)

    def step(self, report) -> None:
        self._recorder.step(report)
        super().step(report)


def global_step(number: int, loss: float = 0.5) -> GlobalStep:
    report = StepReport(0, 0, number, 8, loss.hex(), (f"sample{number}",), seconds={})
    return GlobalStep(0, number, 8, loss.hex(), report.sample_ids, (report,))


def tracker(store: Store, folder: str = "run", warn: Warn = warn_on_stderr) -> TensorBoardTracker:
    return TensorBoardTracker(TrackedRun("r", {}, store, folder, warn))


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
        log = RunLog(SilentObserver(), [tracker(LocalStore(str(tmp_path)), f"run/{killed_at}")])
        try:
            result = train_here(tiny_uri, tmp_path / "models", UntilStep(log, killed_at), **config)
        except Killed:
            continue
        finally:
            log.close()
    first, second = (scalars_of(tmp_path / "run" / str(each) / "tensorboard") for each in (5, None))
    assert list(first["step/loss"]) == [0, 1, 2, 3, 4]
    assert list(second["step/loss"]) == [4, 5, 6, 7], "the second attempt began at the checkpoint after step 3"
    assert second["step/loss"][4] == first["step/loss"][4]
    last = result.history[-1]
    assert second["epoch/validation_accuracy"][1] == last.validation.accuracy
    assert abs(second["epoch/train_loss"][1] - last.train_loss) < 1e-6
    assert all(value > 0 for value in second["step_seconds/compute"].values())


def test_a_run_has_its_curves_where_tensorboard_is_not_installed(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    settings = {"model": "tests.train.models_under_test:linear", "epochs": 1, "global_batch_size": 24}
    given = [f"--set=train.{name}={value}" for name, value in settings.items()]
    places = [f"--set=models.uri={tmp_path}/models", f"--workdir={tmp_path}/work", "--run-id=r"]
    done = CliRunner().invoke(app, ["train", tiny_uri, *given, *places])
    assert done.exit_code == 0, done.output
    curves = scalars_of(tmp_path / "work/runs/r/tensorboard")
    assert list(curves["step/loss"]) == [0, 1, 2, 3] and 0 <= curves["epoch/validation_accuracy"][0] <= 1


def test_a_loss_without_bounds_is_in_the_curves_too(tmp_path):
    """Among them one that has no place in the 32 bits that TensorBoard keeps."""
    log = tracker(LocalStore(str(tmp_path)))
    for number, loss in enumerate((float("nan"), float("-inf"), 1e300)):
        log.step(global_step(number, loss))
    log.close()
    nan, *infinite = scalars_of(tmp_path / "run/tensorboard")["step/loss"].values()
    assert nan != nan and infinite == [float("-inf"), float("inf")]


def test_steps_that_a_restart_repeats_are_in_the_curves_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = RunLog(SilentObserver(), [tracker(LocalStore(str(tmp_path)))])
    for number in range(6):
        log.step(global_step(number))
    log.event("restarted", {"rank": 1})
    for number in range(4, 8):
        log.step(global_step(number, 0.25))
    log.close()
    curve = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload().Scalars("step/loss")
    assert [(point.step, point.value) for point in curve] == [
        *((n, 0.5) for n in range(4)),
        *((n, 0.25) for n in range(4, 8)),
    ]


def test_an_outage_of_the_runs_logs_is_a_warning_and_they_are_whole_after_it(s3_server):
    store, said = open_store("s3://made-later/work"), []
    sinks = [StepsLog(store, "steps.jsonl", said.append), tracker(store, warn=said.append)]
    log = RunLog(SilentObserver(), sinks)
    for number in range(4):
        log.step(global_step(number))
    assert len(said) == 2 and all("cannot be written; it will be retried" in each for each in said), said
    s3_client(s3_server).create_bucket(Bucket="made-later")
    log.step(global_step(4))
    log.close()
    assert len(said) == 2, said
    assert [json.loads(line)["step"] for line in read_lines(store, "steps.jsonl")] == [0, 1, 2, 3, 4]
    [events] = store.list("run/tensorboard")
    assert store.read(events.path).count(b"step/loss") == 5
