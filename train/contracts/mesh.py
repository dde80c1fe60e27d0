"""Divides a training over its ranks: how many are along each axis, where a rank lies, and the rows that it reads.

No other module knows in which order ranks lie along the axes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from shardmill.epoch_plan import streams_by_weight, streams_of_rank
from shardmill.errors import UsageError
from shardmill.words import counted

if TYPE_CHECKING:
    from train.config import TrainConfig


@dataclass(frozen=True, slots=True)
class DataIndex:
    """The rows that a rank reads: the streams of index `index` of `count`.

    Ranks of one tensor or pipeline group hold one copy of the model together: they have the same index, and read the
    same rows.
    """

    index: int
    count: int
    streams: range
    num_streams: int
    _: KW_ONLY
    is_first: bool = True
    """Whether its rows count in metrics: of each group those of one rank."""

    @property
    def fraction(self) -> float:
        """Fraction of all streams."""
        return len(self.streams) / self.num_streams


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a training, and the streams that they share out.

    Raises UsageError if the streams cannot be shared out.
    """

    shape: MeshShape
    _: KW_ONLY
    num_streams: int
    weights: tuple[float, ...] = ()
    """`train.rank_weights`: one for each data index, or none for equal shares."""

    def __post_init__(self) -> None:
        if self.data_size > self.num_streams:
            raise UsageError(
                f"{self} for train.num_streams = {self.num_streams}",
                f"expected at most {counted(self.num_streams, 'rank')} that read rows of their own, because each "
                "owns at least one stream",
                f"set train.num_workers = {self.num_ranks // self.data_size * self.num_streams} or less, or raise "
                "train.num_streams, which starts a new run",
            )
        if self.weights and len(self.weights) != self.data_size:
            raise UsageError(
                f"train.rank_weights = {list(self.weights)} for {self}",
                f"expected one weight for each of train.num_workers = {self.data_size}",
                f"set train.num_workers = {len(self.weights)}, or give {self.data_size} weights",
            )

    @classmethod
    def of(cls, config: TrainConfig, *, pipeline: int = 1, fsdp: int = 1, tensor: int = 1) -> Mesh:
        """`train.num_workers` ranks with these axes, and as many copies of the model as that makes."""
        num_ranks, ranks_per_copy = config.num_ranks_asked, pipeline * fsdp * tensor
        if num_ranks % ranks_per_copy:
            raise UsageError(
                f"train.num_workers = {num_ranks}",
                f"expected a multiple of {ranks_per_copy}, the ranks of one copy of the model",
                f"set train.num_workers = {-(-num_ranks // ranks_per_copy) * ranks_per_copy}",
            )
        shape = MeshShape(pipeline=pipeline, data=num_ranks // ranks_per_copy, fsdp=fsdp, tensor=tensor)
        if not config.num_streams and shape.data_size > config.global_batch_size:
            # Of what is left open there may be any number.
            set_readers = max(1, config.mesh.data) * max(1, config.mesh.fsdp)
            most = config.global_batch_size // set_readers * set_readers * tensor * pipeline
            fewer = f"set train.num_workers = {most} or less" if most else "set smaller sizes of train.mesh"
            raise UsageError(
                f"train.num_workers = {num_ranks} with train.global_batch_size = {config.global_batch_size}",
                "expected at least one sample of each global batch for each rank that reads rows of its own",
                f"{fewer}, or raise train.global_batch_size, which starts a new run",
            )
        if config.mesh.data not in (0, shape.data):
            raise _not_so_many_copies(config, shape.data, ranks_per_copy)
        num_streams = config.num_streams_at(shape.data_size)
        return cls(shape, num_streams=num_streams, weights=config.rank_weights)

    @classmethod
    def along(cls, config: TrainConfig, axes: Sequence[str]) -> Mesh:
        """`train.num_workers` ranks along these axes beside `data`, with the sizes that `train.mesh` sets.

        Of those that it leaves open, the first has all ranks that the others leave; each of the others has two if the
        number of ranks is even, because its ranks exchange most; if the first is set, the fewest that divide what it
        leaves.
        """
        asked, num_ranks = config.mesh.sizes, config.num_ranks_asked
        is_first_set = any(asked[axis] for axis in axes[:1])
        rest = max(1, num_ranks // math.prod(max(1, size) for size in asked.values())) if is_first_set else num_ranks
        few = range(2, rest + 1) if is_first_set else (2,)
        fewest = next((size for size in few if rest % size == 0), 1)
        sizes = {axis: asked[axis] or fewest for axis in axes[1:]}
        for axis in axes[:1]:
            sizes[axis] = asked[axis] or max(1, num_ranks // (math.prod(sizes.values()) * max(1, asked["data"])))
        return cls.of(config, **sizes)

    @classmethod
    def one_reader(cls, config: TrainConfig) -> Mesh:
        """One rank that reads every stream, independent of other processes. Raises UsageError for several copies."""
        if config.mesh.data > 1:
            raise _without_copies(config)
        return cls(MeshShape(), num_streams=config.num_streams_at(1))

    @property
    def num_ranks(self) -> int:
        return self.shape.num_ranks

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, from the outermost to the innermost."""
        return self.shape.sizes

    @property
    def data_size(self) -> int:
        """Number of indices among which the streams are divided."""
        return self.shape.data_size

    @property
    def streams(self) -> list[range]:
        """Streams by data index."""
        if self.weights:
            return streams_by_weight(self.weights, self.num_streams)
        return [streams_of_rank(index, self.data_size, self.num_streams) for index in range(self.data_size)]

    def largest_share(self, global_batch_size: int) -> int:
        """Samples of a step on the rank with the most streams, padding included."""
        return self.most_streams * (global_batch_size // self.num_streams)

    def smallest_share(self, global_batch_size: int) -> int:
        """Samples of a step on the rank with the fewest streams, padding included."""
        return self.fewest_streams * (global_batch_size // self.num_streams)

    @property
    def most_streams(self) -> int:
        """Maximum number of streams of one rank."""
        return max(map(len, self.streams))

    @property
    def fewest_streams(self) -> int:
        """Minimum number of streams of one rank."""
        return min(map(len, self.streams))

    def data_index(self, rank: int) -> DataIndex:
        """Return the rows that a rank reads. Raises UsageError if there is no such rank."""
        if not 0 <= rank < self.num_ranks:
            raise UsageError(
                f"rank {rank} of {self}", f"expected 0 to {self.num_ranks - 1}", "ranks are counted from 0"
            )
        place = self.shape.place(rank)
        index = place["data"] * self.shape.fsdp + place["fsdp"]
        is_first = not any(place[axis] for axis in AXES_OF_LAYERS)
        return DataIndex(index, self.data_size, self.streams[index], self.num_streams, is_first=is_first)

    def __str__(self) -> str:
        named = " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1 and name != "data")
        return f"train.num_workers = {self.num_ranks}" + (f" ({named} x data {self.shape.data})" if named else "")


def _without_copies(config: TrainConfig) -> UsageError:
    return UsageError(
        f"train.mesh.data = {config.mesh.data} with train.strategy = {config.strategy!r}, which has no such axis",
        "expected no copies of the model: its servers hold the variables, for all of train.num_workers",
        "leave train.mesh.data at 0",
    )


def _not_so_many_copies(config: TrainConfig, num_copies: int, ranks_per_copy: int) -> UsageError:
    asked = config.mesh.data
    return UsageError(
        f"train.mesh.data = {asked} with train.strategy = {config.strategy!r} and train.num_workers = "
        f"{config.num_ranks_asked}",
        f"expected sizes whose product is train.num_workers; a copy of the model has {counted(ranks_per_copy, 'rank')}",
        f"set train.num_workers = {asked * ranks_per_copy}, or train.mesh.data = 0 for {num_copies} copies",
    )


@dataclass(frozen=True, slots=True)
class SiloIndex(DataIndex):
    """Member `index` of `count` trains on a dataset of its own; `streams` are those on which it evaluates."""

    uri: str
    rows_of_silos: tuple[int, ...]
    """Samples in the train split of each."""

    @property
    def fraction(self) -> float:
        """Fraction of its training data: all."""
        return 1.0


AXES = ("pipeline", "data", "fsdp", "tensor")
"""From the outermost to the innermost: neighbouring ranks are of one tensor group."""
AXES_OF_LAYERS = ("pipeline", "tensor")
"""Along these, ranks compute different layers, or parts of them, of the same rows."""


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Numbers of ranks along the axes, which are its fields in the order of `AXES`."""

    pipeline: int = 1
    """Stages of the model, each on a rank of its own."""
    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Ranks that share the weights of a copy, and read rows of their own (arXiv:1910.02054, stage 3)."""
    tensor: int = 1
    """Ranks that share each layer (arXiv:1909.08053)."""

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, from the outermost to the innermost."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.sizes.values())

    @property
    def data_size(self) -> int:
        """Number of ranks, or groups of ranks, that read rows of their own."""
        return self.data * self.fsdp

    @property
    def num_dividing(self) -> int:
        """Number of ranks that compute with the same rows."""
        return math.prod(self.sizes[axis] for axis in AXES_OF_LAYERS)

    def stride(self, axis: str) -> int:
        """How far apart two neighbours along that axis are: the ranks along all axes inside it."""
        return math.prod(self.sizes[inner] for inner in AXES[AXES.index(axis) + 1 :])

    def place(self, rank: int) -> dict[str, int]:
        """Axis -> the index of a rank along it."""
        return {axis: rank // self.stride(axis) % size for axis, size in self.sizes.items()}


def axes_in_words(sizes: Mapping[str, int]) -> str:
    """`fsdp 4 x tensor 2`: the axes with several ranks, from the outermost to the innermost."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data 1"
