"""Recomputes activations of parts of a Keras model (`train.memory.activation_checkpointing`).

The graph of a functional or sequential model is cut where little passes, into parts of which only what goes in is kept
(Chen et al., arXiv:1604.06174). `keras.RematScope` works layer by layer: it keeps every layer's input, and updates
moving statistics and the generators of dropout a second time. Here a part is a pure function of tensors and of its
variables' values; what it assigns is assigned once, after its first time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from shardmill.errors import UsageError
from train.backends.rules import nothing_to_recompute, replaced

Compute = Callable[..., list[Any]]
"""(function, *tensors) -> function(*tensors), of which the backend keeps only the tensors."""


@dataclass(slots=True)
class Done:
    """The side results of one computation of a part."""

    assigned: list[tuple[Any, Any]] = field(default_factory=list)
    """Variables and their new values."""
    num_outputs: int = 0
    losing: list[Any] = field(default_factory=list)
    """Layers that add a loss; these losses come behind the outputs."""


class Segments:
    """The parts of one model."""

    def __init__(self, name: str, model: Any) -> None:
        self._name = name
        self._parts = [(graph, parts_of_graph(graph)) for graph in graphs_of(model)]
        self._compute: Compute | None = None
        if sum(part.is_twice for _, parts in self._parts for part in parts) < 2:
            raise nothing_to_recompute(
                name, "a functional or sequential Keras model, or such a model as a layer, with several layers in a row"
            )

    def __str__(self) -> str:
        return ", ".join(str(len(part.nodes)) for _, parts in self._parts for part in parts if part.is_twice)

    def replaced(self, compute: Compute) -> AbstractContextManager[None]:
        """Inside it the model's forward pass computes its parts by `compute`."""
        self._compute = compute
        return replaced(
            "_run_through_graph", [(graph, partial(self._run, graph, parts)) for graph, parts in self._parts]
        )

    def _run(self, graph: Any, parts: list[Part], inputs: Any, operation_fn: Any = lambda operation: operation) -> Any:
        """In place of the graph's own (keras/src/ops/function.py)."""
        from keras import tree

        values = dict(zip(map(id, graph.inputs), tree.flatten(inputs), strict=True))
        for part in parts:
            function = partial(_through, graph, part, operation_fn)
            tensors = [values[id(symbol)] for symbol in part.inputs]
            outputs = self._twice(part, function, tensors) if part.is_twice else function(*tensors)
            values.update(zip(map(id, part.outputs), outputs, strict=True))
        return tree.pack_sequence_as(graph._outputs_struct, [values[id(symbol)] for symbol in graph.outputs])

    def _twice(self, part: Part, function: Callable[..., list[Any]], tensors: list[Any]) -> list[Any]:
        assert self._compute is not None
        layers = [node.operation for node in part.nodes]
        variables = list({id(each): each for layer in layers for each in getattr(layer, "variables", ())}.values())
        done: list[Done] = []
        pure = partial(self._pure, function, layers, variables, len(tensors), _ambient(), done)
        outputs = self._compute(pure, *tensors, *map(_value_of, variables))
        for variable, value in done[0].assigned:
            variable.assign(value)
        for layer, loss in zip(done[0].losing, outputs[done[0].num_outputs :], strict=True):
            layer.add_loss(loss)
        return outputs[: done[0].num_outputs]

    def _pure(
        self,
        function: Callable[..., list[Any]],
        layers: list[Any],
        variables: list[Any],
        num_tensors: int,
        ambient: dict[str, Any],
        done: list[Done],
        *values: Any,
    ) -> list[Any]:
        """Compute the results from values alone; assigns nothing."""
        import keras
        from keras.src import backend

        given = list(zip(variables, values[num_tensors:], strict=True))
        with _inside(ambient), keras.StatelessScope(given, collect_losses=True, initialize_variables=False) as scope:
            before = {id(variable): scope.get_current_value(variable) for variable in variables}
            outputs = function(*values[:num_tensors])
        if any(backend.get_keras_mask(output) is not None for output in outputs):
            raise UsageError(
                f"train.memory.activation_checkpointing: layers of train.model = {self._name!r} pass on masks",
                "expected a model of images, without masks",
                "set train.memory.activation_checkpointing = 'off'",
            )
        after = [(variable, scope.get_current_value(variable)) for variable in variables]
        changed = [(variable, value) for variable, value in after if value is not before[id(variable)]]
        inner = [each for layer in layers if isinstance(layer, keras.Layer) for each in layer._flatten_layers()]
        losing = [next(layer for layer in inner if id(loss) in layer._loss_ids) for loss in scope.losses]
        done.append(Done(changed, len(outputs), losing))
        return [*outputs, *scope.losses]


