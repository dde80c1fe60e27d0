"""Reads files of named arrays as data: nothing is unpickled, imported or executed, and sizes are bounded.

`.safetensors` (its header is JSON), HDF5 as Keras writes it, and the HDF5 file inside a `.keras` archive. PyTorch's own
files are the backend's to read (train/backends/torch/model.py).
"""

from __future__ import annotations

import io
import json
import math
import zipfile
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.checkpoints.arrays import StoredArray, WeightFile

MAX_HEADER_BYTES = 100_000_000
MAX_ARRAY_BYTES = 16_000_000_000
"""Maximum size of all arrays together, unpacked."""
MAX_EXPANSION = 100
"""Weights hardly compress: of a file of a few bytes that unpacks to gigabytes nothing is read."""
FREE_BYTES = 100_000_000
"""Below this any expansion is harmless: a fresh bias is all zeros."""
WEIGHTS_OF_KERAS = "model.weights.h5"
_DTYPES = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1",
    "U64": "<u8", "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?",
}  # fmt: skip


def read_arrays(data: bytes, suffix: str, where: str) -> dict[str, np.ndarray]:
    """Name -> array. Raises UsageError for a file of another kind."""
    try:
        if suffix == ".safetensors":
            stored = stored_safetensors(WeightFile.of_bytes(data, suffix, where))
            return {name: array[...] for name, array in stored.items()}
        if suffix == ".keras":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                check_expansion(archive.getinfo(WEIGHTS_OF_KERAS).file_size, len(data))
                data = archive.read(WEIGHTS_OF_KERAS)
        return _hdf5(data)
    except Exception as error:
        # What damage or malice makes of a file shows as errors of many kinds.
        raise UsageError(
            f"{where} cannot be read as {suffix}: {type(error).__name__}: {' '.join(str(error).split())[:200]}",
            "expected a complete file of weights",
            "save or download it again",
        ) from error


def check_expansion(num_bytes: int, num_bytes_of_file: int) -> None:
    """Raises ValueError for arrays of more bytes than a file of this size can honestly hold, or a process may."""
    if num_bytes > MAX_ARRAY_BYTES:
        raise ValueError(f"its arrays have {num_bytes} bytes, and at most {MAX_ARRAY_BYTES} are read")
    if num_bytes > FREE_BYTES and num_bytes > MAX_EXPANSION * num_bytes_of_file:
        raise ValueError(f"its arrays have {num_bytes} bytes, in a file of {num_bytes_of_file}")


def stored_safetensors(file: WeightFile) -> dict[str, StoredArray]:
    """Eight bytes of length, a JSON header of types, shapes and offsets, then the arrays (huggingface/safetensors).

    Raises ValueError for anything else.
    """
    num_bytes = int.from_bytes(file.read_range(0, 8), "little")
    if not 2 <= num_bytes <= min(MAX_HEADER_BYTES, file.size_bytes - 8):
        raise ValueError(f"a header of {num_bytes} bytes in a file of {file.size_bytes}")
    header = json.loads(file.read_range(8, num_bytes))
    if not isinstance(header, dict):
        raise ValueError(f"its header is a JSON {type(header).__name__}, not an object")
    body_start = 8 + num_bytes
    body_bytes = file.size_bytes - body_start
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    # Ranges may overlap: many names for the same bytes. What is widened takes memory for each.
    widened = sum(4 * math.prod(entry["shape"]) for entry in entries.values() if entry["dtype"] == "BF16")
    check_expansion(widened, file.size_bytes)
    arrays = {}
    for name, entry in entries.items():
        dtype, shape, (start, end) = np.dtype(_DTYPES[entry["dtype"]]), tuple(entry["shape"]), entry["data_offsets"]
        if any(type(each) is not int or each < 0 for each in (*shape, start, end)):
            raise ValueError(f"{name!r} has the shape {shape} and the place {start}..{end}")
        size = math.prod(shape) * dtype.itemsize
        if end - start != size or end > body_bytes:
            raise ValueError(f"{name!r} has {end - start} bytes for a shape of {size}, in a body of {body_bytes}")
        arrays[name] = StoredArray(file, body_start + start, dtype, shape, is_bfloat16=entry["dtype"] == "BF16")
    check_expansion(sum(array.size * array.dtype.itemsize for array in arrays.values()), file.size_bytes)
    return arrays


def _hdf5(data: bytes) -> dict[str, np.ndarray]:
    """Every dataset of numbers by its path."""
    import h5py

    found: dict[str, Any] = {}
    with h5py.File(io.BytesIO(data), "r") as file:

        def visit(name: str, item: Any) -> None:
            # `visititems` follows no soft or external links. A dataset can lie elsewhere all the same.
            if isinstance(item, h5py.Dataset) and item.dtype.kind in "fiub":
                if item.external is not None or item.is_virtual:
                    raise ValueError(f"{name!r} lies in another file")
                found[name] = item

        file.visititems(visit)
        check_expansion(sum(item.nbytes for item in found.values()), len(data))
        return {name: np.asarray(item[()]) for name, item in found.items()}
