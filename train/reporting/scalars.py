"""The scalars of a training for its curves: numbers of each step and epoch, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardmill.jobs.observer import FieldValue
from train.reporting.observer import GlobalStep

STEP_SECONDS = ("input_wait", "compute", "allreduce", "checkpoint")


@dataclass(frozen=True, slots=True)
class Scalars:
    """Numbers of one moment."""

    at: int
    """A global step; of those that begin with `epoch/` an epoch."""
    values: Mapping[str, float]


def of_step(step: GlobalStep) -> Scalars:
    """Return a step's loss and its times as means over the ranks."""
    values = {"step/loss": float.fromhex(step.loss_hex)}
    for name in STEP_SECONDS:
        values[f"step_seconds/{name}"] = sum(each.seconds.get(name, 0.0) for each in step.reports) / len(step.reports)
    return Scalars(step.epoch * step.num_steps + step.step, values)


def of_event(name: str, fields: Mapping[str, FieldValue]) -> Scalars | None:
    """The figures of an epoch, if the event tells them."""
    if name != "epoch" or fields.get("rank", 0) != 0:
        return None
    numbers = {key: float(value) for key, value in fields.items() if isinstance(value, int | float)}
    values = {f"epoch/{key}": value for key, value in numbers.items() if key not in ("rank", "epoch")}
    return Scalars(int(numbers["epoch"]), values)
