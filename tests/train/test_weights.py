"""Weights keep their bits on the way to disk and back, and no code can ride along."""

from __future__ import annotations

import io

import numpy as np
import pytest

from shardmill.errors import UsageError
from train.backends.keras.runtime import assign_variables
from train.checkpoints.state import arrays_sha256, dump_arrays, load_arrays


def small_model(seed: int = 0):
    import keras

    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])


def test_values_come_back_bit_for_bit():
    import keras

    variables = [
        keras.Variable(np.array([0.1, -0.0, np.nan, np.inf], np.float32)),
        keras.Variable(np.array(5), dtype="int64"),
        keras.random.SeedGenerator(9).state,
    ]
    data = dump_arrays([np.asarray(variable) for variable in variables])
    assert data == dump_arrays([np.asarray(variable) for variable in variables]), "equal values give equal bytes"
    before = [np.array(variable).tobytes() for variable in variables]
    for variable in variables:
        variable.assign(np.zeros(variable.shape, str(variable.dtype)))
    assign_variables(variables, load_arrays(data), "this file")
    assert [np.array(variable).tobytes() for variable in variables] == before


def weights_sha256(model):
    return arrays_sha256(np.asarray(variable) for variable in model.weights)


def test_the_hash_sees_every_weight():
    model = small_model()
    hashes = {weights_sha256(model)}
    assert weights_sha256(small_model()) in hashes
    for weight in model.weights:
        changed = np.array(weight)
        changed.flat[0] = np.nextafter(changed.flat[0], np.float32(9))
        weight.assign(changed)
        hashes.add(weights_sha256(model))
    assert len(hashes) == 1 + len(model.weights)


def test_other_shapes_are_refused_before_anything_is_assigned():
    import keras

    first, second = keras.Variable(np.zeros(2, np.float32)), keras.Variable(np.zeros(3, np.float32))
    arrays = [np.ones(2, np.float32), np.ones(4, np.float32)]
    with pytest.raises(UsageError, match=r"a file holds float32 \(4,\) for .*; this model has float32 \(3,\) there"):
        assign_variables([first, second], arrays, "a file")
    assert not np.array(first).any()
    with pytest.raises(UsageError, match="holds 2 variables; this model has 1"):
        assign_variables([first], arrays, "a file")


def test_pickled_arrays_are_not_read():
    buffer = io.BytesIO()
    np.savez(buffer, **{"00000": np.array([{"a": 1}], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        load_arrays(buffer.getvalue())
