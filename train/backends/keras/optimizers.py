"""Builds the Keras optimizer of section `train`: the compiled model's own, or the one that `train.optimizer` names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.backends.rules import is_decayed
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS, momentum_of, not_in, optimizer_name, weight_decay_of


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
        _check_unused(config)
    else:
        name = optimizer_name(config)
        create = OPTIMIZERS[name].keras
        if create is None:
            raise not_in(name, "keras")
        optimizer = create(config)
        weights = model.trainable_variables
        optimizer.exclude_from_weight_decay([each for each in weights if not is_decayed(each.path, each.ndim)])
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
            "remove use_ema, or never unfreeze: train.unfreeze_epoch = 0",
        )


def _check_unused(config: TrainConfig) -> None:
    """Raises UsageError for a setting that the optimizer of a compiled model does not follow."""
    fields = TrainConfig.model_fields
    names = ("gradient_clip_norm", "learning_rate", "learning_rate_batch_size", "warmup_steps", "schedule")
    given = [name for name in names if getattr(config, name) != fields[name].default]
    if given:
        raise UsageError(
            f"{', '.join(f'train.{name} = {getattr(config, name)!r}' for name in given)} with the optimizer of a "
            "compiled model",
            "that optimizer keeps the learning rate and clipping it was compiled with",
            "set train.optimizer to a name, or remove this key and configure your own optimizer",
        )


def sgd(config: TrainConfig) -> Any:
    """Stochastic gradient descent with `train.momentum` and L2 regularization by `train.weight_decay`.

    By PyTorch's update rule: momentum sums gradients, and each step multiplies the sum by its own learning rate. Keras
    multiplies each gradient by the learning rate of its step before it is summed: after a fall of the rate old
    gradients go on at the old one. And its `weight_decay` is decoupled from momentum.
    """
    import keras
    from keras import ops

    l2 = weight_decay_of(config)

    class Sgd(keras.optimizers.SGD):
        def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
            change: Any = ops.cast(gradient, variable.dtype)
            rate: Any = ops.cast(learning_rate, variable.dtype)
            if l2 and self._use_weight_decay(variable):
                change = change + l2 * variable
            if self.momentum:
                summed: Any = self.momentums[self._get_variable_index(variable)]
                change = self.momentum * summed + change
                self.assign(summed, change)
            self.assign_sub(variable, rate * change)

    return Sgd(
        config.base_learning_rate,
        momentum=float(momentum_of(config)),
        global_clipnorm=config.gradient_clip_norm or None,
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
        weight_decay=weight_decay_of(config),
        global_clipnorm=config.gradient_clip_norm or None,
    )
