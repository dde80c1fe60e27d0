"""Recomputes activations of parts of a PyTorch module (`train.memory.activation_checkpointing`).

Chen et al., arXiv:1604.06174: of a block only what goes in is kept, and its backward pass computes the rest again. The
second time the block finds its buffers and the generators as they were the first time, and leaves no trace in either:
gradients, moving statistics and dropout's masks have the bits that they have without it. Strategies gather and shard
the same blocks as one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

from train.backends.rules import nothing_to_recompute, replaced
from train.backends.torch.batch_norms import BatchNorms
from train.backends.torch.runtime import import_torch
from train.config import TrainConfig

# Fewer modules in a row are one part.
SHORTEST_CHAIN = 4


class Recomputed:
    """The blocks of one model, none unless `train.memory.activation_checkpointing` is on; and its batch norms."""

    def __init__(self, config: TrainConfig, model: Any, is_keras: bool) -> None:
        self.norms = BatchNorms(config, model, is_keras)
        self._of_keras = None
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._forwards: list[tuple[Any, partial[Any]]] = []
        self._is_on = config.memory.activation_checkpointing == "on" and not is_keras
        if config.memory.activation_checkpointing != "on":
            return
        if is_keras:
            from train.backends.keras.recompute import Segments

            self._of_keras = Segments(config.model, model)
            return
        self._forwards = list(_blocks(model, self._compute))
        if sum(_num_parts(forward) for _, forward in self._forwards) < 2:
            raise nothing_to_recompute(config.model, "a module class that it uses more than once, or an nn.Sequential")

    @contextmanager
    def forward(
        self, weights_N: Any, drawing: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> Iterator[None]:
        """Around the forward pass of a batch, with synchronized batch norms if there are some.

        `drawing`: the random bits of the batch, if others are in use by the time of its backward pass.
        """

        @contextmanager
        def around() -> Iterator[None]:
            with drawing(), self.norms.synchronized(weights_N):
                yield

        # The backward pass, which may run in another thread, enters it again.
        self._around = around
        # Keras exchanges its own variables.
        compute = partial(self._compute, modules=[])
        of_keras = self._of_keras.replaced(compute) if self._of_keras else nullcontext()
        with self._around(), of_keras, replaced("forward", self._forwards):
            yield

    def chain(self, layers: Sequence[Any]) -> list[Callable[[Any], Any]]:
        """What computes `layers` in a row: several single layers at a time, as those of an `nn.Sequential`."""
        if not self._is_on:
            return list(layers)
        calls: list[Callable[[Any], Any]] = []
        for has_parts, group in groupby(layers, key=lambda layer: bool(list(layer.children()))):
            run = list(group)
            calls += run if has_parts else [partial(_in_parts, list(_parts(run)), self._compute)]
        return calls

    def _compute(self, function: Callable[..., Any], *args: Any, modules: list[Any], **kwargs: Any) -> Any:
        """function(*args, **kwargs), by `modules`, whose tensors are forgotten until the backward pass."""
        from torch.utils._pytree import tree_flatten, tree_unflatten
        from torch.utils.checkpoint import checkpoint

        # A caller may change its lists afterwards. Of tensors at the top PyTorch finds the devices, and refuses those
        # that were changed in place meanwhile.
        flat, structure = tree_flatten((args, kwargs))
        around = self._around

        def compute(*flat: Any) -> Any:
            args, kwargs = tree_unflatten(list(flat), structure)
            return function(*args, **kwargs)

        def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
            sums: list[Any] = []
            return self.norms.keeping(sums), _Reentered(partial(again, _buffers(modules), sums))

        @contextmanager
        def again(buffers: list[tuple[dict[str, Any], str, Any]], sums: list[Any]) -> Iterator[None]:
            with around(), self.norms.again(sums), _exchanged(buffers):
                yield

        return checkpoint(compute, *flat, use_reentrant=False, context_fn=contexts)


class _Reentered:
    """A context that is made anew each time: a backward pass in two parts, of inputs and of weights, computes a block
    again in both."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make
        self._entered: AbstractContextManager[None] = nullcontext()

    def __enter__(self) -> None:
        self._entered = self._make()
        self._entered.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)


