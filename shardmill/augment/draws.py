"""The random numbers of augmentation, for a whole batch at once: each is a function of a row's key and a draw's number.

The key is (seed, epoch, sample id, occurrence); so a row has the same numbers at any world size, in every framework and
after a resume. They come from `shardmill.mix`. Shape legend: N rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardmill.mix import extend_mix64, mix64_array

# Each draw has its own last word in the mix, so that switching one off changes no other.
ROW_DRAW, COLUMN_DRAW, FLIP_DRAW, VERTICAL_FLIP_DRAW = 1, 2, 3, 4
# Of a try of the random resized crop: these plus the number of the try.
AREA_DRAW, ASPECT_DRAW = 0x10, 0x20
BRIGHTNESS_DRAW, CONTRAST_DRAW, SATURATION_DRAW, HUE_DRAW, ORDER_DRAW = 0x30, 0x31, 0x32, 0x33, 0x34
ERASE_DRAW, ERASE_AREA_DRAW, ERASE_ASPECT_DRAW, ERASE_ROW_DRAW, ERASE_COLUMN_DRAW, ERASE_NOISE_DRAW = range(0x40, 0x46)
PARTNER_DRAW, MIX_DRAW, SHARE_DRAW, BOX_ROW_DRAW, BOX_COLUMN_DRAW = range(0x50, 0x55)
# Of an operation of RandAugment: these plus its place.
OPERATION_DRAW, SIGN_DRAW = 0x60, 0x80


@dataclass(frozen=True, eq=False)
class Draws:
    """The numbers of some rows; each method takes the number of a draw and returns one value for each row."""

    seed: int
    epoch: int
    sample_ids_N: np.ndarray
    occurrences_N: np.ndarray

    @cached_property
    def _states_N(self) -> np.ndarray:
        """uint64: what the mix has become after the row's key. Batches that nothing changes do not ask for it."""
        return extend_mix64(mix64_array(self.sample_ids_N, self.seed, self.epoch), self.occurrences_N)

    def __len__(self) -> int:
        return len(self.sample_ids_N)

    def part(self, rows: slice) -> Draws:
        """Those of some consecutive rows."""
        return replace(self, sample_ids_N=self.sample_ids_N[rows], occurrences_N=self.occurrences_N[rows])

    def bits(self, draw: int) -> np.ndarray:
        """uint64, uniform: elementwise `mix64(seed, epoch, sample_id, occurrence, draw)`."""
        return extend_mix64(self._states_N, draw)

    def below(self, draw: int, limits: np.ndarray | int) -> np.ndarray:
        """int64, uniform in range(limit); the limit may differ by row, and is at least 1."""
        return (self.bits(draw) % np.asarray(limits).astype(np.uint64)).astype(np.int64)

    def uniform(self, draw: int, low: float = 0.0, high: float = 1.0) -> np.ndarray:
        """float64, uniform in [low, high)."""
        return low + (high - low) * ((self.bits(draw) >> np.uint64(11)) * 2.0**-53)

    def log_uniform(self, draw: int, limit: float) -> np.ndarray:
        """float64 between 1/limit and limit, with a uniform logarithm: of aspect ratios."""
        return _exp(self.uniform(draw, -math.log(limit), math.log(limit)))

    def coins(self, draw: int) -> np.ndarray:
        """bool: heads of half of the rows."""
        return (self.bits(draw) >> np.uint64(63)).astype(bool)


def _exp(exponents_N: np.ndarray) -> np.ndarray:
    """e to the power of small numbers, by its series: NumPy's own may differ in the last bit between processors."""
    powers_N = np.ones_like(exponents_N)
    for degree in range(20, 0, -1):
        powers_N = 1 + exponents_N * powers_N / degree
    return powers_N
