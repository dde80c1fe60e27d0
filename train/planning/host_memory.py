"""The memory of ranks: what they may use of this machine or its GPUs, what their input takes, and its record."""

from __future__ import annotations

import math
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.loader.row_source import ReaderOptions, kept_bytes
from shardmill.memory import free_bytes
from shardmill.section import Section
from train.config import TrainConfig
from train.contracts.row_source import evaluation_spec
from train.launching import LAUNCHERS
from train.launching.devices import gpus_here
from train.strategies import STRATEGIES, has_chief, mesh_of, roles_of
from train.strategies.options import LocalSgdOptions, MirroredOptions

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import PlanSpec
    from shardmill.jobs.config import SparkConfig


# What the framework itself keeps on a GPU, and in a process, if that is not measured.
GPU_FRAMEWORK_BYTES = 2**30
HOST_FRAMEWORK_BYTES = 2**29


@dataclass(frozen=True, slots=True)
class Limit:
    """The usable amount of a memory."""

    device: str
    """Owner of the memory, in words."""
    rank_bytes: int
    """Limit per rank; 0: an equal part of `host_bytes`."""
    host_bytes: int = 0
    """Limit of all ranks of the host."""
    on_gpu: bool = False


def limit_of(config: TrainConfig, spark: SparkConfig) -> Limit | None:
    """Return the memory that ranks may use: as set, or of this machine; None if they run elsewhere, or it
    is unknown.
    """
    gpus = gpus_here(config, config.backend)
    if config.memory.budget_bytes:
        return Limit("train.memory.budget_bytes", config.memory.budget_bytes, on_gpu=bool(gpus))
    if not ranks_here(config, spark):
        return None
    if gpus:
        num_bytes = gpu_bytes()
        return Limit("a GPU here", num_bytes, on_gpu=True) if num_bytes else None
    num_bytes = free_bytes(Path("/"))
    return Limit("a rank's share of the free memory of this host", 0, num_bytes) if num_bytes else None


def ranks_here(config: TrainConfig, spark: SparkConfig) -> int:
    """Ranks that share this machine; 0 if all are elsewhere."""
    return LAUNCHERS[config.launcher].ranks_here(len(roles_of(config)), spark)


def bytes_of_a_rank(limit: Limit | MemoryRecord, config: TrainConfig, spark: SparkConfig) -> int:
    """What one rank may use of it."""
    return limit.rank_bytes or limit.host_bytes // max(1, ranks_here(config, spark))


def gpu_bytes() -> int:
    """Memory of the smallest GPU here, from NVIDIA's driver; 0 if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min((int(line) * 2**20 for line in told.split() if line.isdigit()), default=0)


class MemoryRecord(Section):
    """The measurements before a training's first step. A resume uses these numbers, and does not measure again."""

    device: str
    rank_bytes: int
    host_bytes: int
    """Value as in `train.planning.host_memory.Limit`."""
    on_gpu: bool
    fixed_bytes: int
    """Memory of a rank for any batch size, without its input."""
    image_bytes: int
    """Per image that is computed at a time, in the precision that the config asked for."""
    to_bfloat16: bool
    """`train.mixed_precision` was `auto`, and became bfloat16."""
    recomputed_fixed_bytes: int = 0
    recomputed_image_bytes: int = 0
    """Both with `train.memory.activation_checkpointing`; 0 if that was not measured."""
    state_bytes: int = 0
    """Of `fixed_bytes`: weights, gradients and optimizer of a rank with the whole model; 0 if that is not known."""
    why_not_recomputed: str = ""
    """Why the model, or what it is trained with, does not have it."""
    note: str = ""
    """How a model that ranks share was measured, if it could not be counted from shapes; for people."""


def input_bytes(config: TrainConfig, dataset: Dataset) -> int:
    """The most that the readers of the rank with most streams keep: that of the train split, and beside it that of the
    split that is evaluated. `config`: one with its streams decided.
    """
    evaluated = {name for name in ("validation", dataset.manifest.evaluation_split) if name in dataset.manifest.splits}
    sizes = config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    specs = {name: evaluation_spec(dataset, config, name) for name in evaluated if name is not None}
    beside = [_kept_bytes(config, dataset, spec, sizes) for spec in specs.values()]
    return _kept_bytes(config, dataset, config.plan_spec(dataset), sizes) + max(beside, default=0)


def _kept_bytes(config: TrainConfig, dataset: Dataset, spec: PlanSpec, image_shape_HWC: tuple[int, int, int]) -> int:
    options = ReaderOptions(config.format, config.reading.threads, config.reading.prefetch_bytes)
    index, num_streams = dataset.index(spec.split, config.format), mesh_of(config).most_streams
    return kept_bytes(index, spec, num_streams, options, math.prod(image_shape_HWC))


def images_at_once(config: TrainConfig, num_gpus: int = 0) -> int:
    """Images of a step on the rank with most streams, or on one of its `num_gpus`, without microbatches."""
    of_update = -(
        -mesh_of(config).largest_share(config.global_batch_size) // config.options(LocalSgdOptions).local_steps
    )
    return -(-of_update // max(1, num_gpus))


def most_microbatches(config: TrainConfig, num_gpus: int = 0) -> int:
    """Maximum number of microbatches on every rank, with at least one image per device."""
    if has_chief(config) or config.sync_batch_norm:
        return 1
    of_rank = mesh_of(config).smallest_share(config.global_batch_size)
    num_devices = (
        config.options(MirroredOptions).num_devices if STRATEGIES[config.strategy].devices_per_rank == "all" else 1
    )
    return max(1, of_rank // config.options(LocalSgdOptions).local_steps // max(1, num_gpus, num_devices))
