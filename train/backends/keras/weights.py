"""Model variables as bytes and back: one hash that names weights, and npz files that hold no code."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardmill.errors import UsageError


def weights_sha256(model: Any) -> str:
    """Over shape, dtype and little-endian bytes of all weights of a Keras model in its own order; no seed states."""
    digest = hashlib.sha256()
    for variable in model.weights:
        array = np.asarray(variable)
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{array.shape}{array.dtype.name};".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()


def dump_variables(variables: Sequence[Any]) -> bytes:
    """The values of Keras variables as an npz file; equal values give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"{index:05d}": np.asarray(variable) for index, variable in enumerate(variables)})
    return buffer.getvalue()


def assign_variables(variables: Sequence[Any], data: bytes, source: str) -> None:
    """Assign what `dump_variables` wrote. Raises UsageError, before any assignment, where number or shapes differ."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        arrays = [stored[name] for name in sorted(stored.files)]
    fix = "train.model must build what it built then; or train under another models.uri"
    if len(arrays) != len(variables):
        raise UsageError(f"{source} holds {len(arrays)} variables", f"this model has {len(variables)}", fix)
    for variable, array in zip(variables, arrays, strict=True):
        if tuple(variable.shape) != array.shape or str(variable.dtype) != array.dtype.name:
            raise UsageError(
                f"{source} holds {array.dtype.name} {array.shape} for {variable.path}",
                f"this model has {variable.dtype} {tuple(variable.shape)} there",
                fix,
            )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)
