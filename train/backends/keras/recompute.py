"""Recomputes activations of parts of a Keras model (`train.memory.activation_checkpointing`).

The graph of a functional or sequential model is cut where little passes, into parts of which only what goes in is kept
(Chen et al., arXiv:1604.06174). `keras.RematScope` works layer by layer: it keeps every layer's input, and updates
moving statistics and the generators of dropout a second time. Here a part is a pure function of tensors and of its
variables' values; what it assigns is assigned once, after its first time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from shardmill.errors import UsageError
from train.backends.batch_norms import replaced
from train.backends.keras.graph_parts import Part, graphs_of, parts_of_graph
from train.backends.model_errors import nothing_to_recompute

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
