"""A user's own tracker that is wrong is refused before anything starts, or costs a training one warning."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.run_record import RunRecord
from shardmill.stores import open_store
from tests.train import own_trackers
from tests.train.own_trackers import Failing, Recording, Remembering
from tests.train.test_mlflow import step
from tests.train.training import Recorder, tree_of
from train.config import TrainConfig
from train.planning.changes import AS_USUAL
from train.reporting.observer import GlobalStep
from train.reporting.run_log import RunLog
from train.reporting.trackers import sent
from train.reporting.trackers.tracker import TrackedRun
from train.reporting.tracking import check_trackers, open_trackers
from train.settings.log import LogConfig
from train.training import train_in_run

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
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 0.5)


@pytest.mark.usefixtures("quick")
def test_an_end_that_fails_is_reported_as_the_end():
    tracker = Sending({"end": [OSError("the end is refused")] * 1000})
    tracker.step(step(0))
    assert tracker.closed() == ["all values were delivered, but not the end of the training: the end is refused"]


@pytest.mark.usefixtures("quick")
def test_an_end_that_succeeds_later_is_no_warning():
    tracker = Sending({"begin": [OSError("away")], "end": [OSError("away")]})
    tracker.sent(step(0))
    assert tracker.closed() == []


@pytest.mark.usefixtures("quick")
def test_what_is_told_at_the_end_is_why_values_are_missing():
    refused = Sending({"begin": [OSError("away")], "send": [sent.Refusal("no such step")]})
    refused.sent(step(0))
    assert refused.closed() == ["5 metric values were not delivered: no such step"]
    # It was away once and came back; at the end it is slow.
    slow = Sending({"begin": [OSError("away")]})
    slow.sent(step(0))
    slow.send = lambda scalars: sent.time.sleep(30)
    slow.step(step(1))
    assert slow.closed() == ["5 metric values were not delivered: the server is slow or does not respond"]
    assert len(slow.warned) == 2 and "away; the training continues, and sending is retried" in slow.warned[0]


def test_a_tracker_gets_the_settings_that_were_chosen_and_none_of_a_finished_training(tiny_uri, tmp_path: Path):
    Remembering.settings.clear()
    trackers = (f"{HERE}:Remembering",)
    tree = tree_of(tiny_uri, tmp_path / "models", epochs=1, num_streams=0, log={"trackers": trackers})
    for run_id in ("first", "again"):
        record = RunRecord(str(tmp_path), run_id, sections=())
        train_in_run(tree, record, Steps(), None, AS_USUAL)
    [settings] = Remembering.settings
    chosen = {"num_workers": 1, "num_streams": 8, "strategy": "single", "launcher": "inline", "backend": "keras"}
    assert {name: settings[name] for name in chosen} == chosen
