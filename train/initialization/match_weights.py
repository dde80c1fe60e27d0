"""Matches the arrays of a file to the weights of a model by name, below one common prefix, and reports the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from shardmill.errors import UsageError
from train.checkpoints.stored_arrays import ArrayLike

MAX_NAMED = 8


@dataclass(frozen=True, slots=True)
class Initialized:
    """The weights that a training loaded from `train.init_from`."""

    source: str
    num_loaded: int
    num_weights: int
    """Arrays of the model."""
    share: float
    """Share of the model's numbers."""
    replaced: tuple[str, ...]
    """Weights of the head that keep their fresh values, and why: other shapes, or other classes."""
    missing: tuple[str, ...]
    """Weights of the model that the file does not have; they keep their fresh values."""
    unused: tuple[str, ...]
    """Arrays of the file that the model does not have."""


@dataclass(frozen=True, slots=True)
class Match:
    """Values for some of a model's weights, and what is said of the others; as in `Initialized`."""

    arrays: Mapping[str, ArrayLike]
    """Not read yet, if they are in a file."""
    replaced: tuple[str, ...]
    missing: tuple[str, ...]
    unused: tuple[str, ...]

    def initialized(self, source: str, shapes: Mapping[str, tuple[int, ...]]) -> Initialized:
        """Return the record."""
        size = sum(map(math.prod, shapes.values()))
        share = sum(array.size for array in self.arrays.values()) / max(1, size)
        return Initialized(source, len(self.arrays), len(shapes), share, self.replaced, self.missing, self.unused)


def match_weights(
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, ArrayLike],
    head: Collection[str],
    source: str,
    *,
    other_classes: bool = False,
) -> Match:
    """`shapes`: those of the model's weights, `given`: the file's arrays, by name; `head`: the last layer's names.

    Names of either side may have a common prefix: a model inside an export or in DistributedDataParallel, a file of a
    backbone that is a part of the model. The head's arrays are left out if one of them does not fit, or with
    `other_classes`. Raises UsageError that lists all other weights of which the file has another shape, or if nothing
    fits.
    """
    of_file, of_model = _prefixes(shapes, given)
    # The head as a whole: half of another one is none.
    shapes_there = {
        name: given[there].shape for name in head if (there := of_file + name.removeprefix(of_model)) in given
    }
    other_head = other_classes or any(shapes[name] != shape for name, shape in shapes_there.items())
    arrays, replaced, unfit, missing = {}, [], [], []
    taken: set[str] = set()
    for name, shape in shapes.items():
        name_there = of_file + name.removeprefix(of_model)
        array = given.get(name_there) if name.startswith(of_model) else None
        if array is None:
            missing.append(name)
            continue
        taken.add(name_there)
        both = f"{name}: {array.shape} in the file, {shape} in the model"
        if name in head and other_head:
            replaced.append(both if array.shape != shape else f"{name}: belongs to other classes")
        elif array.shape != shape:
            unfit.append(both)
        else:
            arrays[name] = array
    if unfit:
        raise UsageError(
            f"{source} does not fit the model: {listed(unfit)}",
            "expected equal shapes, except in the last layer",
            "use the model and the image size with which the file was created",
        )
    if not arrays:
        raise UsageError(
            f"no array of {source} fits a weight of the model",
            f"the model has {listed(list(shapes))}; the file has {listed(list(given)) or 'none'}",
            "use the model with which the file was created",
        )
    return Match(arrays, tuple(replaced), tuple(missing), tuple(sorted(given.keys() - taken)))


def listed(names: Collection[str], most: int = MAX_NAMED) -> str:
    """List the first names for people, and how many follow."""
    shown = "; ".join(list(names)[:most])
    return shown + (f"; and {len(names) - most} more" if len(names) > most else "")


def _prefixes(shapes: Mapping[str, tuple[int, ...]], given: Mapping[str, ArrayLike]) -> tuple[str, str]:
    """The file's and the model's under which most names are found with their shapes; of equal ones the shortest.

    One of the two is empty.
    """
    found = Counter({("", ""): 0})
    by_end: dict[str, list[str]] = {}
    for name in given:
        by_end.setdefault(_end(name), []).append(name)
    for weight, shape in shapes.items():
        for name in by_end.get(_end(weight), ()):
            if given[name].shape != shape:
                continue
            of_file, of_model = name.removesuffix(weight), weight.removesuffix(name)
            if name == weight:
                found["", ""] += 1
            elif name.endswith(weight) and of_file[-1] in "./":
                found[of_file, ""] += 1
            elif weight.endswith(name) and of_model[-1] in "./":
                found["", of_model] += 1
    return min(found, key=lambda each: (-found[each], len("".join(each))))


def _end(name: str) -> str:
    return name.replace(".", "/").rpartition("/")[2]
