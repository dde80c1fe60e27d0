"""The state of a PyTorch model in training: its weights, their averages, its optimizer, and what is each rank's own.

A part of it leaves as arrays (`StatePart`), of which each is a box of a named array: the whole of it, or what this rank
holds of a model that ranks hold together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import StatePart
from train.backends.step_rules import ema_decay_after
from train.backends.torch.boxes import NamedBox, rows_by_name, whole_box
from train.backends.torch.layout import TensorLayout
from train.backends.torch.optimizers import new_optimizer, state_tensors, tensors_of_state
from train.backends.torch.precision import Precision
from train.backends.torch.runtime import generator_states, import_torch, restore_generators
from train.checkpoints.state import arrays_sha256
from train.config import TrainConfig

if TYPE_CHECKING:
    from train.backends.torch.model import BuiltModule


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

    def boxes(self, part: StatePart) -> list[NamedBox]:
        """What this rank holds of WEIGHTS or OPTIMIZER, in the order of `arrays`, by names that no layout changes."""
        layout, rows_of = self._layout, rows_by_name(self._model)
        names = {id(weight): name for name, weight in self._model.named_parameters()}
        rows = [rows_of[names[id(weight)]] for weight in self.weights]
        weights = [each.of(layout.box(weight)) for each, weight in zip(rows, self.weights, strict=True)]
        if part is StatePart.WEIGHTS:
            return weights
        remembered: list[NamedBox] = []
        for each, weight, updated in zip(rows, self.weights, self.updated, strict=True):
            of_weight = each.of(layout.state_box(layout.box(weight)))
            for key, tensor in tensors_of_state(self.optimizer, updated).items():
                # A number of steps, or what lies where the weight lies.
                is_like_it = tensor.shape == updated.shape
                box = of_weight.box if is_like_it else whole_box(tuple(tensor.shape))
                remembered.append(NamedBox(f"{of_weight.name}/{key}", box))
        remembered += [NamedBox(f"loss_scale/{place}", whole_box(())) for place in range(len(self._precision.state()))]
        if self.averages is None:
            return remembered
        return [*remembered, NamedBox("averages/num_updates", whole_box(())), *weights]

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