def _blocks(model: Any, compute: Callable[..., Any]) -> Iterator[tuple[Any, partial[Any]]]:
    """-> modules, and what takes the place of their `forward`: the outermost ones of each class with parts of its own
    that the model uses more than once, as a network's blocks are; and chains of single layers in parts."""
    nn = import_torch().nn
    is_repeated = repeated_in(model)

    def found(module: Any) -> Iterator[tuple[Any, partial[Any]]]:
        children = list(module.children())
        is_sequential = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
        if is_repeated(module):
            yield module, partial(compute, module.forward, modules=[module])
        elif is_sequential and children and not any(list(child.children()) for child in children):
            yield module, partial(_in_parts, list(_parts(children)), compute)
        else:
            for child in children:
                yield from found(child)

    # A module may stand at two places.
    return iter({id(module): (module, forward) for module, forward in found(model)}.values())


def _num_parts(forward: partial[Any]) -> int:
    """Number of parts that are computed one after the other; all activations of a single part exist at once."""
    return len(forward.args[0]) if forward.func is _in_parts else 1


def _parts(layers: list[Any]) -> Iterator[list[Any]]:
    """About as many as each has layers: so least is kept, of all parts together and of the one in work."""
    length = len(layers) if len(layers) < SHORTEST_CHAIN else math.ceil(math.sqrt(len(layers)))
    part: list[Any] = []
    for layer in layers:
        # What works in place must not begin a part: it would change what the part is computed from.
        if len(part) >= length and not getattr(layer, "inplace", False):
            yield part
            part = []
        part.append(layer)
    yield part


def _in_parts(parts: list[list[Any]], compute: Callable[..., Any], inputs: Any) -> Any:
    for part in parts:
        inputs = compute(partial(_in_a_row, part), inputs, modules=part)
    return inputs


def _in_a_row(layers: list[Any], inputs: Any) -> Any:
    for layer in layers:
        inputs = layer(inputs)
    return inputs


def _buffers(modules: list[Any]) -> list[tuple[dict[str, Any], str, Any]]:
    """Return the location, name and a copy of each of their buffers."""
    return [
        (each._buffers, name, buffer.clone())
        for module in modules
        for each in module.modules()
        for name, buffer in each._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _exchanged(buffers: list[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Inside it modules have these buffers. Not their values in the old ones, which autograd may have kept."""
    before = [(there, name, there[name]) for there, name, _ in buffers]
    for there, name, buffer in buffers:
        there[name] = buffer
    try:
        yield
    finally:
        for there, name, buffer in before:
            there[name] = buffer


def blocks_of(model: Any) -> list[Any]:
    """The outermost modules of each class with parts of its own that the model uses more than once."""
    is_repeated = repeated_in(model)

    def found(module: Any) -> Iterator[Any]:
        if is_repeated(module):
            yield module
        else:
            for child in module.children():
                yield from found(child)

    # A module may stand at two places.
    return list({id(module): module for child in model.children() for module in found(child)}.values())


def repeated_in(model: Any) -> Callable[[Any], bool]:
    """-> whether a module is of a class with parts of its own that the model uses more than once."""
    uses = Counter(type(module) for module in model.modules() if _is_block(module))
    return lambda module: _is_block(module) and uses[type(module)] > 1


def _is_block(module: Any) -> bool:
    """Whether a module has parts and a forward pass of its own, which a chain of layers has not."""
    nn = import_torch().nn
    chains = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    is_chain = isinstance(module, chains) and type(module).forward in {chain.forward for chain in chains}
    return bool(list(module.children())) and not is_chain and "forward" not in vars(module)
