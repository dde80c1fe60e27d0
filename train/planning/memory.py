"""Plans the memory of a training's ranks once, before the first step, and stores it for every resume.

What every rank has is measured; a model that ranks share is counted, because no host may hold all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.memory import free_bytes
from shardmill.storage import Store
from shardmill.words import size_of
from train.backends.model_spec import model_spec
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import weight_bytes
from train.config import TrainConfig
from train.launching.devices import gpus_here
from train.models.user import trains_module
from train.planning.host_memory import (
    GPU_FRAMEWORK_BYTES,
    HOST_FRAMEWORK_BYTES,
    Limit,
    MemoryRecord,
    bytes_of_a_rank,
    images_at_once,
    limit_of,
    most_microbatches,
    ranks_here,
)
from train.planning.memory_fit import HALF, Fit, MemoryFacts, decided, fit
from train.planning.probe import NUM_PROBED_IMAGES, NUM_PROBED_STEPS, ProbeTask, StepCost, probe
from train.planning.recompute import why_not_recompute
from train.planning.state_bytes import RankPart, RankParts, StateBytes
from train.strategies import STRATEGIES
from train.strategies.options import silos_of

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset
    from shardmill.jobs.config import SparkConfig


def counted_record(limit: Limit, whole: StateBytes, config: TrainConfig) -> MemoryRecord:
    """The record of a rank that would have the whole model, as a measurement of it would find."""
    # A host also has the copy of the state from which a checkpoint is written.
    always = GPU_FRAMEWORK_BYTES + whole.state if limit.on_gpu else HOST_FRAMEWORK_BYTES + 2 * whole.state
    share = HALF if config.mixed_precision in ("bfloat16", "float16") else 1
    recomputes = whole.recomputed_image > 0
    return MemoryRecord(
        device=limit.device,
        rank_bytes=limit.rank_bytes,
        host_bytes=limit.host_bytes,
        on_gpu=limit.on_gpu,
        fixed_bytes=always + whole.step,
        image_bytes=math.ceil(share * whole.image),
        to_bfloat16=False,
        recomputed_fixed_bytes=always + whole.recomputed_step if recomputes else 0,
        recomputed_image_bytes=math.ceil(share * whole.recomputed_image),
        state_bytes=whole.state,
        why_not_recomputed=whole.why_not_recomputed,
        note=_without_activations(whole) if whole.why_not_stepped else "",
    )


def _without_activations(whole: StateBytes) -> str:
    return (
        f"activations are not counted ({whole.why_not_stepped}), nor measured: this host has less memory free than the "
        f"{size_of(whole.state)} of the whole model's state"
    )


AMPLE = 1000
"""Times the pixels of a step, as float32. ResNets, DenseNets and small convolutions take 20 to 600 times as much."""


InputBytes = Callable[[TrainConfig], int]
"""The most that one rank's input keeps in its host's memory (train/planning/host_memory.py)."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """A config in which microbatches, precision and activation checkpointing are chosen."""

    config: TrainConfig
    fit: Fit | None
    """The choice; None if there was nothing to choose, or nothing was measured."""
    available: str = ""
    """Memory that a rank may use; empty if unknown."""
    available_bytes: int = 0
    ample: str = ""
    """Why nothing was measured, with the numbers; empty for any other reason than that it is ample."""

    @property
    def reason(self) -> str:
        why = self.fit.reason if self.fit else self.ample
        return f"memory: {why}" if why else ""


def _not_known(config: TrainConfig) -> str:
    return ""


def _undivided(config: TrainConfig) -> None:
    return None


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a training, for every world size at which it may continue."""

    record: MemoryRecord | None
    """The measurement; None if there is none."""
    spark: SparkConfig
    input_bytes: InputBytes
    limit: Limit | None = None
    """Available memory, if nothing was measured; None if unknown."""
    ample: Callable[[TrainConfig], str] = _not_known
    """See `Fitted`."""
    part_of: Callable[[TrainConfig], RankPart | None] = field(default=_undivided, compare=False)
    """What a rank holds of a model that ranks hold together; None if each has all of it."""

    def fitted(self, config: TrainConfig) -> Fitted:
        """`config` with the microbatches that so many ranks need."""
        if self.record is None:
            available = _available(self.limit, config, self.spark) if self.limit else ""
            return Fitted(decided(config, 1, to_bfloat16=False), None, available, ample=self.ample(config))
        facts = facts_of(self.record, config, self.input_bytes(config), self.spark, self.part_of(config))
        # What was decided first stays: the precision decides the numbers.
        found = fit(replace(facts, may_change_precision=False))
        found = replace(found, reason="; ".join(filter(None, (found.reason, self.record.note))))
        to_bfloat16, recomputes = self.record.to_bfloat16, found.recomputes
        config = decided(config, found.num_microbatches, to_bfloat16=to_bfloat16, recomputes=recomputes)
        available = _available(self.record, config, self.spark)
        return Fitted(config, found, available, bytes_of_a_rank(self.record, config, self.spark))


