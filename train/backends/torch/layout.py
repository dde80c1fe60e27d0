"""How the tensors of a PyTorch model lie on the ranks: whole on each, or a slice of each (`DTensor`).

`TorchLearner` asks its layout for whatever depends on that; a strategy places the model (`TorchLearner.place`), and may
take it apart (train/models/tensor_plans.py). Files, hashes and other layouts never see that: a weight of such a part
is rows of an array of the model as `train.model` builds it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from train.backends.torch.runtime import import_torch
from train.checkpoints.arrays import TensorSlice

ShardModule = Callable[[Any, Collection[Any]], None]
"""(module on `meta`, parameters that stay whole): exchanges the other parameters for this rank's shards, in
place."""


class TensorLayout(Protocol):
    """What depends on where the elements of a tensor are."""

    def local(self, tensor: Any) -> Any:
        """This rank's elements, as a plain tensor that shares their memory."""
        ...

    def whole(self, tensor: Any) -> Any:
        """All elements. Every rank calls it, for one tensor after the other in the same order."""
        ...

    def state_of(self, module: Any) -> Iterator[Any]:
        """The tensors of the whole module's state_dict, in its order, each whole while it is looked at. Every rank
        takes all of them."""
        ...

    def slice_of(self, tensor: Any) -> TensorSlice:
        """Which elements this rank holds."""
        ...

    def state_slice(self, elements: TensorSlice) -> TensorSlice:
        """Of the elements of a weight that this rank holds, those that its optimizer updates."""
        ...

    def updated(self, weights: Sequence[Any]) -> list[Any]:
        """What this rank's optimizer updates of each weight: the weight, or some of its elements in the same memory."""
        ...

    def for_update(self, gradient: Any) -> Any:
        """The gradient of these elements."""
        ...

    def after_update(self, weights: Sequence[Any]) -> None:
        """Every rank has updated its elements: give each rank those of the others that it holds, too."""
        ...

    def global_norm(self, gradients: Sequence[Any]) -> float:
        """The norm of all tensors as one vector, equal on every rank."""
        ...

    def forget(self, module: Any) -> None:
        """Behind a forward pass without a backward pass: drop what was gathered for it, which the weights outdate."""
        ...


class _UpdatesAllItHolds:
    """Each rank's optimizer has the state of all elements that the rank holds."""

    def state_slice(self, elements: TensorSlice) -> TensorSlice:
        return elements

    def updated(self, weights: Sequence[Any]) -> list[Any]:
        return list(weights)

    def for_update(self, gradient: Any) -> Any:
        return gradient

    def after_update(self, weights: Sequence[Any]) -> None:
        return


class WholeTensors(_UpdatesAllItHolds):
    """Each rank has the whole model."""

    def forget(self, module: Any) -> None:
        return

    def state_of(self, module: Any) -> Iterator[Any]:
        return map(self.whole, module.state_dict().values())

    def local(self, tensor: Any) -> Any:
        return tensor.detach()

    def whole(self, tensor: Any) -> Any:
        return tensor.detach()

    def slice_of(self, tensor: Any) -> TensorSlice:
        return whole_slice(tuple(tensor.shape))

    def global_norm(self, gradients: Sequence[Any]) -> float:
        return total_norm(list(gradients))


