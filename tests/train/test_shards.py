"""Shards of a checkpoint: any layout of N ranks is read back by any layout of M ranks, by integers alone."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.errors import IntegrityError
from train.checkpoints.shards import WEIGHTS_PART, Shard, ShardIndex, dump_index, read_index, shard_file
from train.checkpoints.state import dump_arrays


def chunks(size: int, count: int) -> list[tuple[int, int]]:
    """(offset, size) as `torch.chunk` cuts; the last ones may be empty."""
    step = -(-size // count)
    return [(min(rank * step, size), max(0, min(step, size - rank * step))) for rank in range(count)]


def shards_of(name: str, shape: tuple[int, ...], cuts: tuple[int, ...], replicas: int) -> list[Shard]:
    """One box for each rank: axis by axis cut into `cuts` pieces, all of that `replicas` times."""
    boxes = [
        Shard(WEIGHTS_PART, name, shape, tuple(offset for offset, _ in box), tuple(size for _, size in box))
        for box in product(*(chunks(size, count) for size, count in zip(shape, cuts, strict=True)))
    ]
    return boxes * replicas


@st.composite
def layouts(draw, shapes):
    """An index in which each array is cut otherwise; the same number of ranks for all."""
    num_ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    of_ranks = [[] for _ in range(num_ranks)]
    for name, shape in shapes.items():
        divisors = [each for each in range(1, num_ranks + 1) if num_ranks % each == 0]
        cuts = [1] * len(shape)
        left = num_ranks
        for axis in range(len(shape)):
            cuts[axis] = draw(st.sampled_from([each for each in divisors if left % each == 0]))
            left //= cuts[axis]
        for rank, box in enumerate(shards_of(name, shape, tuple(cuts), left)):
            of_ranks[rank].append(box)
    return ShardIndex(tuple(map(tuple, of_ranks)))


SHAPES = st.dictionaries(
    st.sampled_from("abcd"), st.lists(st.integers(1, 7), min_size=0, max_size=3).map(tuple), min_size=1
)


@given(st.data())
def test_any_layout_is_read_by_any_other(data):
    shapes = data.draw(SHAPES)
    whole = {name: np.arange(math.prod(shape), dtype=np.float32).reshape(shape) for name, shape in shapes.items()}
    saved, wanted = data.draw(layouts(shapes)), data.draw(layouts(shapes))

    def box_of(shard: Shard) -> np.ndarray:
        return whole[shard.name][
            tuple(map(slice, shard.offsets, map(sum, zip(shard.offsets, shard.shape, strict=True))))
        ]

    files = {
        shard_file(WEIGHTS_PART, rank): dump_arrays([box_of(shard) for shard in saved.written_by(rank, WEIGHTS_PART)])
        for rank in range(len(saved.of_ranks))
    }
    # Each element is written once.
    written = sum(
        math.prod(s.shape) for rank in range(len(saved.of_ranks)) for s in saved.written_by(rank, WEIGHTS_PART)
    )
    assert written == sum(array.size for array in whole.values())
    for shards in wanted.of_ranks:
        needed = saved.files_with(shards)
        read = saved.assemble(shards, {name: files[name] for name in needed}, "the checkpoint")
        for shard, array in zip(shards, read, strict=True):
            assert np.array_equal(array, box_of(shard))
        # No file too many: without any one of them something is missing.
        for left_out in needed:
            with pytest.raises(IntegrityError):
                saved.assemble(shards, {name: files[name] for name in needed if name != left_out}, "the checkpoint")
    for shard, array in zip(
        saved.whole(WEIGHTS_PART), saved.assemble(saved.whole(WEIGHTS_PART), files, "it"), strict=True
    ):
        assert np.array_equal(array, whole[shard.name])


def test_the_index_is_read_back():
    index = ShardIndex((tuple(shards_of("a", (4, 3), (2, 1), 1)[:1]), tuple(shards_of("a", (4, 3), (2, 1), 1)[1:])))
    assert read_index(lambda name: dump_arrays(dump_index(index))) == index
