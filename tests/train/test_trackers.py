"""Trackers: each receives the steps and events of a run; a user's own that is wrong is refused, or costs a warning."""

from __future__ import annotations

import glob
import gzip
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from shardmill.jobs.line_log import Warn, read_lines
from shardmill.jobs.observer import WARNING, SilentObserver
from shardmill.jobs.redact import warn_on_stderr
from shardmill.jobs.run_record import RunRecord
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.services.s3 import s3_client
from tests.train import own_trackers
from tests.train.learners import LINEAR
from tests.train.own_trackers import Failing, Recording, Remembering
from tests.train.test_mlflow import TrackingApi, serving, step
from tests.train.training import Killed, Recorder, train_here, tree_of
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.values import StepReport
from train.launching.inline import InlineWatch, ObserverReporter
from train.planning.resume import DEFAULT_RESUME
from train.reporting.observer import GlobalStep
from train.reporting.run_log import RunLog, StepsLog
from train.reporting.trackers import TRACKERS, sent
from train.reporting.trackers.tensorboard import TensorBoardTracker
from train.reporting.trackers.tracker import TrackedRun
from train.reporting.tracking import check_trackers, open_trackers, tracker_names
from train.settings import LogConfig
from train.training import train_in_run
from train.tree import TrainTree


@pytest.mark.parametrize("name", TRACKERS)
def test_a_run_and_its_second_attempt(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sent, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 600.0)
    warned: list[str] = []
    with serving(TrackingApi()) as uri:
        run_ids = []
        for _ in range(2):
            run = TrackedRun("r", {"log.mlflow_uri": uri}, open_store(tmp_path), "runs/r", warned.append)
            tracker = TRACKERS[name](run)
            tracker.step(step(0))
            tracker.event("epoch", {"rank": 0, "epoch": 0, "train_loss": 0.5})
            tracker.event("restarted", {"rank": 1})
            tracker.step(step(0))
            tracker.finish()
            tracker.close()
            run_ids.append(tracker.run_id)
    assert run_ids[0] == run_ids[1] and warned == []
    assert all(file.path.startswith("runs/r/") for file in open_store(tmp_path).list(""))


def test_the_older_keys_name_trackers_too():
    assert tracker_names(TrainConfig()) == ("tensorboard",)
    assert tracker_names(TrainConfig(log=LogConfig(tensorboard=False))) == ()
    twice = LogConfig(mlflow_uri="http://host:5000", trackers=("mlflow",))
    assert tracker_names(TrainConfig(log=twice)) == ("tensorboard", "mlflow")
    own_first = LogConfig(tensorboard=False, trackers=("a:B", "tensorboard"))
    assert tracker_names(TrainConfig(log=own_first)) == ("a:B", "tensorboard")


def test_one_that_is_not_there_is_refused_before_the_start():
    with pytest.raises(UsageError, match="train.log.trackers = 'no_such_module:X': there is no module"):
        check_trackers(TrainConfig(log=LogConfig(trackers=("no_such_module:X",))))


HERE = own_trackers.__name__


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("WithoutClose", "has no close; expected a class with step, event, finish, close"),
        ("WithoutEnd", "has no end; expected a class with begin, send, end"),
        ("WithAnotherEnd", r"end\(self\): .*; it is called as end\(is_finished=\.\.\.\)"),
        ("WithAnotherEvent", r"event\(self, name\): .*; it is called as event\(name, fields\)"),
        ("WithoutArgument", r"WithoutArgument\(\): .*; it is called as WithoutArgument\(run\)"),
        ("function", "is a function; expected a class"),
    ],
)
def test_a_class_that_cannot_work_is_refused(name: str, said: str):
    with pytest.raises(UsageError, match=f"train.log.trackers = '{HERE}:{name}'.*{said}"):
        check_trackers(TrainConfig(log=LogConfig(trackers=("tensorboard", f"{HERE}:{name}"))))
    check_trackers(TrainConfig(log=LogConfig(trackers=(f"{HERE}:Recording",))))


class Steps(Recorder):
    """An observer of the whole."""

    def step(self, step: Any) -> None:
        self.steps.append(step)


def tracked(folder: Path, name: str) -> list[str]:
    """A training that the tracker of that name is told of, then `Recording`; what was warned of."""
    Recording.told.clear()
    run: Any = SimpleNamespace(run_id="r", store=open_store(folder), folder="runs/r")
    observer = Steps()
    both = LogConfig(trackers=(f"{HERE}:{name}", f"{HERE}:Recording"))
    trackers = open_trackers(TrainConfig(log=both), run, observer)
    log = RunLog(observer, list(trackers.values()))
    for number in range(3):
        log.step(step(number))
        log.event("epoch", {"rank": 0, "epoch": number})
    for each in trackers.values():
        each.finish()
    log.close()
    return [fields[WARNING] for name, fields in observer.events if name == "train.log_refused"]


