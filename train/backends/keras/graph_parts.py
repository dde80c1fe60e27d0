"""Cuts the graph of a Keras model for `train.memory.activation_checkpointing`, at points with little data."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

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
