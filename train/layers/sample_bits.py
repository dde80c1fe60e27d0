"""Random bits for each sample of a batch, independent of rank, position and attempt: the source of `SampleDropout`.

The bits of a sample are words of 64, a function of its place in the training and of nothing else (`shardmill.mix`):

    word w = mix64(DROPOUT, seed, epoch, sample id, place of the layer in the model, w)

where mix64 folds integers by the finalizer of splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014, doi:10.1145/2660193.2660195), a generator whose state is a counter. Seed, epoch and sample id
are folded outside the step, into one key a sample; the rest is arithmetic on tensors, without state. Of each word an
element has sixteen bits, the lowest first; it is dropped if they are, as a signed integer, among the `rate` lowest.

Shape legend: N batch, W words of a sample, E elements of a sample (4 for each word).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.mix import FACTOR_1, FACTOR_2, GOLDEN_GAMMA, mix64_array

DROPOUT = int.from_bytes(b"dropout")
"""The first word of the mix: order and augmentation draw from others."""
BITS_OF_ELEMENT = 16
ELEMENTS_OF_WORD = 64 // BITS_OF_ELEMENT

ShiftRight = Callable[[Any, int], Any]
"""(int64 tensor, number of bits) -> shifted, with zeros from the left: frameworks repeat the sign there."""


def sample_keys(seed: int, epoch: int, sample_ids_N: np.ndarray) -> np.ndarray:
    """int64 (N,): what is folded outside the step."""
    return mix64_array(sample_ids_N, DROPOUT, seed, epoch).view(np.int64)


def words_of(keys_N: Any, place: int, counters_W: Any, shift_right: ShiftRight) -> Any:
    """int64 (N, W): the words of a layer, from keys and counters 0, 1, ... as int64 tensors of any framework."""
    states_N = _finalized(keys_N + _signed(GOLDEN_GAMMA + place), shift_right)
    return _finalized(states_N[:, None] + (counters_W + _signed(GOLDEN_GAMMA)), shift_right)


def low_bits(num_bits: int) -> int:
    """Return a mask of the bits that can be set after a logical right shift by `num_bits`."""
    return (1 << (64 - num_bits)) - 1


class DropRate:
    """A share of elements to drop, in 65536ths: how sixteen bits decide.

    Raises UsageError unless it is in [0, 1).
    """

    def __init__(self, rate: float) -> None:
        if not 0 <= rate < 1:
            raise UsageError(f"SampleDropout(rate={rate})", "expected a share of elements: at least 0, less than 1")
        num_dropped = min(round(rate * 2**BITS_OF_ELEMENT), 2**BITS_OF_ELEMENT - 1)
        self.is_zero = num_dropped == 0
        # Of what sixteen bits are as a signed integer.
        self.smallest_kept = num_dropped - 2 ** (BITS_OF_ELEMENT - 1)
        self.scale = 2**BITS_OF_ELEMENT / (2**BITS_OF_ELEMENT - num_dropped)
        """Scale of the kept elements, which preserves the expectation."""


# A strategy of tf.distribute traces replicas in turn, each in a thread of its own and with rows of its own.
_in_thread: ContextVar[Any] = ContextVar("train.layers.sample_bits")
# PyTorch computes activations again (checkpointing) in threads of its backward pass, which have no context of ours.
_in_process: Any = None


@contextmanager
def drawing(keys_N: Any) -> Iterator[None]:
    """Around the forward and the backward pass of these samples: what layers draw from, as a tensor."""
    global _in_process
    of_thread, _in_process = _in_thread.set(keys_N), keys_N
    try:
        yield
    finally:
        _in_thread.reset(of_thread)
        # Not what was there before: that may be another replica's.
        _in_process = None


def number_layers(layers: Iterable[Any]) -> int:
    """Tell each layer its place in the model; they come in an order that the model fixes. -> how many there are."""
    place = -1
    for place, layer in enumerate(layers):
        layer.place = place
    return place + 1


def keys_here(place: int | None, shape: Sequence[Any]) -> tuple[Any, int]:
    """The keys of the rows that a layer is called with, and how many elements each of them has.

    Raises UsageError outside a training step, and for rows that are not samples.
    """
    keys_N = _in_thread.get(_in_process)
    if keys_N is None or place is None:
        raise UsageError(
            "SampleDropout was called in training mode without sample ids",
            "expected a training step of shardmill, and a layer that is registered in its model",
            (
                "outside of training, call the model with training=False, or eval(); in PyTorch, keep modules in an "
                "nn.ModuleList"
            ),
        )
    num_rows, *of_sample = shape
    num_samples = keys_N.shape[0]
    if num_rows != num_samples and num_rows is not None and num_samples is not None:
        raise UsageError(
            f"SampleDropout was given {num_rows} rows of a batch of {num_samples}",
            "expected one row for each sample",
            "give it inputs whose first axis is the batch",
        )
    if None in of_sample:
        raise UsageError(
            f"SampleDropout was given a shape of (batch, {', '.join(map(str, of_sample))})",
            "expected all axes but the first to be known",
            "reshape its input",
        )
    return keys_N, math.prod(of_sample)


def _finalized(z: Any, shift_right: ShiftRight) -> Any:
    """As in `shardmill.mix`: int64 wraps around as uint64 does, and frameworks compute with it on every device."""
    z = (z ^ shift_right(z, 30)) * _signed(FACTOR_1)
    z = (z ^ shift_right(z, 27)) * _signed(FACTOR_2)
    return z ^ shift_right(z, 31)


def _signed(value: int) -> int:
    """The integer in [-2^63, 2^63) that is the same modulo 2^64."""
    return (value + 2**63) % 2**64 - 2**63