def _through(graph: Any, part: Part, operation_fn: Any, *tensors: Any) -> list[Any]:
    from keras import tree

    values = dict(zip(map(id, part.inputs), tensors, strict=True))
    for node in part.nodes:
        args, kwargs = node.arguments.fill_in(values)
        outputs = operation_fn(graph._get_operation_for_node(node))(*args, **kwargs)
        values.update(zip(map(id, node.outputs), tree.flatten(outputs), strict=True))
    return [values[id(symbol)] for symbol in part.outputs]


def _value_of(variable: Any) -> Any:
    """As it is now: not cast to what a layer computes in, and not changed by what is assigned later."""
    import keras

    if keras.backend.backend() == "torch":
        return variable._value if variable.trainable else variable._value.detach().clone()
    import tensorflow as tf

    return tf.convert_to_tensor(variable._value)


_AMBIENT = ("current_call_ctx", "autocast_scope")
"""Ambient call arguments of layers, such as `training`: Keras's names."""


def _ambient() -> dict[str, Any]:
    from keras.src.backend.common import global_state

    return {name: global_state.get_global_attribute(name) for name in _AMBIENT}


@contextmanager
def _inside(ambient: dict[str, Any]) -> Iterator[None]:
    from keras.src.backend.common import global_state

    before = _ambient()
    for name, value in ambient.items():
        global_state.set_global_attribute(name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            global_state.set_global_attribute(name, value)


def compute_in_tensorflow(function: Callable[..., list[Any]], *tensors: Any) -> list[Any]:
    """`Compute` while a step is traced. Raises UsageError for layers whose second time would not be as the first."""
    import tensorflow as tf

    @tf.custom_gradient
    def call(*tensors: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        num_before = len(graph.get_operations())
        outputs = function(*tensors)
        _refuse_state(graph.get_operations()[num_before:])

        def gradient(*of_outputs: Any) -> list[Any]:
            # Not earlier: what is computed now would wait in memory for what it is needed with.
            with tf.control_dependencies([each for each in of_outputs if each is not None]):
                again = [tf.identity(tensor) for tensor in tensors]
            sources = [place for place, tensor in enumerate(again) if tensor.dtype.is_floating]
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again[place] for place in sources])
                pairs = [
                    (output, of_output)
                    for output, of_output in zip(function(*again), of_outputs, strict=True)
                    if output.dtype.is_floating and of_output is not None
                ]
            found = tape.gradient(
                [output for output, _ in pairs],
                [again[place] for place in sources],
                output_gradients=[of_output for _, of_output in pairs],
            )
            gradients: list[Any] = [None] * len(again)
            for place, each in zip(sources, found, strict=True):
                gradients[place] = each
            return gradients

        return outputs, gradient

    outputs = call(*tensors)
    return list(outputs) if isinstance(outputs, list | tuple) else [outputs]


def _refuse_state(operations: list[Any]) -> None:
    """All that a part of ours reads or changes was given to it as tensors."""
    stateful = [operation for operation in operations if operation.op_def.is_stateful]
    if stateful:
        raise UsageError(
            f"train.memory.activation_checkpointing: {stateful[0].name} is a {stateful[0].type}",
            (
                "expected layers with all state in Keras variables and seed generators: others compute different "
                "values the second time"
            ),
            "set train.memory.activation_checkpointing = 'off'",
        )


# How finely the largest part is tried out, from the largest layer on to the whole graph.
NUM_TRIED = 24
# Where a graph has fewer places at which one tensor alone passes, it is cut anywhere.
FEWEST_PLACES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """Nodes of a functional graph that follow each other."""

    nodes: list[Any]
    inputs: list[Any]
    """Keras's symbols of what comes from before it."""
    outputs: list[Any]
    """Tensors needed after it, likewise."""
    is_twice: bool


