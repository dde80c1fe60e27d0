"""Plans the memory of a training's ranks once, before the first step, and stores it for every resume."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.storage import Store
from train.backends.backend import model_spec
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.state import WEIGHTS
from train.config import TrainConfig
from train.launching.devices import gpus_here
from train.planning.host_memory import Limit, limit_of, ranks_here
from train.planning.memory_fit import Fit, MemoryFacts, decided, fit, size_of
from train.planning.memory_record import MemoryRecord
from train.planning.probe import ProbeTask, StepCost, probe
from train.planning.recompute import why_not_recompute
from train.strategies import STRATEGIES, has_chief, mesh_of
from train.strategies.options import LocalSgdOptions, MirroredOptions, silos_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig

AMPLE = 1000
"""Times the pixels of a step, as float32. ResNets, DenseNets and small convolutions take 20 to 600 times as much."""
# Of the measurement: what more images need follows from what one and these need.
NUM_PROBED_IMAGES = 8
NUM_PROBED_STEPS = 2
# What the framework itself keeps on a GPU.
GPU_FRAMEWORK_BYTES = 2**30


WindowBytes = Callable[[TrainConfig], int]
"""The maximum size of one rank's shuffle windows."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A config in which microbatches, precision and activation checkpointing are chosen."""

    config: TrainConfig
    fit: Fit | None
    """The choice; None if there was nothing to choose, or nothing was measured."""
    available: str = ""
    """Memory that a rank may use; empty if unknown."""
    ample: str = ""
    """Why nothing was measured, with the numbers; empty for any other reason than that it is ample."""

    @property
    def reason(self) -> str:
        why = self.fit.reason if self.fit else self.ample
        return f"memory: {why}" if why else ""


