"""The layout of sharded state: named arrays of which each rank holds a box, and how boxes are put together again.

A box is given by integers alone (`Shard`). All ranks' boxes together are the `ShardIndex` of a checkpoint, which rank 0
writes beside the files. From it any rank of any other layout finds the files, and the places in them, that it needs:

    weights-00001.npz  optimizer-00001.npz    the boxes of rank 1, in the order of the index
    rank-00000.npz                            what is rank 0's own: of ranks that read the same rows the first writes it
    shards.npz                                the index, as JSON

A box that several ranks hold (replicas of a mesh, numbers that are not sharded) is written by the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from shardmill.errors import IntegrityError
from train.checkpoints.arrays import INDEX, OPTIMIZER, WEIGHTS, ArrayLike, TensorSlice, load_arrays, rank_file
from train.checkpoints.checkpoint import FoundCheckpoint, SavedFiles
from train.contracts.values import from_json, to_json

WEIGHTS_PART, OPTIMIZER_PART = PARTS_IN_ORDER = "weights", "optimizer"
REPLICATED_FILES = {WEIGHTS_PART: WEIGHTS, OPTIMIZER_PART: OPTIMIZER}
"""A replicated model is one shard: rank 0 writes all of a part, by position and without names."""


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of a named array: `shape` elements from `offsets` on."""

    part: str
    """`WEIGHTS_PART` or `OPTIMIZER_PART`."""
    name: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        """Whether it has no element: a rank may get none of a short axis."""
        return 0 in self.shape and 0 not in self.global_shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """Of the array, along each of its axes."""
        return TensorSlice(self.global_shape, self.offsets, self.shape).slices

    def overlap(self, other: Shard) -> tuple[tuple[slice, ...], tuple[slice, ...]] | None:
        """The elements that both boxes have: slices of this one and of `other`; None if there are none."""
        if (self.part, self.name) != (other.part, other.name) or self.is_empty or other.is_empty:
            return None
        here, there = [], []
        for mine, mine_size, its, its_size in zip(self.offsets, self.shape, other.offsets, other.shape, strict=True):
            first, end = max(mine, its), min(mine + mine_size, its + its_size)
            if first >= end and mine_size and its_size:
                return None
            here.append(slice(first - mine, end - mine))
            there.append(slice(first - its, end - its))
        return tuple(here), tuple(there)


@dataclass(frozen=True)
class ShardIndex:
    """The boxes of all ranks, by rank."""

    of_ranks: tuple[tuple[Shard, ...], ...]
    is_replicated: bool = False
    """Whether one rank has written all, into `REPLICATED_FILES`."""
    arrays: tuple[Shard, ...] = ()
    """Every array as one box, in the order of `Learner.arrays`; empty if rank 0 has something of each in this order."""
    own: tuple[str, ...] = ()
    """The names of the arrays in rank 0's file of its own, but for generators."""

    def file(self, part: str, rank: int) -> str:
        """The file with a rank's boxes of a part."""
        return REPLICATED_FILES[part] if self.is_replicated else shard_file(part, rank)

    def of_rank(self, rank: int, part: str) -> list[Shard]:
        """The boxes of a part that a rank holds, in its order."""
        return [shard for shard in self.of_ranks[rank] if shard.part == part]

    def written_by(self, rank: int, part: str) -> list[Shard]:
        """The boxes in the rank's file of a part, in its order; one that it holds twice once."""
        return [shard for shard in dict.fromkeys(self.of_rank(rank, part)) if self._writers.get(shard) == rank]

    @cached_property
    def _writers(self) -> dict[Shard, int]:
        """The first rank that holds each box."""
        writers: dict[Shard, int] = {}
        for rank, shards in enumerate(self.of_ranks):
            for shard in shards:
                if not shard.is_empty:
                    writers.setdefault(shard, rank)
        return writers

    def files_with(self, wanted: Collection[Shard]) -> list[str]:
        """The files that hold something of `wanted`."""
        by_name: dict[tuple[str, str], list[Shard]] = {}
        for shard in wanted:
            by_name.setdefault((shard.part, shard.name), []).append(shard)
        return [
            self.file(part, rank)
            for part in sorted({shard.part for shard in wanted})
            for rank in range(len(self.of_ranks))
            if any(
                mine.overlap(shard)
                for mine in self.written_by(rank, part)
                for shard in by_name.get((part, mine.name), ())
            )
        ]

    def whole(self, part: str) -> list[Shard]:
        """The whole arrays of a part, in the order of `Learner.arrays`: each as a box of its own."""
        if self.arrays:
            return [shard for shard in self.arrays if shard.part == part]
        shapes = {shard.name: shard.global_shape for shards in self.of_ranks for shard in shards if shard.part == part}
        return [Shard(part, name, shape, (0,) * len(shape), shape) for name, shape in shapes.items()]

    def assemble(self, wanted: Sequence[Shard], files: Mapping[str, bytes], where: str) -> list[np.ndarray]:
        """The arrays of `wanted`, from the files that `files_with` names.

        Raises IntegrityError if one is incomplete.
        """
        pieces = [
            (shard, array)
            for part in sorted({shard.part for shard in wanted})
            for rank in range(len(self.of_ranks))
            if self.file(part, rank) in files
            for shard, array in zip(self.written_by(rank, part), load_arrays(files[self.file(part, rank)]), strict=True)
        ]
        by_name: dict[tuple[str, str], list[tuple[Shard, np.ndarray]]] = {}
        for shard, array in pieces:
            by_name.setdefault((shard.part, shard.name), []).append((shard, array))
        return [filled(shard, by_name.get((shard.part, shard.name), []), where) for shard in wanted]


