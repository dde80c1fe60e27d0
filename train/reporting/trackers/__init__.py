"""Experiment trackers; a new one is a module and an entry here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.registry import Entry, ExtensionPoint, Registry

if TYPE_CHECKING:
    from collections.abc import Callable

    from train.reporting.trackers.tracker import TrackedRun, Tracker

TRACKERS: Registry[Callable[[TrackedRun], Tracker]] = Registry(
    "train.log.trackers",
    {
        "tensorboard": Entry(
            "train.reporting.trackers.tensorboard:TensorBoardTracker",
            "event files in the run's folder",
        ),
        "mlflow": Entry(
            "train.reporting.trackers.mlflow:MlflowTracker",
            "a run at an MLflow server: train.log.mlflow_uri, or MLFLOW_TRACKING_URI",
            extra="mlflow",
            packages=("mlflow",),
        ),
    },
    takes_own=True,
    point=ExtensionPoint("where metrics are sent", "train.reporting.trackers.tracker:Tracker"),
)