def look_at_memory(
    config: TrainConfig,
    dataset: Dataset,
    spark: SparkConfig,
    input_bytes: InputBytes,
    *,
    begun: MemoryRecord | None,
    has_begun: bool,
) -> Memory:
    """Return the memory found by an earlier attempt (`begun`), otherwise measure what a rank needs and has, in seconds.

    Nothing is measured if nothing is left to choose, memory is ample or not known, or the training has steps already
    (`has_begun`): what was begun without looking continues so, because in microbatches numbers differ by rounding.
    Raises what building the model raises.
    """
    part_of = RankParts(lambda config: model_spec(dataset.manifest, config))
    limit = limit_of(config, spark) if begun is None and not silos_of(config) else None
    if limit is None:
        return Memory(begun, spark, input_bytes, part_of=part_of)
    ample = partial(_ample, limit, dataset, spark)
    may_choose = "auto" in (config.mixed_precision, config.memory.activation_checkpointing)
    is_asked = config.accumulation_steps == 0 or may_choose
    if is_asked and not has_begun and not ample(config):
        record = measured(limit, config, dataset, spark, input_bytes(config), part_of(config))
        return Memory(record, spark, input_bytes, part_of=part_of)
    return Memory(None, spark, input_bytes, limit, ample)


def model_size(store: Store, checkpoint: str) -> str:
    """Return the size of the model, from the files of a checkpoint; empty if they no longer exist."""
    try:
        found = open_checkpoint(store, checkpoint)
    except ShardmillError:
        return ""
    all_bytes = sum(file.size_bytes for file in found.marker.files)
    return f"trained weights take {size_of(weight_bytes(found))}, {size_of(all_bytes)} with the optimizer's state"


def measured(
    limit: Limit,
    config: TrainConfig,
    dataset: Dataset,
    spark: SparkConfig,
    input_bytes: int,
    part: RankPart | None = None,
) -> MemoryRecord:
    """Measure some steps of a rank, or count them if ranks share the model; and derive the precision.

    Raises the errors of building the model.
    """
    if part is None:
        record = _probed(limit, config, dataset, spark, input_bytes)
    elif part.whole.why_not_stepped and part.whole.state < (free_bytes(Path("/")) or math.inf):
        record = _probed(limit, config, dataset, spark, input_bytes, part)
        note = f"measured with the whole model in one process of this host: {part.whole.why_not_stepped}"
        record = record.model_copy(update={"note": note})
    else:
        record = counted_record(limit, part.whole, config)
    found = fit(facts_of(record, config, input_bytes, spark, part))
    return record.model_copy(update={"to_bfloat16": found.to_bfloat16})