def arrays_in_order(of_ranks: Sequence[Sequence[Shard]], weights: Sequence[str]) -> tuple[Shard, ...]:
    """`ShardIndex.arrays`, of ranks each of which has some of them in order. `weights`: all names, in their order.

    The order is that of a rank with all: of each weight what the optimizer remembers, then what belongs to no weight,
    then the weights themselves.
    """
    places = {name: place for place, name in enumerate(weights)}

    def order_of(array: Shard) -> tuple[int, int]:
        of_weight = places.get(array.name.rpartition("/")[0])
        if array.name in places:
            return 2, places[array.name]
        return (1, 0) if of_weight is None else (0, of_weight)

    found = {
        (shard.part, shard.name): replace(shard, offsets=(0,) * len(shard.global_shape), shape=shard.global_shape)
        for shards in of_ranks
        for shard in shards
    }
    return tuple(sorted(found.values(), key=lambda array: (PARTS_IN_ORDER.index(array.part), order_of(array))))


def shard_file(part: str, rank: int) -> str:
    """The file with a rank's boxes of a part."""
    return f"{part}-{rank:05d}.npz"


def whole_files(read: Callable[[str], bytes], names: Collection[str], part: str) -> list[str]:
    """The files that hold all of a part, in a checkpoint of either layout."""
    if INDEX not in names:
        return [REPLICATED_FILES[part]]
    index = read_index(read)
    return [INDEX, *index.files_with(index.whole(part))]


def whole_arrays(files: Mapping[str, bytes], part: str, where: str) -> list[np.ndarray]:
    """All of a part from the files that `whole_files` names, in the order of `Learner.arrays`."""
    if INDEX not in files:
        return load_arrays(files[REPLICATED_FILES[part]])
    index = read_index(lambda name: files[name])
    return index.assemble(index.whole(part), files, where)


@dataclass(frozen=True, slots=True)
class WholeModel:
    """The parts of a checkpoint that an export needs, as arrays of a learner."""

    weights: list[np.ndarray]
    """`StatePart.WEIGHTS`."""
    own: list[np.ndarray]
    """`StatePart.OWN` of rank 0."""


def read_whole_model(saved: SavedFiles) -> WholeModel:
    """The model in a checkpoint of either layout; needs no ranks."""
    files = {name: saved.read(name) for name in whole_files(saved.read, saved.names, WEIGHTS_PART)}
    return WholeModel(whole_arrays(files, WEIGHTS_PART, "the checkpoint"), load_arrays(saved.read(rank_file(0))))


def weight_bytes(found: FoundCheckpoint) -> int:
    """The size of all weights in a checkpoint: of a replicated one a file has them, of a sharded one each rank's."""
    return sum(each.size_bytes for each in found.marker.files if each.path.rpartition("/")[2].startswith(WEIGHTS_PART))


def dump_index(index: ShardIndex) -> list[np.ndarray]:
    """The content of `INDEX`."""
    return [np.frombuffer(to_json(index), np.uint8).copy()]


def read_index(read: Callable[[str], bytes]) -> ShardIndex:
    """The index of a checkpoint; `read` returns a verified file by its name."""
    [text] = load_arrays(read(INDEX))
    return from_json(ShardIndex, text.tobytes())


def filled(wanted: Shard, pieces: Sequence[tuple[Shard, ArrayLike]], where: str) -> np.ndarray:
    """One box out of those that overlap it, which overlap each other nowhere; of them nothing else is read."""
    if not pieces and not wanted.is_empty:
        raise _incomplete(wanted, 0, where)
    array: np.ndarray | None = None
    num_filled = 0
    for shard, values in pieces:
        if shard.global_shape != wanted.global_shape:
            raise IntegrityError(
                f"{wanted.name} in {where} has the shape {shard.global_shape}",
                f"expected {wanted.global_shape}",
                "make train.model build the same model as then, or train under another models.uri",
            )
        if overlap := wanted.overlap(shard):
            here, there = overlap
            found = values[there]
            array = np.zeros(wanted.shape, found.dtype) if array is None else array
            array[here] = found
            num_filled += found.size
    if array is None:
        array = np.zeros(wanted.shape, np.float32)
    if num_filled != array.size:
        raise _incomplete(wanted, num_filled, where)
    return array


def _incomplete(wanted: Shard, num_found: int, where: str) -> IntegrityError:
    return IntegrityError(
        f"{where} has {num_found} of the {math.prod(wanted.shape)} numbers of {wanted.name} from {wanted.offsets} on",
        "expected all of them in the files of its ranks",
        "restore it from a backup, or train again: a training resumes from its newest complete checkpoint",
    )
