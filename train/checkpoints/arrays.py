"""Arrays of a training in files: names of the files of a replicated checkpoint, arrays as bytes and back, and arrays in
files of weights of which slices are read: no rank needs to read, or hold, more than its own part.

No framework is needed to read them, and npz files hold no code. A file of weights is given as a function that reads a
range of it, so it can lie in any store.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import Protocol

import numpy as np

from shardmill.errors import IntegrityError

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


Slices = tuple[slice, ...] | EllipsisType
"""A box of an array: a slice with a start and an end for each axis; or all of it."""

# What lies closer together is read at once: a request costs more than some bytes.
MOST_BYTES_BETWEEN = 1 << 16
MOST_BYTES_AT_ONCE = 1 << 26
# Around each place that a reader of archives looks at.
BUFFER_BYTES = 1 << 13


class ArrayLike(Protocol):
    """An array of NumPy, or one in a file."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def size(self) -> int: ...
    def __getitem__(self, slices: Slices, /) -> np.ndarray: ...


def box_of(shape: tuple[int, ...], slices: Slices) -> tuple[slice, ...]:
    """`slices` of an array of this shape, with a slice for each axis."""
    return tuple(slice(0, size) for size in shape) if isinstance(slices, EllipsisType) else slices


@dataclass(frozen=True, slots=True)
class WeightFile:
    """A file of weights that is read piece by piece."""

    suffix: str
    where: str
    size_bytes: int
    read_range: Callable[[int, int], bytes]
    """(start, number of bytes) -> these bytes; fewer at the end of the file."""

    @classmethod
    def of_bytes(cls, data: bytes, suffix: str, where: str) -> WeightFile:
        """A file that is in memory."""
        return cls(suffix, where, len(data), lambda start, num_bytes: data[start : start + num_bytes])

    def read(self) -> bytes:
        """All of it."""
        return self.read_range(0, self.size_bytes)

    def opened(self) -> io.BufferedReader:
        """As a file of Python."""
        return io.BufferedReader(_Ranges(self), BUFFER_BYTES)


@dataclass(frozen=True, slots=True)
class StoredArray:
    """An array, row by row from byte `start` of a file on: `array[2:4, 0:8]` reads these elements."""

    file: WeightFile
    start: int
    dtype: np.dtype
    shape: tuple[int, ...]
    is_bfloat16: bool = False
    """Read as float32, of which it is the upper half; NumPy has no such type."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def __getitem__(self, slices: Slices) -> np.ndarray:
        slices = box_of(self.shape, slices)
        box = tuple(each.stop - each.start for each in slices)
        array = np.empty(box, self.dtype)
        firsts, length = _runs(self.shape, slices)
        # Reshaped in place: `array` is new, and lies row by row.
        runs = array.reshape(len(firsts), length)
        done = 0
        for together in _together(firsts, length, self.dtype.itemsize):
            first, end = together[0], together[-1] + length
            data = np.frombuffer(self._read(first, end - first), self.dtype)
            for each in together:
                runs[done] = data[each - first : each - first + length]
                done += 1
        return (array.astype("<u4") << 16).view("<f4") if self.is_bfloat16 else array

    def _read(self, first: int, num: int) -> bytes:
        start, num_bytes = self.start + first * self.dtype.itemsize, num * self.dtype.itemsize
        data = self.file.read_range(start, num_bytes)
        if len(data) != num_bytes:
            raise IntegrityError(
                f"{self.file.where} has {len(data)} bytes from {start} on", f"expected {num_bytes}", "save it again"
            )
        return data


def _runs(shape: tuple[int, ...], slices: tuple[slice, ...]) -> tuple[list[int], int]:
    """The first element of each run of a box, all in a row in the array, and the length of all runs."""
    if any(each.stop == each.start for each in slices):
        return [], 0
    # Behind the last axis that is cut all is in a row.
    cut = [axis for axis, each in enumerate(slices) if each.stop - each.start != shape[axis]]
    last = cut[-1] if cut else 0
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    outer = itertools.product(*(range(each.start, each.stop) for each in slices[:last]))
    inner = slices[last].start * strides[last] if slices else 0
    length = math.prod(each.stop - each.start for each in slices[last:])
    return [sum(map(int.__mul__, index, strides)) + inner for index in outer], length


def _together(firsts: list[int], length: int, itemsize: int) -> Iterator[list[int]]:
    """Runs that one read gives."""
    group: list[int] = []
    for first in firsts:
        if group:
            is_near = (first - group[-1] - length) * itemsize <= MOST_BYTES_BETWEEN
            if not is_near or (first + length - group[0]) * itemsize > MOST_BYTES_AT_ONCE:
                yield group
                group = []
        group.append(first)
    if group:
        yield group


class _Ranges(io.RawIOBase):
    """A `WeightFile` as a file of Python."""

    def __init__(self, file: WeightFile) -> None:
        super().__init__()
        self._file, self._place = file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self._file.size_bytes}[whence]
        return self._place

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        data = self._file.read_range(self._place, len(buffer))
        buffer[: len(data)] = data
        self._place += len(data)
        return len(data)


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """The elements of a tensor that this rank holds."""

    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the tensor, along each of its axes."""
        return tuple(slice(first, first + size) for first, size in zip(self.offsets, self.shape, strict=True))
