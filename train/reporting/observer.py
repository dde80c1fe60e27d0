"""Reports a training's events from the driver, with global steps assembled from the reports of all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from shardmill.jobs.observer import FieldValue, Observer
from shardmill.jobs.process import asked_to_end
from train.contracts.values import StepReport


@dataclass(frozen=True, slots=True)
class GlobalStep:
    """One step as all ranks together did it; comes only after the last of them reported it."""

    epoch: int
    step: int
    num_steps: int
    """Steps of the whole epoch."""
    loss_hex: str
    sample_ids: tuple[str, ...]
    """Sample ids in global batch order, without padding; empty unless `train.record_samples`."""
    reports: tuple[StepReport, ...]
    """Reports in rank order."""


class TrainObserver(Observer, Protocol):
    """An observer that takes global steps too. The fields of its events begin with the `rank` that they are about."""

    def step(self, step: GlobalStep) -> None:
        """All ranks have done this step; steps come in order."""
        ...


def report_stopping(observer: TrainObserver) -> None:
    """A signal has come, and the ranks finish their step."""
    observer.event("stopping", {"rank": 0, "reason": asked_to_end().cause})


class StepAssembler:
    """Puts the reports of all ranks for one step together."""

    def __init__(self, world_size: int) -> None:
        self._num_ranks = world_size
        self._waiting: dict[tuple[int, int], dict[int, StepReport]] = {}

    def add(self, report: StepReport) -> GlobalStep | None:
        """The global step that this report completes, or None."""
        key = (report.epoch, report.step)
        reports = self._waiting.setdefault(key, {})
        reports[report.rank] = report
        if len(reports) < self._num_ranks:
            return None
        in_rank_order = tuple(reports[rank] for rank in sorted(reports))
        del self._waiting[key]
        return GlobalStep(
            epoch=report.epoch,
            step=report.step,
            num_steps=report.num_steps,
            loss_hex=in_rank_order[0].loss_hex,
            sample_ids=tuple(sample_id for each in in_rank_order for sample_id in each.sample_ids),
            reports=in_rank_order,
        )


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
    """The metrics of an epoch, if the event tells them."""
    if name != "epoch" or fields.get("rank", 0) != 0:
        return None
    numbers = {key: float(value) for key, value in fields.items() if isinstance(value, int | float)}
    values = {f"epoch/{key}": value for key, value in numbers.items() if key not in ("rank", "epoch")}
    return Scalars(int(numbers["epoch"]), values)