WHOLE = ["made", *["step", "event epoch"] * 3, "finish", "close"]


@pytest.mark.parametrize("method", ["step", "event", "finish", "close"])
def test_one_that_raises_is_warned_of_once_and_left_out(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Failing, "at", method)
    [warned] = tracked(tmp_path, "Failing")
    assert warned.startswith(
        f"train.log.trackers = '{HERE}:Failing': its `{method}` failed: ZeroDivisionError: at {method}"
    )
    assert "own_trackers.py:" in warned and "the tracker is disabled" in warned
    calls = [each.partition(" ")[0] for each in Recording.told]
    before = {"step": ["made"], "event": ["made", "step"], "finish": WHOLE[:-2], "close": WHOLE[:-1]}[method]
    assert len(calls) == len(WHOLE) + len(before)
    assert [calls.count(each) for each in ("made", "close")] == [2, 1], "the other one is told all"


def test_one_that_cannot_be_made_is_left_out(tmp_path: Path):
    [warned] = tracked(tmp_path, "FailingAtOnce")
    assert "it cannot be made: ZeroDivisionError: at once" in warned
    assert Recording.told == WHOLE


def test_a_sink_that_does_not_close_leaves_none_open(tmp_path: Path):
    closed: list[str] = []

    def sink(name: str, *, raises: bool = False) -> Any:
        def close() -> None:
            closed.append(name)
            assert not raises

        return SimpleNamespace(close=close)

    with pytest.raises(AssertionError):
        RunLog(Recorder(), [sink("a", raises=True), sink("b"), sink("c", raises=True), sink("d")]).close()
    assert closed == ["a", "b", "c", "d"]


def trained(dataset: str, folder: Path, tracker: str) -> Any:
    sets = {"epochs": 1, "global_batch_size": 24, "model": "tests.train.models_under_test:linear"}
    sets |= {"log.trackers": f'["{HERE}:{tracker}"]'}
    places = [f"--set=models.uri={folder}/models", f"--workdir={folder}/work", "--run-id=one", "--json"]
    return CliRunner().invoke(app, ["train", dataset, *[f"--set=train.{name}={sets[name]}" for name in sets], *places])


def test_a_training_continues_without_its_tracker(tiny_uri: str, tmp_path: Path):
    Recording.told.clear()
    done = trained(tiny_uri, tmp_path, "Leaving")
    assert done.exit_code == 0, done.output
    assert "step" in Recording.told
    events = [json.loads(line) for line in (tmp_path / "work/runs/one/events.jsonl").read_text().splitlines()]
    assert ["SystemExit" in each["warning"] for each in events if each.get("warning")] == [True]


def test_a_run_ends_before_it_begins(tiny_uri: str, tmp_path: Path):
    done = trained(tiny_uri, tmp_path, "WithoutEnd")
    assert done.exit_code == 2 and "WithoutEnd' has no end" in done.output + done.stderr
    assert not list((tmp_path / "models").rglob("*.json"))


class Sending(sent.SentTracker):
    """To a server that answers as `answers` says, call by call; then well."""

    def __init__(self, answers: dict[str, list[Exception | None]]) -> None:
        self.warned: list[str] = []
        super().__init__(TrackedRun("r", {}, open_store("/nowhere"), "runs/r", self.warned.append))
        self._answers = answers

    def answer(self, call: str) -> None:
        answer = self._answers[call].pop(0) if self._answers.get(call) else None
        if answer is not None:
            raise answer

    def begin(self) -> None:
        self.answer("begin")

    def send(self, scalars: Any) -> None:
        self.answer("send")

    def end(self, *, is_finished: bool) -> None:
        self.answer("end")

    def sent(self, step: GlobalStep) -> None:
        """The step, and until the server has it."""
        self.step(step)
        while self._waiting:
            sent.time.sleep(0.01)

    def closed(self) -> list[str]:
        """The warnings of its end."""
        before = len(self.warned)
        self.finish()
        self.close()
        return self.warned[before:]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sent, "FLUSH_SECONDS", 0.02)
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 60)


@pytest.mark.usefixtures("quick")
def test_an_end_that_fails_is_reported_as_the_end(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 0.1)
    tracker = Sending({"end": [OSError("the end is refused")] * 10_000})
    tracker.sent(step(0))
    tracker._closing.set()
    while not tracker._failing:
        sent.time.sleep(0.01)
    assert tracker.closed() == ["all values were delivered, but not the end of the training: the end is refused"]


@pytest.mark.usefixtures("quick")
def test_an_end_that_succeeds_later_is_no_warning():
    tracker = Sending({"begin": [OSError("away")], "end": [OSError("away")]})
    tracker.sent(step(0))
    assert tracker.closed() == []


