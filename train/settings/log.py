"""The section `train.log` of the config: where the metrics of a training are sent, and which steps are profiled."""

from __future__ import annotations

from typing import Annotated

from shardmill.registry import OneOf
from shardmill.section import Section
from train.settings.kinds import EXECUTION
from train.settings.written_forms import ServerUri, StepRange


class LogConfig(Section):
    """Where losses and metrics are sent, and which steps are profiled."""

    tensorboard: Annotated[bool, EXECUTION] = True
    """Write scalars for TensorBoard (`tensorboard --logdir WORKDIR/runs`)."""
    mlflow_uri: Annotated[ServerUri, EXECUTION] = ""
    """Send the same scalars to this MLflow server, for example `http://HOST:5000`; if it is unreachable, a warning is
    logged."""
    trackers: Annotated[tuple[Annotated[str, OneOf("train.reporting.trackers:TRACKERS")], ...], EXECUTION] = ()
    """Additional trackers for the same scalars: names, or your own classes as `package.module:Class`."""
    profile_steps: Annotated[StepRange, EXECUTION] = ""
    """Profile every rank in the steps FIRST:STOP, for example `10:15` (without STOP; counted from 0 over all epochs),
    and write to `profiles` in the training's folder. These steps are slower. Empty: none."""