def graphs_of(model: Any) -> Iterator[Any]:
    """The functional graphs in a model."""
    import keras

    graphs: dict[int, Any] = {}
    for layer in model._flatten_layers():
        graph = layer._functional if isinstance(layer, keras.Sequential) else layer
        if hasattr(graph, "_nodes_by_depth"):
            graphs[id(graph)] = graph
    return iter(graphs.values())


def parts_of_graph(graph: Any) -> list[Part]:
    """All its nodes in the order in which they are computed. What holds a graph by itself is a part that is computed
    once: its own parts are computed twice."""
    nodes = [
        node
        for depth in sorted(graph._nodes_by_depth, reverse=True)
        for node in graph._nodes_by_depth[depth]
        if node.operation and not node.is_input
    ]
    holds = [any(graphs_of(node.operation)) if hasattr(node.operation, "_flatten_layers") else False for node in nodes]
    bounds: set[int] = {0, len(nodes)}
    for place, holds_graph in enumerate(holds):
        bounds |= {place, place + 1} if holds_graph else set()
    cuts = [cut for start, end in pairwise(sorted(bounds)) for cut in [start, *_best_cuts(graph, nodes, start, end)]]
    return [
        Part(
            nodes[start:end],
            _needed(nodes[start:end], nodes[:start], graph.inputs),
            _passing(nodes, end, graph.outputs, nodes[start:end]),
            is_twice=end - start > 1 and not holds[start],
        )
        for start, end in pairwise([*cuts, len(nodes)])
    ]


def _best_cuts(graph: Any, nodes: list[Any], start: int, end: int) -> list[int]:
    """Choose cuts between nodes `start` and `end` that minimize the sum of the data between all parts and the
    activations of the largest part.
    """
    passing = {place: _passing(nodes, place, graph.outputs, nodes[:place]) for place in range(start + 1, end)}
    narrow = [place for place, symbols in passing.items() if len(symbols) == 1]
    places = [start, *(narrow if len(narrow) >= FEWEST_PLACES else passing), end]
    kept = [0, *(_num_values(passing[place]) for place in places[1:-1]), 0]
    work = [
        _num_values(output for node in nodes[one:other] for output in node.outputs) for one, other in pairwise(places)
    ]
    best, best_cuts = sum(work), []
    smallest, whole = max(work, default=0), sum(work)
    for number in range(NUM_TRIED):
        limit = smallest * (whole / smallest) ** (number / NUM_TRIED) if smallest else 0
        cuts = _cheapest(kept, work, limit)
        needed = sum(kept[place] for place in cuts) + max(
            sum(work[one:other]) for one, other in pairwise([0, *cuts, len(work)])
        )
        if needed < best:
            best, best_cuts = needed, [places[place] for place in cuts]
    return best_cuts


def _cheapest(kept: list[int], work: list[int], limit: float) -> list[int]:
    """The cuts with the smallest sum of `kept` that leave no part with more `work` than `limit`."""
    least, before = [0.0] * len(kept), [0] * len(kept)
    for place in range(1, len(kept)):
        least[place] = float("inf")
        total = 0
        for other in range(place - 1, -1, -1):
            total += work[other]
            if total > limit and other < place - 1:
                break
            if least[other] + kept[place] < least[place]:
                least[place], before[place] = least[other] + kept[place], other
    cuts, place = [], before[-1]
    while place:
        cuts.append(place)
        place = before[place]
    return cuts[::-1]


def _passing(nodes: list[Any], place: int, outputs: Iterable[Any], made_by: list[Any]) -> list[Any]:
    """Return outputs of `made_by` that nodes from `place` on, or the graph's caller, need."""
    needed = {id(symbol) for node in nodes[place:] for symbol in node.input_tensors} | set(map(id, outputs))
    return [symbol for node in made_by for symbol in node.outputs if id(symbol) in needed]


def _needed(nodes: list[Any], earlier: list[Any], inputs: Iterable[Any]) -> list[Any]:
    """Return inputs of these nodes that earlier nodes compute."""
    there = {id(symbol): symbol for symbol in inputs} | {
        id(symbol): symbol for node in earlier for symbol in node.outputs
    }
    needed = dict.fromkeys(id(symbol) for node in nodes for symbol in node.input_tensors)
    return [there[each] for each in needed if each in there]


def _num_values(symbols: Iterable[Any]) -> int:
    """Of one image."""
    return sum(math.prod(size or 1 for size in symbol.shape[1:]) for symbol in symbols)
