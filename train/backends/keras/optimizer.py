"""From the config to a Keras optimizer, with clipping and float16 loss scaling around it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.schedule import base_learning_rate
from train.settings import TrainSettings


@dataclass(frozen=True, slots=True)
class ChosenOptimizer:
    """A built optimizer, and whether the config's learning-rate schedule drives it."""

    optimizer: Any
    follows_schedule: bool
    """False for the optimizer of a compiled user model: it keeps the learning rate that it was compiled with."""

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are those of a scaled loss, and steps that overflow are skipped (float16)."""
        import keras

        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)


def build_optimizer(config: TrainSettings, model: Any, compiled_optimizer: Any | None) -> ChosenOptimizer:
    """The optimizer that the config asks for, with its variables created for the model's trainable variables.

    `compiled_optimizer` is the one that a user's factory compiled the model with, if any. Raises UsageError if the
    config asks for something that it cannot do.
    """
    import keras

    own = compiled_optimizer if config.optimizer == "auto" else None
    if own is not None:
        optimizer = own
        if config.gradient_clip_norm:
            raise UsageError(
                f"train.gradient_clip_norm = {config.gradient_clip_norm} with the optimizer of a compiled model",
                "expected 0 there",
                "set train.optimizer to one of ours, or pass `global_clipnorm` to your own",
            )
    else:
        optimizer = OPTIMIZERS["adam" if config.optimizer == "auto" else config.optimizer](config)
    if config.mixed_precision == "float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return ChosenOptimizer(optimizer, follows_schedule=own is None)


def _sgd(config: TrainSettings) -> Any:
    import keras

    return keras.optimizers.SGD(
        base_learning_rate(config), momentum=config.momentum, global_clipnorm=config.gradient_clip_norm or None
    )


def _adam(config: TrainSettings) -> Any:
    import keras

    return keras.optimizers.Adam(base_learning_rate(config), global_clipnorm=config.gradient_clip_norm or None)


def _adamw(config: TrainSettings) -> Any:
    import keras

    return keras.optimizers.AdamW(
        base_learning_rate(config),
        weight_decay=config.weight_decay,
        global_clipnorm=config.gradient_clip_norm or None,
    )


OPTIMIZERS: dict[str, Callable[[TrainSettings], Any]] = {"sgd": _sgd, "adam": _adam, "adamw": _adamw}
