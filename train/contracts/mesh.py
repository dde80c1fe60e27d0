"""Divides a training over its ranks: one axis for each kind of parallelism, and the rows that each rank reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING

from shardmill.epoch_plan import streams_by_weight, streams_of_rank
from shardmill.errors import UsageError
from shardmill.words import counted

if TYPE_CHECKING:
    from train.config import TrainConfig

STRATEGIES_WITH_AXIS = {
    "fsdp": ("torch_fsdp", "hybrid"),
    "tensor": ("tensor_parallel", "hybrid"),
    "pipeline": ("pipeline_parallel",),
}
"""What errors recommend to whom sets an axis that the strategy has not; all strategies have copies (`data`)."""


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
    """The axes of a training, from the outermost to the innermost: neighbouring ranks are of one tensor group.

    Raises UsageError if the streams cannot be shared out.
    """

    pipeline: int = 1
    """Stages of the model, each on a rank of its own."""
    data: int = 1
    """Copies of the model."""
    fsdp: int = 1
    """Ranks that share the weights of a copy, and read rows of their own (arXiv:1910.02054, stage 3)."""
    tensor: int = 1
    """Ranks that share each layer (arXiv:1909.08053)."""
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
        data = num_ranks // ranks_per_copy
        if not config.num_streams and data * fsdp > config.global_batch_size:
            # Of what is left open there may be any number.
            set_readers = max(1, config.mesh.data) * max(1, config.mesh.fsdp)
            most = config.global_batch_size // set_readers * set_readers * tensor * pipeline
            fewer = f"set train.num_workers = {most} or less" if most else "set smaller sizes of train.mesh"
            raise UsageError(
                f"train.num_workers = {num_ranks} with train.global_batch_size = {config.global_batch_size}",
                "expected at least one sample of each global batch for each rank that reads rows of its own",
                f"{fewer}, or raise train.global_batch_size, which starts a new run",
            )
        sizes = {"data": data, "fsdp": fsdp, "tensor": tensor, "pipeline": pipeline}
        for axis, asked in config.mesh.sizes.items():
            if asked not in (0, sizes[axis]):
                raise _not_of_this_size(config, axis, sizes)
        num_streams = config.num_streams_at(data * fsdp)
        return cls(pipeline, data, fsdp, tensor, num_streams=num_streams, weights=config.rank_weights)

    @classmethod
    def one_reader(cls, config: TrainConfig) -> Mesh:
        """One rank that reads every stream, independent of other processes. Raises UsageError for sizes of axes."""
        for axis, asked in config.mesh.sizes.items():
            if asked > 1:
                raise _not_of_this_size(config, axis, {"data": 1}) if axis != "data" else _without_copies(config)
        return cls(num_streams=config.num_streams_at(1))

    @property
    def num_ranks(self) -> int:
        return self.pipeline * self.data * self.fsdp * self.tensor

    @property
    def sizes(self) -> dict[str, int]:
        """Axis -> its size, from the outermost to the innermost."""
        return {"pipeline": self.pipeline, "data": self.data, "fsdp": self.fsdp, "tensor": self.tensor}

    @property
    def data_size(self) -> int:
        """Number of indices among which the streams are divided."""
        return self.data * self.fsdp

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
        outer, in_tensor = divmod(rank, self.tensor)
        stage, index = divmod(outer, self.data_size)
        is_first = stage == 0 and in_tensor == 0
        return DataIndex(index, self.data_size, self.streams[index], self.num_streams, is_first=is_first)

    def __str__(self) -> str:
        named = " x ".join(f"{name} {size}" for name, size in self.sizes.items() if size > 1 and name != "data")
        return f"train.num_workers = {self.num_ranks}" + (f" ({named} x data {self.data})" if named else "")


def axes_in_words(sizes: Mapping[str, int]) -> str:
    """`fsdp 4 x tensor 2`: the axes with several ranks, from the outermost to the innermost."""
    return " x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "data 1"


def _without_copies(config: TrainConfig) -> UsageError:
    return UsageError(
        f"train.mesh.data = {config.mesh.data} with train.strategy = {config.strategy!r}, which has no such axis",
        "expected no copies of the model: its servers hold the variables, for all of train.num_workers",
        "leave train.mesh.data at 0",
    )


def _not_of_this_size(config: TrainConfig, axis: str, sizes: Mapping[str, int]) -> UsageError:
    """`sizes`: those that the strategy's mesh has. Other axes than `data` are as they were set, if it has them."""
    asked = config.mesh.sizes[axis]
    several = {name: size for name, size in config.mesh.sizes.items() if size > 1 and name != "data"}
    if axis != "data" and not set.intersection(*(set(STRATEGIES_WITH_AXIS[name]) for name in several)):
        return UsageError(
            " with ".join(f"train.mesh.{name} = {size}" for name, size in several.items()),
            "expected axes that one strategy has: no strategy combines these",
            f"leave {' or '.join(f'train.mesh.{name}' for name in several)} at 0",
        )
    given = f"train.mesh.{axis} = {asked} with train.strategy = {config.strategy!r}"
    if axis != "data":
        taken_by = " or ".join(map(repr, STRATEGIES_WITH_AXIS[axis]))
        return UsageError(
            f"{given}, which has no such axis",
            f"expected it with train.strategy = {taken_by}",
            f"set train.strategy, or leave train.mesh.{axis} at 0",
        )
    ranks_per_copy = sizes["pipeline"] * sizes["fsdp"] * sizes["tensor"]
    return UsageError(
        f"{given} and train.num_workers = {config.num_ranks_asked}",
        f"expected sizes whose product is train.num_workers; a copy of the model has {counted(ranks_per_copy, 'rank')}",
        f"set train.num_workers = {asked * ranks_per_copy}, or train.mesh.data = 0 for {sizes['data']} copies",
    )
