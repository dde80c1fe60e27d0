"""The weights of a Keras model by name, as its files name them: for `train.init_from`.

Works on each of Keras's own backends.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from train.backends.backend import NamedWeights
from train.backends.keras.freeze import head_of
from train.backends.weight_files import read_arrays
from train.checkpoints.stored_arrays import ArrayLike, WeightFile

# Keras's own files number the variables of each layer below this name.
VARIABLES = "vars"
# Older files of whole models.
LEGACY_WEIGHTS, LEGACY_OPTIMIZER = "model_weights/", "optimizer_weights/"


def read_weights(file: WeightFile) -> dict[str, np.ndarray]:
    """`train.backends.backend.Learner.read_weights` of a Keras model."""
    arrays = read_arrays(file.read(), file.suffix, file.where)
    return _legacy_names(arrays) if file.suffix == ".h5" else arrays


def named_weights(model: Any, like: Collection[str] = ()) -> NamedWeights:
    """Weights by position in the model, as `.keras` and `.weights.h5` files name them, if `like` has such names; else
    by layer.
    """
    import keras

    by_place = any(f"{VARIABLES}/" in name for name in like)
    variables = _by_place(model) if by_place else _by_path(model)
    head = {id(variable) for variable in head_of(model).weights}

    def arrays() -> dict[str, np.ndarray]:
        return {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}

    def assign(given: Mapping[str, ArrayLike]) -> None:
        for name, array in given.items():
            now = np.asarray(keras.ops.convert_to_numpy(variables[name]))
            variables[name].assign(np.array(array[...], dtype=now.dtype, order="C"))

    return NamedWeights(
        shapes={name: tuple(variable.shape) for name, variable in variables.items()},
        head=tuple(name for name, variable in variables.items() if id(variable) in head),
        arrays=arrays,
        assign=assign,
    )


def _legacy_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of an older `.h5` file, as keras.applications offers them: `conv1/conv1/kernel:0` -> `conv1/kernel`."""
    renamed = {}
    for name, array in arrays.items():
        if not name.startswith(LEGACY_OPTIMIZER):
            layer, _, weight = name.removeprefix(LEGACY_WEIGHTS).partition(":")[0].partition("/")
            renamed[weight or layer] = array
    return renamed


def _by_path(model: Any) -> dict[str, Any]:
    """Layers of two nested models may have one name."""
    named: dict[str, Any] = {}
    for variable in model.weights:
        count = sum(name.partition("#")[0] == variable.path for name in named) if variable.path in named else 0
        named[f"{variable.path}#{count + 1}" if count else variable.path] = variable
    return named


def _by_place(model: Any) -> dict[str, Any]:
    """As Keras walks a model when it saves it; it offers no other way to these names."""
    from keras.src.saving import saving_lib

    ours, found = {id(variable) for variable in model.weights}, {}

    class Walker(saving_lib.H5IOStore):
        """Notes which variable Keras would write where; Keras insists on a store of its own."""

        place = ""

        def make(self, path: str, metadata: Any = None) -> Walker:
            self.place = path
            return self

        def __setitem__(self, key: str, variable: Any) -> None:
            if id(variable) in ours:
                found["/".join(part for part in (self.place, VARIABLES, key) if part)] = variable

    walker = Walker(io.BytesIO(), mode="w")
    try:
        saving_lib._save_state(model, walker, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        walker.close()
    return found
