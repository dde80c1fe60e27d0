"""Weights of a Keras model that `train.freeze` freezes: permanently, or until `train.unfreeze_epoch`.

Works on each of Keras's own backends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmill.errors import UsageError
from train.backends.freezing import frozen_names
from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights that `train.freeze` names; none if it is empty."""

    variables: tuple[Any, ...] = ()
    layers: tuple[Any, ...] = ()
    """Layers without other trainable weights: their batch norms keep their statistics, too."""

    def set_trainable(self, is_trainable: bool) -> None:
        """Whether Keras counts them among the model's trainable variables; seen when a step is traced."""
        kept = [each for layer in self.layers for each in layer.variables if not each.trainable]
        for layer in self.layers:
            layer.trainable = is_trainable
        # A layer takes all its variables with it, also those that a factory freezes for itself.
        for variable in kept:
            variable.trainable = False
        for variable in self.variables:
            variable.trainable = is_trainable


def freeze(config: TrainConfig, model: Any) -> Frozen:
    """Freeze what `train.freeze` names; with `train.unfreeze_epoch` only name it.

    Raises UsageError for a pattern that matches nothing.
    """
    if not config.freeze:
        return Frozen()
    trainable = model.trainable_variables
    head = {id(variable) for variable in head_of(model).weights}
    names = frozen_names(
        config, [each.path for each in trainable], [each.path for each in trainable if id(each) in head]
    )
    variables = tuple(each for each in trainable if each.path in names)
    chosen = {id(each) for each in variables}
    leaves = [layer for layer in model._flatten_layers() if not list(layer._flatten_layers(include_self=False))]
    layers = tuple(
        layer
        for layer in leaves
        if layer.trainable_variables and all(id(each) in chosen for each in layer.trainable_variables)
    )
    frozen = Frozen(variables, layers)
    if not config.unfreeze_epoch:
        frozen.set_trainable(False)
    return frozen


def head_of(model: Any) -> Any:
    """The last layer that has weights."""
    layers = [layer for layer in model.layers if layer.weights]
    if not layers:
        raise UsageError("the model has no layers with weights of their own", "expected at least one, the head")
    return head_of(layers[-1]) if getattr(layers[-1], "layers", None) else layers[-1]
