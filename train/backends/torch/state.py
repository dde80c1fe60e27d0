"""The state of a PyTorch model in training: its weights, their averages, its optimizer, and what is each rank's own.

A part of it leaves as arrays (`StatePart`), each a slice of a named array: the whole of it, or what this rank
holds of a model that ranks hold together. The optimizer's state exists before the first step, so that it can be
restored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from train.api import StatePart
from train.backends.rules import ema_decay_after, is_decayed
from train.backends.torch.layout import NamedSlice, TensorLayout, rows_by_name, whole_slice
from train.backends.torch.runtime import generator_states, import_torch, restore_generators
from train.checkpoints.arrays import arrays_sha256
from train.config import TrainConfig
from train.optimizers import OPTIMIZERS, momentum_of, not_in, optimizer_name, weight_decay_of

if TYPE_CHECKING:
    from train.backends.torch.model import BuiltModule
    from train.backends.torch.passes import Precision


class WeightAverages:
    """One average for each weight, in the weight's type. Before the first update it is the weight itself."""

    def __init__(self, weights: Sequence[Any], limit: float) -> None:
        torch = import_torch()
        self.weights = tuple(weights)
        self.averages = tuple(weight.detach().clone() for weight in self.weights)
        # Not on a GPU: each step asks for it.
        self.num_updates = torch.zeros((), dtype=torch.int64)
        self._limit = limit

    def update(self) -> None:
        """After an update of the weights."""
        share = 1 - ema_decay_after(int(self.num_updates), self._limit)
        self.num_updates += 1
        for average, weight in zip(self.averages, self.weights, strict=True):
            # A weight that is frozen keeps its bits.
            average.lerp_(weight.detach(), share)

    def begin(self) -> None:
        """Forget all: other weights were given."""
        self.num_updates.zero_()
        _copy(self.weights, self.averages)

    def give(self) -> None:
        """Let the weights be their averages."""
        _copy(self.averages, self.weights)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the model computes with the averages; behind it with its weights."""
        kept = [weight.detach().clone() for weight in self.weights]
        self.give()
        try:
            yield
        finally:
            _copy(kept, self.weights)


def _copy(sources: Sequence[Any], targets: Sequence[Any]) -> None:
    with import_torch().no_grad():
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source)


class ModelState:
    """The model's weights as they are now, with a fresh optimizer and fresh averages."""

    def __init__(self, config: TrainConfig, built: BuiltModule, layout: TensorLayout, precision: Precision) -> None:
        self._model, self._is_keras = built.model, built.is_keras
        self._layout, self._precision = layout, precision
        # As they are now: what is frozen for some epochs keeps its place among the weights.
        self.weights, self.own = built.parts_of_state()
        self.updated = layout.updated(self.weights)
        self.optimizer = new_optimizer(config, built.model, self.weights, self.updated)
        self.averages = WeightAverages(self.weights, config.ema_decay) if config.ema_decay else None

    def begin(self) -> None:
        """Other weights were given."""
        if self.averages is not None:
            self.averages.begin()

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        """`Learner.arrays`."""
        arrays = [self._layout.local(tensor).cpu().numpy() for tensor in self._of_part(part)]
        if self._has_generators(part):
            arrays += generator_states()
        # PyTorch has no unsigned 32-bit seeds; on TensorFlow, where the model is exported, Keras has.
        return [array.astype(np.uint32) if self._is_seed(array) else array.copy() for array in arrays]

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        """`Learner.assign`."""
        torch = import_torch()
        tensors, given, generators = list(map(self._layout.local, self._of_part(part))), list(arrays), []
        if self._has_generators(part):
            given, generators = given[: len(tensors)], given[len(tensors) :]
        shapes = [tuple(tensor.shape) for tensor in tensors]
        if [array.shape for array in given] != shapes or (generators == []) != (not self._has_generators(part)):
            raise UsageError(
                f"{source} holds {len(given)} arrays that differ in number or shapes",
                f"this model has {len(tensors)} tensors as its {part.name.lower()}",
                "make train.model build the same model as then, or train under another models.uri",
            )
        with torch.no_grad():
            for tensor, array in zip(tensors, given, strict=True):
                tensor.copy_(torch.from_numpy(array.astype(np.int64) if array.dtype == np.uint32 else array.copy()))
        if generators:
            restore_generators(generators)
        if self.averages and part is StatePart.WEIGHTS:
            self.averages.give()

    def slices(self, part: StatePart) -> list[NamedSlice]:
        """What this rank holds of WEIGHTS or OPTIMIZER, in the order of `arrays`, by names that no layout changes."""
        layout, rows_of = self._layout, rows_by_name(self._model)
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        rows = [rows_of[names[id(weight)]] for weight in self.weights]
        weights = [each.of(layout.slice_of(weight)) for each, weight in zip(rows, self.weights, strict=True)]
        if part is StatePart.WEIGHTS:
            return weights
        remembered: list[NamedSlice] = []
        for each, weight, updated in zip(rows, self.weights, self.updated, strict=True):
            of_weight = each.of(layout.state_slice(layout.slice_of(weight)))
            for key, tensor in tensors_of_state(self.optimizer, updated).items():
                # A number of steps, or what lies where the weight lies.
                is_like_it = tensor.shape == updated.shape
                elements = of_weight.elements if is_like_it else whole_slice(tuple(tensor.shape))
                remembered.append(NamedSlice(f"{of_weight.name}/{key}", elements))
        remembered += [
            NamedSlice(f"loss_scale/{place}", whole_slice(())) for place in range(len(self._precision.state()))
        ]
        if self.averages is None:
            return remembered
        return [*remembered, NamedSlice("averages/num_updates", whole_slice(())), *weights]

    def own_names(self) -> list[str]:
        """Of the tensors of OWN, without generators."""
        named = [*self._model.named_parameters(), *self._model.named_buffers()]
        names = {id(tensor): name for name, tensor in named}
        return [names[id(tensor)] for tensor in self.own]

    def weights_sha256(self) -> str:
        """`Learner.weights_sha256`. No rank has more than one whole array at a time."""
        if self._is_keras:
            return arrays_sha256(weight.value.detach().cpu().numpy() for weight in self._model.weights)
        return arrays_sha256(tensor.cpu().numpy() for tensor in self._layout.state_of(self._model))

    def _of_part(self, part: StatePart) -> Sequence[Any]:
        match part:
            case StatePart.WEIGHTS:
                return self.averages.averages if self.averages else self.weights
            case StatePart.OPTIMIZER:
                remembered = [*state_tensors(self.optimizer, self.updated), *self._precision.state()]
                if self.averages is None:
                    return remembered
                return [*remembered, self.averages.num_updates, *self.weights]
            case StatePart.OWN:
                return self.own

    def _has_generators(self, part: StatePart) -> bool:
        return part is StatePart.OWN and not self._is_keras

    def _is_seed(self, array: np.ndarray) -> bool:
        return self._is_keras and array.shape == (2,) and array.dtype.kind in "iu"


# PyTorch's own 1e-8 makes full steps of gradients that are rounding errors. Keras has 1e-7 too, but adds it before the
# correction of the bias: the backends' Adams agree only where gradients are larger.
ADAM_EPSILON = 1e-7


def parameter_groups(weights: list[Any], model: Any, updated: list[Any]) -> list[dict[str, Any]]:
    """The weights as `torch.optim` takes them: those that weight decay leaves alone are a group of their own.

    `updated`: what is updated of each weight.
    """
    decayed = {id(weight) for weight in _decayed(model)}
    pairs = list(zip(weights, updated, strict=True))
    of_decayed = _by_mesh([each for weight, each in pairs if id(weight) in decayed])
    of_others = _by_mesh([each for weight, each in pairs if id(weight) not in decayed])
    return [*({"params": each} for each in of_decayed), *({"params": each, "weight_decay": 0.0} for each in of_others)]


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
        fused=None
        if any(hasattr(each, "device_mesh") for group in groups for each in group["params"])
        else _is_fused(groups),
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
    optimizer = creates(config)(config, parameter_groups(weights, model, updated))
    create_state(optimizer, updated)
    return optimizer


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
