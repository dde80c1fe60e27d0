"""Which of very many 64-bit values occur more than once, in memory that does not grow with their number."""

from __future__ import annotations

from pathlib import Path

import numpy as np

# Values in memory before they go to files; 8 bytes each.
_MAX_BUFFERED = 4_000_000
# By their highest bits, so that each file alone holds all equals of its values: 10^9 of them make 125 MB a file.
_NUM_FILES, _SHIFT = 64, np.uint64(58)


class RepeatedValues:
    """A group-by that spills: values are added in parts, and counted file by file. `folder` must exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[np.ndarray] = []
        self._num_buffered = 0
        self._has_spilled = False

    def add(self, values_N: np.ndarray) -> None:
        """Add uint64 values."""
        self._parts.append(values_N)
        self._num_buffered += len(values_N)
        if self._num_buffered > _MAX_BUFFERED:
            self._spill()

    def find(self) -> np.ndarray:
        """The values that were added more than once, each once, sorted."""
        if not self._has_spilled:
            return _repeated(np.concatenate([np.empty(0, np.uint64), *self._parts]))
        self._spill()
        files = [self._file(number) for number in range(_NUM_FILES)]
        return np.concatenate([_repeated(np.fromfile(file, np.uint64)) for file in files if file.exists()])

    def _spill(self) -> None:
        values_N = np.sort(np.concatenate([np.empty(0, np.uint64), *self._parts]))
        bounds = np.searchsorted(values_N >> _SHIFT, np.arange(_NUM_FILES + 1, dtype=np.uint64))
        for number in range(_NUM_FILES):
            with open(self._file(number), "ab") as file:
                values_N[bounds[number] : bounds[number + 1]].tofile(file)
        self._parts, self._num_buffered, self._has_spilled = [], 0, True

    def _file(self, number: int) -> Path:
        return self._folder / f"values-{number:02d}"


def _repeated(values_N: np.ndarray) -> np.ndarray:
    ordered_N = np.sort(values_N)
    return np.unique(ordered_N[1:][ordered_N[1:] == ordered_N[:-1]])
