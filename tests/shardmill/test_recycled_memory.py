"""Memory is filled again only when nothing refers to it any more, and what is kept of it has a bound."""

from __future__ import annotations

import gc
import importlib.util
import sys

import numpy as np
import pytest

from shardmill import recycled_memory
from shardmill.recycled_memory import RecycledMemory, pageable


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize(
    "view", [lambda array: array[1:2], lambda array: array.reshape(2, -1), lambda array: array.data]
)
def test_memory_is_used_again_only_when_nothing_refers_to_it(view):
    memory = RecycledMemory(max_arrays=3)
    first = memory.take(48)
    of_first = view(first)
    address = address_of(first)
    del first
    assert address_of(memory.take(48)) != address, "a view keeps its memory"
    del of_first
    gc.collect()
    assert address_of(memory.take(48)) == address
    kept = [memory.take(48) for _ in range(8)]
    assert len({address_of(array) for array in kept}) == 8, "all arrays of a list have memory of their own"


def test_a_read_only_view_keeps_memory_too():
    memory = RecycledMemory(max_arrays=3)
    address, view = address_of(memory.take(48)), memory.take(48).data.toreadonly()[3:9]
    again = memory.take(48)
    assert view.readonly and address_of(np.frombuffer(view, np.uint8)) - 3 != address_of(again), address


@pytest.mark.parametrize("fewer", [0, 1], ids=["this Python", "Python 3.14"])
def test_memory_in_use_is_kept_however_many_references_a_question_has(fewer, monkeypatch: pytest.MonkeyPatch):
    count = sys.getrefcount
    # The lambda has one of its own.
    monkeypatch.setattr(sys, "getrefcount", lambda value: count(value) - 1 - fewer)
    spec = importlib.util.spec_from_file_location("memory_of_this_python", recycled_memory.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    memory = fresh.RecycledMemory(max_arrays=3)
    first = memory.take(48)
    address = address_of(first)
    second = memory.take(48)
    assert address_of(second) != address
    del first
    gc.collect()
    assert address_of(memory.take(48)) == address


def test_one_free_array_among_many_is_found_in_time_and_a_few_are_asked_at_once():
    memory = RecycledMemory(max_arrays=1000)
    kept = [memory.take(12) for _ in range(1000)]
    address = address_of(kept.pop(777))
    more = [memory.take(12) for _ in range(100)]
    assert address in {address_of(array) for array in more}, "whatever part of the pool is kept for good"


def test_memory_of_other_sizes_is_used_if_it_is_large_enough_and_replaced_if_it_is_too_small():
    memory = RecycledMemory(max_arrays=2)
    address = address_of(memory.take(1000))
    smaller = memory.take(900)
    assert (address_of(smaller), len(smaller)) == (address, 900)
    del smaller
    assert address_of(memory.take(10)) != address, "a hundredth of it is a waste"
    sizes = [100, 3_000, 1_001, 70_000, 5, 69_000, 68_000]
    assert [len(memory.take(size)) for size in sizes] == sizes
    assert len(memory._arrays) <= 2
    address = address_of(memory.take(69_500))
    assert address_of(memory.take(69_400)) == address


def test_what_is_kept_is_at_most_an_eighth_too_large():
    for size in [0, 1, 15, 17, 1023, 1025, 2_962_915, 4_013_778, (1 << 31) - 1]:
        assert size <= recycled_memory._roomy(size) <= size + max(size // 8, 1)
    assert recycled_memory._roomy(4_013_778) == recycled_memory._roomy(4_034_259)


def test_tensorflow_shares_the_memory_of_the_pixels():
    tf = pytest.importorskip("tensorflow")
    array = pageable((24, 16, 16, 3))
    signature = (tf.TensorSpec(array.shape, tf.uint8),)
    for (images,) in tf.data.Dataset.from_generator(lambda: iter([(array,)]), output_signature=signature):
        assert images._numpy().ctypes.data == array.ctypes.data