def _not_known(config: TrainConfig) -> str:
    return ""


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a training, for every world size at which it may continue."""

    record: MemoryRecord | None
    """The measurement; None if there is none."""
    spark: SparkConfig
    window_bytes: WindowBytes
    limit: Limit | None = None
    """Available memory, if nothing was measured; None if unknown."""
    ample: Callable[[TrainConfig], str] = _not_known
    """See `Fitted`."""

    def fitted(self, config: TrainConfig) -> Fitted:
        """`config` with the microbatches that so many ranks need."""
        if self.record is None:
            available = _available(self.limit, config, self.spark) if self.limit else ""
            return Fitted(decided(config, 1, to_bfloat16=False), None, available, self.ample(config))
        facts = facts_of(self.record, config, self.window_bytes(config), self.spark)
        # What was decided first stays: the precision decides the numbers.
        found = fit(replace(facts, may_change_precision=False))
        to_bfloat16, recomputes = self.record.to_bfloat16, found.recomputes
        config = decided(config, found.num_microbatches, to_bfloat16=to_bfloat16, recomputes=recomputes)
        return Fitted(config, found, _available(self.record, config, self.spark))


def look_at_memory(
    config: TrainConfig,
    dataset: Dataset,
    spark: SparkConfig,
    window_bytes: WindowBytes,
    *,
    begun: MemoryRecord | None,
    has_begun: bool,
) -> Memory:
    """Return the memory found by an earlier attempt (`begun`), otherwise measure what a rank needs and has, in seconds.

    Nothing is measured if nothing is left to choose, memory is ample or not known, or the training has steps already
    (`has_begun`): what was begun without looking continues so, because in microbatches numbers differ by rounding.
    Raises what building the model raises.
    """
    limit = limit_of(config, spark) if begun is None and not silos_of(config) else None
    if limit is None:
        return Memory(begun, spark, window_bytes)
    ample = partial(_ample, limit, dataset, spark)
    may_choose = "auto" in (config.mixed_precision, config.memory.activation_checkpointing)
    is_asked = config.accumulation_steps == 0 or may_choose
    if is_asked and not has_begun and not ample(config):
        return Memory(measured(limit, config, dataset, spark, window_bytes(config)), spark, window_bytes)
    return Memory(None, spark, window_bytes, limit, ample)


def model_size(store: Store, checkpoint: str) -> str:
    """Return the size of the model, from the files of a checkpoint; empty if they no longer exist."""
    try:
        files = open_checkpoint(store, checkpoint).marker.files
    except ShardmillError:
        return ""
    weights_bytes = sum(file.size_bytes for file in files if file.path.endswith(WEIGHTS))
    all_bytes = sum(file.size_bytes for file in files)
    return f"trained weights take {size_of(weights_bytes)}, {size_of(all_bytes)} with the optimizer's state"


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


def measured(
    limit: Limit, config: TrainConfig, dataset: Dataset, spark: SparkConfig, window_bytes: int
) -> MemoryRecord:
    """Measure some steps of a rank, and derive the precision. Raises the errors of building the model."""
    task = ProbeTask(
        # At once, whatever was set: the images are few. And alone.
        decided(config, 1, to_bfloat16=False).model_copy(update={"accumulation_steps": 1, "sync_batch_norm": False}),
        model_spec(dataset.manifest, config),
        min(NUM_PROBED_IMAGES, images_at_once(config)),
        max(1, ranks_here(config, spark)),
        NUM_PROBED_STEPS,
        for_memory=True,
    )
    record = considered(limit, task, probe(task), config, window_bytes, spark)
    found = fit(facts_of(record, config, window_bytes, spark))
    return record.model_copy(update={"to_bfloat16": found.to_bfloat16})


def considered(
    limit: Limit, task: ProbeTask, cost: StepCost, config: TrainConfig, window_bytes: int, spark: SparkConfig
) -> MemoryRecord:
    """Compare the cost of `task` with the available memory, at the given precision.

    If nothing else fits, the step is measured once more, with activations that are computed twice.
    """
    record = record_of(limit, cost)
    facts = facts_of(record, config, window_bytes, spark)
    may_help = config.memory.activation_checkpointing == "auto" and facts.fixed_bytes < facts.device_bytes
    if fit(facts).choice == "too_large" and may_help:
        return _recomputed(record, limit, task, config)
    return record


def _recomputed(record: MemoryRecord, limit: Limit, task: ProbeTask, config: TrainConfig) -> MemoryRecord:
    why_not = why_not_recompute(config)
    if not why_not:
        memory = task.config.memory.model_copy(update={"activation_checkpointing": "on"})
        recomputing = task.config.model_copy(update={"memory": memory})
        num_images = min(NUM_PROBED_IMAGES, task.local_batch_size)
        try:
            cost = probe(replace(task, config=recomputing, local_batch_size=num_images, num_steps=NUM_PROBED_STEPS))
        except ShardmillError as error:
            # Without it the training can still be tried.
            why_not = str(error)
        else:
            there = record_of(limit, cost)
            found = {"recomputed_fixed_bytes": there.fixed_bytes, "recomputed_image_bytes": there.image_bytes}
            return record.model_copy(update=found)
    return record.model_copy(update={"why_not_recomputed": why_not})


def record_of(limit: Limit, cost: StepCost) -> MemoryRecord:
    """Build the record of the measurement and the available memory."""
    in_process = cost.process_bytes + cost.weights_bytes + cost.base_bytes + cost.state_bytes
    return MemoryRecord(
        device=limit.device,
        rank_bytes=limit.rank_bytes,
        host_bytes=limit.host_bytes,
        on_gpu=limit.on_gpu,
        # In a host the process before its first step, gradients, and a copy of the state for a checkpoint.
        fixed_bytes=GPU_FRAMEWORK_BYTES + cost.state_bytes + cost.base_bytes if limit.on_gpu else in_process,
        image_bytes=cost.image_bytes,
        to_bfloat16=False,
    )


def facts_of(record: MemoryRecord, config: TrainConfig, window_bytes: int, spark: SparkConfig) -> MemoryFacts:
    """Return the facts for the rules, for so many ranks."""
    in_host = 0 if record.on_gpu else window_bytes + config.reading.prefetch_bytes
    is_spread = record.on_gpu and STRATEGIES[config.strategy].devices_per_rank == "all"
    num_gpus = len(gpus_here(config, config.backend)) if is_spread else 0
    num_images, microbatches = images_at_once(config, num_gpus), most_microbatches(config, num_gpus)
    if config.accumulation_steps:
        # Set: only the precision is left to choose.
        num_images, microbatches = -(-num_images // config.accumulation_steps), 1
    may_recompute = config.memory.activation_checkpointing == "auto"
    recomputed_image_bytes = record.recomputed_image_bytes if may_recompute else 0
    # The first world size may have fitted without it, and then it was not looked at.
    why_not = record.why_not_recomputed or why_not_recompute(config)
    is_settled = config.memory.activation_checkpointing == "on" or recomputed_image_bytes > 0 or why_not != ""
    return MemoryFacts(
        device=record.device,
        device_bytes=_bytes_of_a_rank(record, config, spark),
        fixed_bytes=record.fixed_bytes + in_host,
        image_bytes=record.image_bytes,
        num_images=num_images,
        max_microbatches=microbatches,
        may_change_precision=config.mixed_precision == "auto",
        is_halved=record.to_bfloat16 and config.mixed_precision in ("auto", "bfloat16"),
        recomputed_fixed_bytes=record.recomputed_fixed_bytes + in_host,
        recomputed_image_bytes=recomputed_image_bytes,
        why_not_recomputed=why_not if may_recompute else "",
        may_ask_to_recompute=not is_settled,
    )


def _ample(limit: Limit, dataset: Dataset, spark: SparkConfig, config: TrainConfig) -> str:
    """Why it is, with the numbers; empty if it is not, or if the user has set the limit."""
    height, width, channels = config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    pixel_bytes = 4 * height * width * channels * images_at_once(config)
    if config.memory.budget_bytes or AMPLE * pixel_bytes > _bytes_of_a_rank(limit, config, spark):
        return ""
    of_step = f"the {images_at_once(config)} images of a step take {size_of(pixel_bytes)}"
    return f"{of_step}, and {AMPLE:,} times that fits into {_available(limit, config, spark)}"


def _available(limit: Limit | MemoryRecord, config: TrainConfig, spark: SparkConfig) -> str:
    return f"{size_of(_bytes_of_a_rank(limit, config, spark))} ({limit.device})"


def _bytes_of_a_rank(limit: Limit | MemoryRecord, config: TrainConfig, spark: SparkConfig) -> int:
    return limit.rank_bytes or limit.host_bytes // max(1, ranks_here(config, spark))
