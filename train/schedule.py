"""The learning rate of every step, as arithmetic: no framework, no state."""

from __future__ import annotations

import math
from collections.abc import Callable

from train.settings import TrainSettings


def base_learning_rate(config: TrainSettings) -> float:
    """After linear scaling (Goyal et al., arXiv:1706.02677): proportional to the global batch, if asked for."""
    if config.learning_rate_batch_size == 0:
        return config.learning_rate
    return config.learning_rate * config.global_batch_size / config.learning_rate_batch_size


def lr_at(step: int, config: TrainSettings, steps_per_epoch: int) -> float:
    """The learning rate of global step `step`, counted from 0 over all epochs."""
    base = base_learning_rate(config)
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    return base * SCHEDULES[config.schedule](step, config, steps_per_epoch)


def _constant(step: int, config: TrainSettings, steps_per_epoch: int) -> float:
    return 1.0


def _cosine(step: int, config: TrainSettings, steps_per_epoch: int) -> float:
    # Half a cosine from 1 after the warm-up towards 0 after the last step (Loshchilov, Hutter, arXiv:1608.03983).
    steps_after_warmup = config.epochs * steps_per_epoch - config.warmup_steps
    return 0.5 * (1.0 + math.cos(math.pi * (step - config.warmup_steps) / steps_after_warmup))


def _step(step: int, config: TrainSettings, steps_per_epoch: int) -> float:
    return config.schedule_step_factor ** (step // steps_per_epoch // config.schedule_step_epochs)


SCHEDULES: dict[str, Callable[[int, TrainSettings, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "step": _step,
}
