"""From section `train` to a PyTorch optimizer whose state exists before the first step, so that it can be restored."""

from __future__ import annotations

from typing import Any

from train.backends.torch.runtime import import_torch
from train.config import TrainConfig

# PyTorch's own 1e-8 makes full steps of gradients that are rounding errors. Keras has 1e-7 too, but adds it before the
# correction of the bias: the backends' Adams agree only where gradients are larger.
ADAM_EPSILON = 1e-7


def sgd(config: TrainConfig, weights: list[Any]) -> Any:
    """Stochastic gradient descent with `train.momentum`."""
    return import_torch().optim.SGD(
        weights, config.base_learning_rate, momentum=config.momentum, fused=_is_fused(weights)
    )


def adam(config: TrainConfig, weights: list[Any]) -> Any:
    """Adam (Kingma, Ba, arXiv:1412.6980)."""
    return import_torch().optim.Adam(weights, config.base_learning_rate, eps=ADAM_EPSILON, fused=_is_fused(weights))


def adamw(config: TrainConfig, weights: list[Any]) -> Any:
    """AdamW (Loshchilov, Hutter, arXiv:1711.05101) with `train.weight_decay`."""
    return import_torch().optim.AdamW(
        weights,
        config.base_learning_rate,
        eps=ADAM_EPSILON,
        weight_decay=config.weight_decay,
        fused=_is_fused(weights),
    )


def _is_fused(weights: list[Any]) -> bool | None:
    """One pass over each weight, in place of one for each operation; on a GPU the choice stays with PyTorch."""
    return True if all(weight.device.type == "cpu" for weight in weights) else None


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
    """What the optimizer remembers, in the order of the weights."""
    torch = import_torch()
    states = [optimizer.state[weight] for weight in weights]
    return [state[name] for state in states for name in sorted(state) if isinstance(state[name], torch.Tensor)]


def norm_of(gradients: list[Any]) -> float:
    """Of all of them as one vector."""
    torch = import_torch()
    return float(torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])))
