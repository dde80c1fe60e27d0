"""Settings that belong to one strategy; each class is a section of `[train]` with the strategy's name."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from shardmill.section import Section
from train.settings import DEFAULTED, EXECUTION

if TYPE_CHECKING:
    from train.config import TrainConfig


class LocalSgdOptions(Section):
    """Settings of the strategy `local_sgd`."""

    local_steps: Annotated[int, DEFAULTED] = Field(default=1, ge=1)
    """Number of parts into which a rank splits its share of a step; it updates its own weights after each part, before
    weights are averaged. To keep the batch size of an update, multiply `global_batch_size` by the same number."""
    silos: Annotated[tuple[str, ...], DEFAULTED] = ()
    """The dataset version of each rank, as `uri@N`; no image leaves it. `dataset.uri` then provides the
    classes, the standardization, and the splits that rank 0 evaluates on."""
    silo_timeout_seconds: Annotated[float, EXECUTION] = Field(default=60.0, gt=0)
    """How long rank 0 waits in a round for silos that took part in the last one, before it continues without them."""


class MirroredOptions(Section):
    """Settings of the strategy `mirrored`."""

    num_devices: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Number of devices of the process over which a batch is split; 0: all GPUs, or one CPU. Without GPUs the CPU
    counts as that many devices: useful for testing only."""


class ParameterServerOptions(Section):
    """Settings of the strategy `parameter_server`."""

    num_servers: Annotated[int, EXECUTION] = Field(default=1, ge=1)
    """Number of processes that hold the variables, in addition to `num_workers` workers and a chief."""


def silos_of(config: TrainConfig) -> tuple[str, ...]:
    """The dataset of each rank, if each has one of its own."""
    return config.options(LocalSgdOptions).silos


def num_named_ranks(config: TrainConfig) -> int:
    """Ranks that the config names one by one, by their silos or weights."""
    return len(silos_of(config) or config.rank_weights)