@pytest.mark.usefixtures("quick")
def test_the_reason_for_missing_values_is_reported_at_the_end(monkeypatch: pytest.MonkeyPatch):
    refused = Sending({"begin": [OSError("away")], "send": [sent.Refusal("no such step")]})
    refused.sent(step(0))
    assert refused.closed() == ["5 metric values were not delivered: no such step"]
    # It was away once and came back; at the end it is slow.
    slow = Sending({"begin": [OSError("away")]})
    slow.sent(step(0))
    slow.send = lambda scalars: sent.time.sleep(30)
    slow.step(step(1))
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 0.1)
    assert slow.closed() == ["5 metric values were not delivered: the server is slow or does not respond"]
    assert len(slow.warned) == 2 and "away; the training continues, and sending is retried" in slow.warned[0]


def test_a_tracker_gets_the_settings_that_were_chosen_and_none_of_a_finished_training(tiny_uri, tmp_path: Path):
    Remembering.settings.clear()
    trackers = (f"{HERE}:Remembering",)
    tree = tree_of(tiny_uri, tmp_path / "models", epochs=1, num_streams=0, log={"trackers": trackers})
    for run_id in ("first", "again"):
        record = RunRecord(str(tmp_path), run_id, sections=())
        train_in_run(tree, record, Steps(), None, DEFAULT_RESUME)
    [settings] = Remembering.settings
    chosen = {"num_workers": 1, "num_streams": 8, "strategy": "single", "launcher": "inline", "backend": "keras"}
    assert {name: settings[name] for name in chosen} == chosen


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


# Four steps.
CONFIG: dict[str, Any] = {"epochs": 1, "global_batch_size": 24}


def of_tensorflow(folder: Path) -> tuple[set[int], set[str]]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    [file] = folder.glob("plugins/profile/*/*.xplane.pb")
    steps, names = set(), set()
    for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
        stats = {number: each.name for number, each in plane.stat_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            name = plane.event_metadata[event.metadata_id].name
            names.add(name)
            if name == "train":
                steps |= {stat.int64_value for stat in event.stats if stats[stat.metadata_id] == "step_num"}
    return steps, names


def of_torch(folder: Path) -> tuple[set[int], set[str]]:
    [file] = folder.glob("*.pt.trace.json.gz")
    names = {each["name"] for each in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    return {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")}, names


READERS: dict[str, tuple[Callable[[Path], tuple[set[int], set[str]]], str]] = {
    "keras": (of_tensorflow, "MatMul"), "torch": (of_torch, "aten::addmm"),
}  # fmt: skip
"""Backend -> how to read (numbers of the steps, names of operations), and what a linear layer computes."""


@pytest.mark.parametrize("name", BACKENDS)
def test_the_named_steps_are_recorded_and_the_training_stays_the_same(name: str, tiny_uri: str, tmp_path: Path):
    config: dict[str, Any] = {**CONFIG, "backend": name, "model": LINEAR[name]}
    read, operation = READERS[name]
    plain = train_here(tiny_uri, tmp_path / "plain", **config)

    # One that fails meanwhile leaves no profiler behind that would be in the way of the next.
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", Recorder(killed_at=2), log={"profile_steps": "1:4"}, **config)

    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path / "some", recorder, log={"profile_steps": "1:3"}, **config)
    [told] = recorder.named("profile")
    steps, names = read(Path(told["path"]) / "rank-0")
    assert told["steps"] == 2 and steps == {1, 2} and any(operation in each for each in names), sorted(names)
    assert result.weights_sha256 == plain.weights_sha256 and not recorder.named("profile_incomplete")
    assert not (tmp_path / "plain/t/profiles").exists()

    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "short", recorder, log={"profile_steps": "3:9"}, **config)
    assert read(tmp_path / "short/t/profiles/steps-3-9/rank-0")[0] == {3}
    [incomplete] = recorder.named("profile_incomplete")
    assert "'3:9': 5 of 6 steps were not trained" in incomplete["warning"]


def test_a_profiler_that_does_not_start_ends_no_training(tiny_uri: str, tmp_path: Path):
    import tensorflow as tf

    recorder = Recorder()
    tf.profiler.experimental.start(str(tmp_path / "mine"))
    try:
        train_here(tiny_uri, tmp_path, recorder, log={"profile_steps": "1:3"}, model=LINEAR["keras"], **CONFIG)
    finally:
        tf.profiler.experimental.stop()
    [incomplete] = recorder.named("profile_incomplete")
    assert "AlreadyExists" in incomplete["warning"] and not recorder.named("profile")


@pytest.mark.parametrize("steps", ["5", "5:5", "7:5", "-1:5", "a:b"])
def test_other_forms_are_refused(steps: str):
    with pytest.raises(UsageError, match=rf"profile_steps = .*{steps}.*; expected FIRST:STOP"):
        load_tree(TrainTree, None, (f'train.log.profile_steps="{steps}"',))
