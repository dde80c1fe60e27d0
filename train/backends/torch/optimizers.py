"""Builds the PyTorch optimizer of section `train`, with its state created before the first step, so that it can be
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from train.backends.step_rules import is_decayed
from train.backends.torch.runtime import import_torch
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS, momentum_of, not_in, optimizer_name, weight_decay_of

# PyTorch's own 1e-8 makes full steps of gradients that are rounding errors. Keras has 1e-7 too, but adds it before the
# correction of the bias: the backends' Adams agree only where gradients are larger.
ADAM_EPSILON = 1e-7


def parameter_groups(config: TrainConfig, weights: list[Any], model: Any, updated: list[Any]) -> list[dict[str, Any]]:
    """The weights as `torch.optim` takes them: those that weight decay leaves alone are a group of their own.

    `updated`: what is updated of each weight.
    """
    of_weight = {id(weight): each for weight, each in zip(weights, updated, strict=True)}
    decayed = {id(weight) for weight in _decayed(model)}
    groups: list[dict[str, Any]] = [
        {"params": [weight for weight in weights if id(weight) in decayed]},
        {"params": [weight for weight in weights if id(weight) not in decayed], "weight_decay": 0.0},
    ]
    return [
        {**group, "params": params}
        for group in groups
        for params in _by_mesh([of_weight[id(weight)] for weight in group["params"]])
    ]


def _by_mesh(weights: list[Any]) -> list[list[Any]]:
    """Weights that lie on the same mesh of ranks: PyTorch updates a group by one call, which takes no others."""
    meshes = list({id(mesh): mesh for mesh in (getattr(each, "device_mesh", None) for each in weights)}.values())
    return [[each for each in weights if getattr(each, "device_mesh", None) is mesh] for mesh in meshes]


def _decayed(model: Any) -> Iterator[Any]:
    variables = getattr(model, "trainable_variables", None)
    if variables is not None:
        # A Keras model on PyTorch.
        yield from (each.value for each in variables if is_decayed(each.path, len(each.shape)))
        return
    for name, weight in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__
        if is_decayed(name, weight.ndim, owner):
            yield weight


def sgd(config: TrainConfig, groups: list[dict[str, Any]]) -> Any:
    """Stochastic gradient descent with `train.momentum` and L2 regularization by `train.weight_decay`."""
    return import_torch().optim.SGD(
        groups,
        config.base_learning_rate,
        momentum=momentum_of(config),
        weight_decay=weight_decay_of(config),
        # PyTorch has this fused update for Adam's shards alone.
        fused=None if _are_shards(groups) else _is_fused(groups),
    )


def adam(config: TrainConfig, groups: list[dict[str, Any]]) -> Any:
    """Adam (Kingma, Ba, arXiv:1412.6980)."""
    return import_torch().optim.Adam(groups, config.base_learning_rate, eps=ADAM_EPSILON, fused=_is_fused(groups))


def adamw(config: TrainConfig, groups: list[dict[str, Any]]) -> Any:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101) with `train.weight_decay`."""
    return import_torch().optim.AdamW(
        groups,
        config.base_learning_rate,
        eps=ADAM_EPSILON,
        weight_decay=weight_decay_of(config),
        fused=_is_fused(groups),
    )


def _is_fused(groups: list[dict[str, Any]]) -> bool | None:
    """One pass over each weight, in place of one for each operation; on a GPU the choice stays with PyTorch."""
    return True if all(weight.device.type == "cpu" for group in groups for weight in group["params"]) else None


Create = Callable[[TrainConfig, list[dict[str, Any]]], Any]
"""`train.optimizers.Optimizer.torch`."""


def creates(config: TrainConfig) -> Create:
    """What creates the optimizer of section `train`. Raises UsageError for one that PyTorch does not have."""
    name = optimizer_name(config)
    create = OPTIMIZERS[name].torch
    if create is None:
        raise not_in(name, "torch")
    return create


def new_optimizer(config: TrainConfig, model: Any, weights: list[Any], updated: list[Any]) -> Any:
    """The optimizer of section `train`, with its state. `updated`: what is updated of each weight."""
    optimizer = creates(config)(config, parameter_groups(config, weights, model, updated))
    create_state(optimizer, updated)
    return optimizer


def _are_shards(groups: list[dict[str, Any]]) -> bool:
    return any(hasattr(weight, "device_mesh") for group in groups for weight in group["params"])


def create_state(optimizer: Any, weights: list[Any]) -> None:
    """Let a fresh optimizer have the state that it would create in its first step, all of it zero.

    PyTorch's optimizers have none before. A step with zero gradients creates it; what it did to weights is undone.
    """
    torch = import_torch()
    kept = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    with torch.no_grad():
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)
    clear_state(optimizer, weights)


def clear_state(optimizer: Any, weights: list[Any]) -> None:
    """Let an optimizer have forgotten everything; at first all of its state is zero."""
    with import_torch().no_grad():
        for tensor in state_tensors(optimizer, weights):
            tensor.zero_()


def state_tensors(optimizer: Any, weights: list[Any]) -> list[Any]:
    """Return the optimizer's state, in the order of the weights."""
    return [tensor for weight in weights for tensor in tensors_of_state(optimizer, weight).values()]


def tensors_of_state(optimizer: Any, weight: Any) -> dict[str, Any]:
    """What an optimizer remembers of one weight, by the optimizer's own names."""
    state, torch = optimizer.state[weight], import_torch()
    return {name: state[name] for name in sorted(state) if isinstance(state[name], torch.Tensor)}


def total_norm(gradients: list[Any]) -> float:
    """Return the norm of all tensors as one vector."""
    torch = import_torch()
    return float(torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])))
