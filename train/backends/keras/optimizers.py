"""From section `train` to a Keras optimizer: the compiled model's own, or the one that `train.optimizer` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS, not_in


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


def build_optimizer(config: TrainConfig, model: Any, compiled_optimizer: Any | None) -> ChosenOptimizer:
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
        name = "adam" if config.optimizer == "auto" else config.optimizer
        create = OPTIMIZERS[name].keras
        if create is None:
            raise not_in(name, "keras")
        optimizer = create(config)
    if config.mixed_precision == "float16" and not isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    if not optimizer.built:
        optimizer.build(model.trainable_variables)
    return ChosenOptimizer(optimizer, follows_schedule=own is None)


def check_unfreezable(chosen: ChosenOptimizer) -> None:
    """Raises UsageError for an optimizer that cannot leave weights out for some epochs."""
    optimizer = chosen.optimizer.inner_optimizer if chosen.scales_loss else chosen.optimizer
    if optimizer.use_ema:
        raise UsageError(
            "train.unfreeze_epoch with an optimizer that averages weights (use_ema)",
            "Keras averages all weights or none",
            "leave use_ema out, or freeze for good: train.unfreeze_epoch = 0",
        )


def sgd(config: TrainConfig) -> Any:
    """Stochastic gradient descent with `train.momentum`."""
    import keras

    return keras.optimizers.SGD(
        config.base_learning_rate, momentum=config.momentum, global_clipnorm=config.gradient_clip_norm or None
    )


def adam(config: TrainConfig) -> Any:
    """Adam (Kingma, Ba, arXiv:1412.6980) with Keras's defaults."""
    import keras

    return keras.optimizers.Adam(config.base_learning_rate, global_clipnorm=config.gradient_clip_norm or None)


def adamw(config: TrainConfig) -> Any:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101) with `train.weight_decay`."""
    import keras

    return keras.optimizers.AdamW(
        config.base_learning_rate,
        weight_decay=config.weight_decay,
        global_clipnorm=config.gradient_clip_norm or None,
    )
