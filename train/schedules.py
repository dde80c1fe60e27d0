"""Learning rate schedules after the warm-up; a new schedule is a function and an entry here."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import Field, model_validator

from shardmill.registry import Entry, ExtensionPoint, Registry
from shardmill.section import Section
from train.settings import RESUMABLE

if TYPE_CHECKING:
    from train.config import TrainConfig

SCHEDULES: Registry[Schedule] = Registry(
    "train.schedule",
    {
        "constant": Entry("train.schedules:CONSTANT", "does not change"),
        "cosine": Entry("train.schedules:COSINE", "falls along half a cosine to 0 at the last step"),
        "step": Entry(
            "train.schedules:STEP",
            "is multiplied by a factor every few epochs",
            options="train.schedules:StepOptions",
        ),
    },
    options_prefix="schedule_",
    point=ExtensionPoint("the learning rate after the warm-up", "train.schedules:Schedule"),
)


_EVERY_EPOCHS = 30


class StepOptions(Section):
    """Settings of the schedule `step`."""

    every_epochs: Annotated[int, RESUMABLE] = Field(default=_EVERY_EPOCHS, ge=1)
    """Multiply the learning rate by `factor` whenever this many epochs have passed."""
    at_epochs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], RESUMABLE] = ()
    """Instead of `every_epochs`: the epochs, counted from 0, that begin with the next lower rate, such as
    `[30, 60, 80]`."""
    factor: Annotated[float, RESUMABLE] = Field(default=0.1, gt=0, le=1)
    """The factor."""

    @model_validator(mode="after")
    def _epochs_ascend(self) -> Self:
        if any(later <= earlier for earlier, later in pairwise(self.at_epochs)):
            raise ValueError(f"at_epochs in ascending order, each once; given {list(self.at_epochs)}")
        if self.at_epochs and self.every_epochs != _EVERY_EPOCHS:
            raise ValueError(f"at_epochs or every_epochs = {self.every_epochs}, not both")
        return self


@dataclass(frozen=True, slots=True)
class Schedule:
    """The factor of the learning rate at each step."""

    factor: Callable[[int, TrainConfig, int], float]
    """(global step from 0, section `train`, steps per epoch) -> factor."""
    knows_length: bool = False
    """Whether it depends on `train.epochs`: continuing with more epochs then differs from one long training."""


def _constant(step: int, config: TrainConfig, steps_per_epoch: int) -> float:
    return 1.0


def _cosine(step: int, config: TrainConfig, steps_per_epoch: int) -> float:
    # Half a cosine from 1 after the warm-up towards 0 after the last step (Loshchilov, Hutter, arXiv:1608.03983).
    steps_after_warmup = config.epochs * steps_per_epoch - config.warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - config.warmup_steps) / steps_after_warmup))


def _step(step: int, config: TrainConfig, steps_per_epoch: int) -> float:
    options = config.options(StepOptions)
    epoch = step // steps_per_epoch
    if options.at_epochs:
        return options.factor ** bisect_right(options.at_epochs, epoch)
    return options.factor ** (epoch // options.every_epochs)


def learning_rate_at(config: TrainConfig, step: int, steps_per_epoch: int) -> float:
    """The learning rate of global step `step`, counted from 0 over all epochs."""
    if step < config.warmup_steps:
        return config.base_learning_rate * (step + 1) / config.warmup_steps
    return config.base_learning_rate * SCHEDULES[config.schedule].factor(step, config, steps_per_epoch)


CONSTANT = Schedule(_constant)
COSINE = Schedule(_cosine, knows_length=True)
STEP = Schedule(_step)
