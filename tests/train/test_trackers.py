"""Behaviour of every tracker: it receives the steps and events of a run, and gives no warning if nothing failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.stores import open_store
from tests.train.test_mlflow import TrackingApi, serving, step
from train.config import TrainConfig
from train.reporting.trackers import TRACKERS, sent
from train.reporting.trackers.tracker import TrackedRun
from train.reporting.tracking import check_trackers, tracker_names
from train.settings.log import LogConfig


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
