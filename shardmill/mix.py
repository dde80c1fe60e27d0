"""The one source of randomness: a specified integer mix, so that order and augmentation never change.

The finalizer is splitmix64's (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, OOPSLA 2014,
doi:10.1145/2660193.2660195). `numpy.random` is not used: its streams may change between NumPy versions (NEP 19).
"""

from __future__ import annotations

import numpy as np

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
FACTOR_1 = 0xBF58476D1CE4E5B9
FACTOR_2 = 0x94D049BB133111EB
_MASK = 0xFFFFFFFFFFFFFFFF
# Whole arrays would need as much memory again for what lies between two steps; this is in a processor's cache.
_BLOCK_ITEMS = 1 << 16


def mix64(*values: int) -> int:
    """Fold any number of integers (each taken modulo 2^64) into one uniform unsigned 64-bit integer."""
    state = 0
    for value in values:
        state = _finalize((state + GOLDEN_GAMMA + value) & _MASK)
    return state


def mix64_array(values_N: np.ndarray, *prefix: int) -> np.ndarray:
    """Elementwise `mix64(*prefix, value)` over integers, as uint64."""
    return extend_mix64(np.uint64(mix64(*prefix)), values_N)


def extend_mix64(mixes: np.ndarray | np.uint64, values: np.ndarray | int) -> np.ndarray:
    """Elementwise `mix64(*key, value)`, given `mix64(*key)` and the value; as uint64."""
    z = np.atleast_1d(mixes) + (np.asarray(values).astype(np.uint64) + np.uint64(GOLDEN_GAMMA))
    z ^= z >> np.uint64(30)
    z *= np.uint64(FACTOR_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(FACTOR_2)
    z ^= z >> np.uint64(31)
    return z


def permutation(num_items: int, *key: int) -> np.ndarray:
    """A permutation of range(num_items) that is a function of `key` alone: positions in the order of their mixes.

    Different positions have different mixes, and a mix leads back to its position: so the mixes themselves are sorted,
    in place, which takes less time and memory than an argsort (docs/benchmarks/epoch_plan.md).
    """
    mixes_N = np.empty(num_items, dtype=np.uint64)
    blocks = [slice(start, start + _BLOCK_ITEMS) for start in range(0, num_items, _BLOCK_ITEMS)]
    for block in blocks:
        mixes_N[block] = mix64_array(np.arange(block.start, min(block.stop, num_items), dtype=np.uint64), *key)
    mixes_N.sort()
    for block in blocks:
        mixes_N[block] = _unmix64_array(mixes_N[block], *key)
    return mixes_N.view(np.int64)


def _unmix64_array(mixes_N: np.ndarray, *prefix: int) -> np.ndarray:
    """The values of which `mix64_array(values, *prefix)` are these, as uint64: every step of the mix has an inverse."""
    state = np.uint64((mix64(*prefix) + GOLDEN_GAMMA) & _MASK)
    z = mixes_N ^ (mixes_N >> np.uint64(31)) ^ (mixes_N >> np.uint64(62))
    z *= np.uint64(pow(FACTOR_2, -1, 1 << 64))
    z ^= (z >> np.uint64(27)) ^ (z >> np.uint64(54))
    z *= np.uint64(pow(FACTOR_1, -1, 1 << 64))
    z ^= (z >> np.uint64(30)) ^ (z >> np.uint64(60))
    return z - state


def _finalize(z: int) -> int:
    z = ((z ^ (z >> 30)) * FACTOR_1) & _MASK
    z = ((z ^ (z >> 27)) * FACTOR_2) & _MASK
    return z ^ (z >> 31)
