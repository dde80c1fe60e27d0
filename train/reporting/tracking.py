"""The trackers of a run, as `[train.log]` names them: `trackers`, and the keys for TensorBoard and MLflow."""

from __future__ import annotations

from collections.abc import Callable

from shardmill.jobs.observer import WARNING, Observer
from shardmill.jobs.run_record import RunRecord
from train.config import TrainConfig
from train.identity import values_of_settings
from train.reporting.trackers import TRACKERS
from train.reporting.trackers.tracker import GuardedTracker, TrackedRun, check_tracker


def tracker_names(config: TrainConfig) -> tuple[str, ...]:
    """Return the trackers that a training with this config uses, each once."""
    older = {"tensorboard": config.log.tensorboard, "mlflow": bool(config.log.mlflow_uri)}
    return tuple(dict.fromkeys([*(name for name, is_on in older.items() if is_on), *config.log.trackers]))


def check_trackers(config: TrainConfig) -> str:
    """Load them all, and name them. Raises UsageError if a package is missing, or a user's own is not there or lacks a
    method."""
    names = tracker_names(config)
    for name in names:
        check_tracker(name, TRACKERS[name])
    return ", ".join(names) or "none"


def open_trackers(config: TrainConfig, run: RunRecord, observer: Observer) -> dict[str, GuardedTracker]:
    """Open trackers by name. Raises as `check_trackers`; later errors of a tracker become warnings."""
    check_trackers(config)
    settings = values_of_settings(config)

    def warn_of(name: str) -> Callable[[str], None]:
        def warn(sentence: str) -> None:
            observer.event("train.log_refused", {"rank": 0, WARNING: f"train.log.trackers = {name!r}: {sentence}"})

        return warn

    return {
        name: GuardedTracker(TRACKERS[name], TrackedRun(run.run_id, settings, run.store, run.folder, warn_of(name)))
        for name in tracker_names(config)
    }