def _probed(
    limit: Limit,
    config: TrainConfig,
    dataset: Dataset,
    spark: SparkConfig,
    input_bytes: int,
    part: RankPart | None = None,
) -> MemoryRecord:
    """By a process that has the whole model."""
    task = ProbeTask(
        # At once, whatever was set: the images are few. And alone.
        decided(config, 1, to_bfloat16=False).model_copy(update={"accumulation_steps": 1, "sync_batch_norm": False}),
        model_spec(dataset.manifest, config),
        min(NUM_PROBED_IMAGES, images_at_once(config)),
        max(1, ranks_here(config, spark)),
        NUM_PROBED_STEPS,
        for_memory=True,
    )
    return considered(
        limit, task, probe(task), config, lambda record: facts_of(record, config, input_bytes, spark, part)
    )


def considered(
    limit: Limit, task: ProbeTask, cost: StepCost, config: TrainConfig, facts_of: Callable[[MemoryRecord], MemoryFacts]
) -> MemoryRecord:
    """Compare the cost of `task` with the available memory, at the given precision.

    If nothing else fits, the step is measured once more, with activations that are computed twice.
    """
    record = record_of(limit, cost)
    facts = facts_of(record)
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
        state_bytes=cost.state_bytes,
    )


def facts_of(
    record: MemoryRecord, config: TrainConfig, input_bytes: int, spark: SparkConfig, part: RankPart | None = None
) -> MemoryFacts:
    """Return the facts for the rules, for so many ranks."""
    in_host = 0 if record.on_gpu else input_bytes
    # Measured was a rank with the whole model; in a host it has a copy of its state, for a checkpoint.
    fewer, share = (0, 1.0) if part is None else (part.beside(record), part.image_share)
    is_spread = record.on_gpu and STRATEGIES[config.strategy].devices_per_rank == "all"
    num_gpus = len(gpus_here(config, config.backend)) if is_spread else 0
    num_images, microbatches = images_at_once(config, num_gpus), most_microbatches(config, num_gpus)
    if config.accumulation_steps:
        # Set: only the precision is left to choose.
        num_images, microbatches = -(-num_images // config.accumulation_steps), 1
    may_recompute = config.memory.activation_checkpointing == "auto"
    recomputed_image_bytes = int(share * record.recomputed_image_bytes) if may_recompute else 0
    # The first world size may have fitted without it, and then it was not looked at.
    why_not = record.why_not_recomputed or why_not_recompute(config)
    is_settled = config.memory.activation_checkpointing == "on" or recomputed_image_bytes > 0 or why_not != ""
    return MemoryFacts(
        device=record.device,
        device_bytes=bytes_of_a_rank(record, config, spark),
        fixed_bytes=record.fixed_bytes + in_host + fewer,
        image_bytes=int(share * record.image_bytes),
        num_images=num_images,
        max_microbatches=microbatches,
        may_change_precision=config.mixed_precision == "auto",
        is_halved=record.to_bfloat16 and config.mixed_precision in ("auto", "bfloat16"),
        recomputed_fixed_bytes=record.recomputed_fixed_bytes + in_host + fewer,
        recomputed_image_bytes=recomputed_image_bytes,
        why_not_recomputed=why_not if may_recompute else "",
        may_ask_to_recompute=not is_settled,
        may_divide=trains_module(config) and part is None,
    )


def _ample(limit: Limit, dataset: Dataset, spark: SparkConfig, config: TrainConfig) -> str:
    """Why it is, with the numbers; empty if it is not, or if the user has set the limit."""
    height, width, channels = config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    pixel_bytes = 4 * height * width * channels * images_at_once(config)
    if config.memory.budget_bytes or AMPLE * pixel_bytes > bytes_of_a_rank(limit, config, spark):
        return ""
    of_step = f"the {images_at_once(config)} images of a step take {size_of(pixel_bytes)}"
    return f"{of_step}: {_available(limit, config, spark)} hold more than {AMPLE:,} times as much"


def _available(limit: Limit | MemoryRecord, config: TrainConfig, spark: SparkConfig) -> str:
    return f"{size_of(bytes_of_a_rank(limit, config, spark))} ({limit.device})"
