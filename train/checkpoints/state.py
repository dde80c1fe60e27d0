"""Converts the state of a training to files: names of the files of a replicated checkpoint, and arrays as bytes and
back.

No framework is needed to read them, and npz files hold no code.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Iterable, Sequence

import numpy as np

WEIGHTS = "weights.npz"
OPTIMIZER_FILES = "optimizer"
"""How their names begin: one for each rank, or this one."""
OPTIMIZER = f"{OPTIMIZER_FILES}.npz"
INDEX = "shards.npz"
MARKER = "MARKER.json"


def rank_file(rank: int) -> str:
    """The file with a rank's own state: what is neither weight nor optimizer (moving statistics, seed states)."""
    return f"rank-{rank:05d}.npz"


def dump_arrays(arrays: Sequence[np.ndarray]) -> bytes:
    """An npz file in the order given; equal arrays give equal bytes."""
    buffer = io.BytesIO()
    np.savez(buffer, **{f"{index:05d}": array for index, array in enumerate(arrays)})
    return buffer.getvalue()


def load_arrays(data: bytes) -> list[np.ndarray]:
    """Read the output of `dump_arrays`. Raises ValueError for an object array, which would have to be unpickled."""
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        return [stored[name] for name in sorted(stored.files)]


def arrays_sha256(arrays: Iterable[np.ndarray]) -> str:
    """Over shape, dtype and little-endian bytes of all arrays, in order."""
    digest = hashlib.sha256()
    for array in arrays:
        little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
        digest.update(f"{array.shape}{array.dtype.name};".encode())
        digest.update(little.tobytes())
    return digest.hexdigest()