class ShardedTensors(_UpdatesAllItHolds):
    """A tensor is a `DTensor` on a mesh of ranks, or plain and then equal on all of them.

    `sum_over_ranks` adds up a tensor over all ranks, in place.
    """

    def __init__(self, num_ranks: int, sum_over_ranks: Callable[[Any], None]) -> None:
        self._num_ranks = num_ranks
        self._sum_over_ranks = sum_over_ranks

    def local(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def forget(self, module: Any) -> None:
        # FSDP keeps what it has gathered for its outermost module until a backward pass.
        if hasattr(module, "reshard"):
            module.reshard()

    def state_of(self, module: Any) -> Iterator[Any]:
        rows_of = rows_by_name(module)
        parts: dict[str, list[Any]] = {}
        for name, tensor in module.state_dict().items():
            parts.setdefault(rows_of[name].name if name in rows_of else name, []).append(tensor)
        for of_one in parts.values():
            whole = [self.whole(each) for each in of_one]
            yield whole[0] if len(whole) == 1 else import_torch().cat(whole)

    def whole(self, tensor: Any) -> Any:
        tensor = tensor.detach()
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def slice_of(self, tensor: Any) -> TensorSlice:
        shape = tuple(tensor.shape)
        if not hasattr(tensor, "device_mesh"):
            return whole_slice(shape)
        offsets, sizes = [0] * len(shape), list(shape)
        mesh = tensor.device_mesh
        for axis, placement in _from_the_outermost_cut(tensor.placements):
            # Not `is_shard`: a strided shard is none by that.
            if not placement.is_replicate():
                # As torch.chunk cuts.
                dim, count, place = placement.dim, mesh.size(axis), mesh.get_local_rank(axis)
                step = -(-sizes[dim] // count)
                first = min(place * step, sizes[dim])
                offsets[dim] += first
                sizes[dim] = min(step, sizes[dim] - first)
        return TensorSlice(shape, tuple(offsets), tuple(sizes))

    def global_norm(self, gradients: Sequence[Any]) -> float:
        """PyTorch's own clipping fails on tensors of several meshes: one sum of squares, and one exchange.

        What several ranks hold alike counts once, by the share of each.
        """
        torch = import_torch()
        total = torch.zeros((), dtype=torch.float32)
        for gradient in gradients:
            local = self.local(gradient).float()
            total += (local * local).sum().cpu() * (self._num_shards(gradient) / self._num_ranks)
        self._sum_over_ranks(total)
        return float(total.sqrt())

    def _num_shards(self, tensor: Any) -> int:
        """Number of different slices; every other rank holds one of them once more."""
        number = 1
        if not hasattr(tensor, "device_mesh"):
            return number
        for size, placement in zip(tensor.device_mesh.shape, tensor.placements, strict=True):
            # Not `is_shard`: a strided shard is none by that, and is no copy either.
            number *= 1 if placement.is_replicate() else size
        return number


def kept_whole(module: Any) -> set[Any]:
    """What `train.freeze` freezes for good stays whole: each rank has it as its own state."""
    return {each for each in module.parameters() if not each.requires_grad}


def slices_of(module: Any, layout: TensorLayout) -> dict[str, TensorSlice]:
    """Of each trainable weight, by name, the elements that are here."""
    return {name: layout.slice_of(each) for name, each in module.named_parameters() if each.requires_grad}


def _from_the_outermost_cut(placements: Sequence[Any]) -> list[tuple[int, Any]]:
    """(mesh axis, placement) in the order in which a tensor was cut.

    A strided shard is one that was cut after an axis behind it: FSDP cuts what tensor parallelism has cut.
    """
    axes = list(enumerate(placements))
    return sorted(axes, key=lambda each: type(each[1]).__name__ == "_StridedShard")


def total_norm(gradients: list[Any]) -> float:
    """Return the norm of all tensors as one vector."""
    torch = import_torch()
    return float(torch.linalg.vector_norm(torch.stack([each.norm() for each in gradients])))


def whole_slice(shape: tuple[int, ...]) -> TensorSlice:
    """All elements of a tensor."""
    return TensorSlice(shape, (0,) * len(shape), shape)


@dataclass(frozen=True, slots=True)
class NamedSlice:
    """A slice of the array `name`."""

    name: str
    elements: TensorSlice


@dataclass(frozen=True, slots=True)
class Rows:
    """Part `index` of `count` equal parts of the rows of the array `name`."""

    name: str
    index: int = 0
    count: int = 1

    def of(self, elements: TensorSlice) -> NamedSlice:
        """`elements` of these rows, as one of the array."""
        if self.count == 1:
            return NamedSlice(self.name, elements)
        num_rows, *others = elements.global_shape
        offsets = (self.index * num_rows + elements.offsets[0], *elements.offsets[1:])
        return NamedSlice(self.name, TensorSlice((self.count * num_rows, *others), offsets, elements.shape))


def rows_by_name(model: Any) -> dict[str, Rows]:
    """Name of each parameter of a module -> what it is of the model that was built.

    A part that took the place of another one says so by `rows_of`: name of its parameter -> (the other's, index).
    """
    found = {name: Rows(name) for name, _ in model.named_parameters()}
    for path, module in model.named_modules():
        rows_of: dict[str, tuple[str, int]] = getattr(module, "rows_of", {})
        counts = Counter(name for name, _ in rows_of.values())
        prefix = f"{path}." if path else ""
        for name, (there, index) in rows_of.items():
            found[prefix + name] = Rows(prefix + there, index, counts[there])
    return found
