"""Memory that a loader fills again and again, that of its batches and of the chunks they are read from; and how much
this machine, or the container of this process, has left.

The kernel clears each page of fresh memory when it is first written: a tenth of decoding, and for pixels that are
stored as they are as much as reading and hashing them.
"""

from __future__ import annotations

import math
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import google_crc32c
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


# Of small arrays a pool holds thousands, and asking each of them would take longer than to clear new memory.
_MAX_QUESTIONS = 64
# An array that is larger than that would be wasted on what it is used for.
_MAX_WASTE = 4
# JAX and TensorFlow share memory that begins at a multiple of it, and copy other memory; NumPy's begins anywhere.
ALIGNMENT = 64
# Less than a processor's second cache: what was read is hashed before it leaves it.
_BLOCK_BYTES = 1 << 18


def _num_references(arrays: list[np.ndarray], place: int) -> int:
    """Those to `arrays[place]`: the list's, what others have, and as many of its own as this Python needs to ask."""
    return sys.getrefcount(arrays[place])


# Asked and not written down: Python 3.14 counts fewer references of a question, and one too many would give away memory
# that is in use.
_OWN_REFERENCES = _num_references([np.empty(0)], 0)


def pageable(shape: tuple[int, ...]) -> np.ndarray:
    """Aligned memory of uint8 with any content."""
    num_bytes = math.prod(shape)
    memory = np.empty(num_bytes + ALIGNMENT, dtype=np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    # Not a view of `memory`: views of it would refer to `memory` alone, where a pool does not look.
    return np.asarray(memory.data[begin : begin + num_bytes].cast("B", shape))


def read_blocks(descriptor: int, start: int, num_bytes: int, take: Callable[[int], np.ndarray]) -> Iterator[np.ndarray]:
    """Of an open file: what `ReadsIntoMemory.read_blocks` of `shardmill.storage` gives of a stored one."""
    left = max(0, os.fstat(descriptor).st_size - start)
    target, filled = take(min(num_bytes, left)), 0
    while count := os.preadv(descriptor, [target[filled : filled + _BLOCK_BYTES].data], start + filled):
        filled += count
        yield target[:filled]


def hashed(blocks: Iterable[np.ndarray]) -> tuple[memoryview, int]:
    """All bytes of `read_blocks`, and their CRC-32C: each block is hashed while it is in a processor's cache."""
    data, crc32c, num_hashed = np.empty(0, np.uint8), 0, 0
    for data in blocks:
        crc32c = google_crc32c.extend(crc32c, data[num_hashed:])
        num_hashed = len(data)
    return data.data.toreadonly(), crc32c


class RecycledMemory:
    """Arrays to which nothing refers any more, for the next ones. Safe for several threads.

    Views, tensors and arrays of other frameworks that share an array's memory hold a reference to it.
    """

    def __init__(self, max_arrays: int, allocate: Callable[[tuple[int, ...]], np.ndarray] = pageable) -> None:
        self._max_arrays = max_arrays
        self._allocate = allocate
        self._arrays: list[np.ndarray] = []
        self._next = 0
        """Of `_arrays`: the first one to ask."""
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> np.ndarray:
        """So many bytes (uint8, one axis) that nothing else refers to, with any content."""
        if not num_bytes:
            # Of a file that was cut to nothing.
            return np.empty(0, np.uint8)
        with self._lock:
            best = too_small = -1
            for _ in range(min(len(self._arrays), _MAX_QUESTIONS)):
                # Arrays are let go of in the order in which they were taken, so the next one follows the last one.
                place, self._next = self._next, (self._next + 1) % len(self._arrays)
                if _num_references(self._arrays, place) != _OWN_REFERENCES:
                    continue
                size = len(self._arrays[place])
                if size < num_bytes:
                    too_small = place
                elif size <= num_bytes * _MAX_WASTE and (best < 0 or size < len(self._arrays[best])):
                    best = place
                    if _roomy(num_bytes) == size:
                        break
            if best < 0:
                best = self._new(num_bytes, too_small)
            return (self._arrays[best] if best >= 0 else self._allocate((num_bytes,)))[:num_bytes]

    def clear(self) -> None:
        """Keep no memory for later."""
        with self._lock:
            self._arrays, self._next = [], 0

    def _new(self, num_bytes: int, too_small: int) -> int:
        """The place of a new array; -1 if there is no room for it: who keeps all arrays gets fresh memory for each."""
        if too_small < 0 and len(self._arrays) >= self._max_arrays:
            return -1
        # Other memory, as pinned one, is dear.
        array = self._allocate((_roomy(num_bytes) if self._allocate is pageable else num_bytes,))
        if too_small < 0:
            self._arrays.append(array)
            return len(self._arrays) - 1
        self._arrays[too_small] = array
        return too_small


def _roomy(num_bytes: int) -> int:
    """At most an eighth more, so that it fits the next one of about this size; untouched pages cost nothing."""
    step = 1 << max(0, num_bytes.bit_length() - 4)
    return -(-num_bytes // step) * step


def free_bytes(root: Path = Path("/")) -> int:
    """Return the host's available memory, or this container's remaining limit if lower; 0 if unknown."""
    found = [1024 * int(line.split()[1]) for line in _lines(root / "proc/meminfo") if line.startswith("MemAvailable:")]
    group = root / "sys/fs/cgroup"
    limit, used = _lines(group / "memory.max"), _lines(group / "memory.current")
    if limit and limit[0].isdigit() and used:
        # Pages of files are given back when memory is needed.
        files = sum(int(line.split()[1]) for line in _lines(group / "memory.stat") if line.startswith("inactive_file "))
        found.append(max(0, int(limit[0]) - int(used[0]) + files))
    return min(found, default=0)


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
