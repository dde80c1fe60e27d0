"""Weights of a PyTorch module that `train.freeze` freezes: permanently, or until `train.unfreeze_epoch`.

What a Keras model on PyTorch trains is what Keras says; it tells PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from train.backends.freezing import frozen_names
from train.backends.torch.boxes import rows_by_name
from train.config import TrainConfig

if TYPE_CHECKING:
    from train.backends.keras.freeze import Frozen as FrozenOfKeras


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights that `train.freeze` names; none if it is empty."""

    names: frozenset[str] = frozenset()
    parameters: tuple[Any, ...] = ()
    modules: tuple[Any, ...] = ()
    """Modules without other trainable parameters: they compute as in inference, so that batch norms keep their
    statistics.
    """
    of_keras: FrozenOfKeras | None = None

    def placed(self, model: Any) -> Frozen:
        """The same of a module whose parameters were exchanged for this rank's."""
        rows_of = rows_by_name(model)
        parameters = tuple(each for name, each in model.named_parameters() if rows_of[name].name in self.names)
        return replace(self, parameters=parameters)

    def set_trainable(self, is_trainable: bool) -> None:
        """Whether gradients of them are computed. The modules are put to inference by who puts all to training."""
        if self.of_keras is not None:
            self.of_keras.set_trainable(is_trainable)
        for parameter in self.parameters:
            parameter.requires_grad_(is_trainable)


def freeze(config: TrainConfig, model: Any, is_keras: bool) -> Frozen:
    """Freeze what `train.freeze` names; with `train.unfreeze_epoch` only name it.

    Raises UsageError for a pattern that matches nothing.
    """
    if not config.freeze:
        return Frozen()
    if is_keras:
        from train.backends.keras.freeze import freeze as freeze_keras

        return Frozen(of_keras=freeze_keras(config, model))
    frozen = _of_module(config, model)
    if not config.unfreeze_epoch:
        frozen.set_trainable(False)
    return frozen


def head_of(model: Any) -> str:
    """The path of the last module with parameters of its own."""
    return [path for path, each in model.named_modules() if list(each.parameters(recurse=False))][-1]


def _of_module(config: TrainConfig, model: Any) -> Frozen:
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    last = head_of(model)
    names = frozen_names(config, list(trainable), [name for name in trainable if name.rpartition(".")[0] == last])
    modules = []
    for path, module in model.named_modules():
        own = [f"{path}.{name}".lstrip(".") for name, each in module.named_parameters() if each.requires_grad]
        # What has parts may hold some that are trained in training's own way.
        if own and not list(module.children()) and all(name in names for name in own):
            modules.append(module)
    frozen = tuple(trainable[name] for name in trainable if name in names)
    return Frozen(frozenset(names), frozen, tuple(modules))
