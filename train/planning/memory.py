"""The memory of a training's ranks: what each may use, what its input and its step take. Looked at once, before the
first step, and recorded for every resume.

What every rank has is measured; a model that ranks share is counted, because no host may hold all of it.
"""

from __future__ import annotations

import math
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.loader.row_source import ReaderOptions, kept_bytes
from shardmill.memory import free_bytes
from shardmill.storage import Store
from shardmill.words import size_of
from train.checkpoints.checkpoint import open_checkpoint
from train.checkpoints.shards import weight_bytes
from train.config import TrainConfig
from train.contracts.row_source import evaluation_spec
from train.planning.memory_fit import HALF, Fit, MemoryFacts, MemoryRecord, decided, fit, recompute_problem
from train.planning.probe import NUM_PROBED_IMAGES, NUM_PROBED_STEPS, ProbeTask, StepCost, probe
from train.planning.state_bytes import RankPart, RankParts, StateBytes, spec_of
from train.strategies import has_chief
from train.strategies.options import LocalSgdOptions, MirroredOptions, silos_of

if TYPE_CHECKING:
    from shardmill.epoch_plan import PlanSpec
    from train.planning.setup import Setup
    from train.planning.trainings import PlanRecord


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


def limit_of(setup: Setup) -> Limit | None:
    """Return the memory that ranks may use: as set, or of this machine; None if they run elsewhere, or it
    is unknown.
    """
    budget_bytes = setup.config.memory.budget_bytes
    if budget_bytes:
        return Limit("train.memory.budget_bytes", budget_bytes, on_gpu=bool(setup.gpus))
    if not setup.num_ranks_here:
        return None
    if setup.gpus:
        num_bytes = gpu_bytes()
        return Limit("a GPU here", num_bytes, on_gpu=True) if num_bytes else None
    num_bytes = free_bytes(Path("/"))
    return Limit("a rank's share of the free memory of this host", 0, num_bytes) if num_bytes else None


def bytes_of_a_rank(limit: Limit | MemoryRecord, setup: Setup) -> int:
    """What one rank may use of it."""
    return limit.rank_bytes or limit.host_bytes // max(1, setup.num_ranks_here)


def gpu_bytes() -> int:
    """Memory of the smallest GPU here, from NVIDIA's driver; 0 if unknown."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return min((int(line) * 2**20 for line in told.split() if line.isdigit()), default=0)


def input_bytes(setup: Setup) -> int:
    """The most that the readers of the rank with most streams keep in its host's memory: that of the train split, and
    beside it that of the split that is evaluated.
    """
    config, dataset = setup.config, setup.of_dataset
    evaluated = {name for name in ("validation", dataset.manifest.evaluation_split) if name in dataset.manifest.splits}
    sizes = config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    specs = {name: evaluation_spec(dataset, config, name) for name in evaluated if name is not None}
    options = ReaderOptions(config.format, config.reading.threads, config.reading.prefetch_bytes)

    def kept(spec: PlanSpec) -> int:
        index = dataset.index(spec.split, config.format)
        return kept_bytes(index, spec, setup.mesh.most_streams, options, math.prod(sizes))

    return kept(config.plan_spec(dataset, setup.mesh.streams)) + max(map(kept, specs.values()), default=0)


def images_at_once(setup: Setup, num_gpus: int = 0) -> int:
    """Images of a step on the rank with most streams, or on one of its `num_gpus`, without microbatches."""
    return -(-setup.mesh.largest_share(setup.config.global_batch_size) // (_local_steps(setup) * max(1, num_gpus)))


def _local_steps(setup: Setup) -> int:
    return setup.config.options(LocalSgdOptions).local_steps


def most_microbatches(setup: Setup, num_gpus: int = 0) -> int:
    """Maximum number of microbatches on every rank, with at least one image per device."""
    config = setup.config
    if has_chief(config) or config.sync_batch_norm:
        return 1
    of_rank = setup.mesh.smallest_share(config.global_batch_size)
    num_devices = config.options(MirroredOptions).num_devices if setup.strategy.devices_per_rank == "all" else 1
    return max(1, of_rank // _local_steps(setup) // max(1, num_gpus, num_devices))


AMPLE = 1000
"""Times the pixels of a step, as float32. ResNets, DenseNets and small convolutions take 20 to 600 times as much."""


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


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a training, for every world size at which it may continue."""

    record: MemoryRecord | None
    """The measurement; None if there is none."""
    limit: Limit | None = None
    """Available memory, if nothing was measured; None if unknown."""
    ample: Callable[[Setup], str] = lambda setup: ""
    """See `Fitted`."""
    part_of: Callable[[Setup], RankPart | None] = field(default=lambda setup: None, compare=False)
    """What a rank holds of a model that ranks hold together; None if each has all of it."""

    def fitted(self, setup: Setup) -> Fitted:
        """The setup's config with the microbatches that so many ranks need."""
        if self.record is None:
            available = _available(self.limit, setup) if self.limit else ""
            return Fitted(decided(setup.config, 1, to_bfloat16=False), None, available, ample=self.ample(setup))
        facts = facts_of(self.record, setup, self.part_of(setup))
        # What was decided first stays: the precision decides the numbers.
        found = fit(replace(facts, may_change_precision=False))
        found = replace(found, reason="; ".join(filter(None, (found.reason, self.record.note))))
        to_bfloat16, recomputes = self.record.to_bfloat16, found.recomputes
        config = decided(setup.config, found.num_microbatches, to_bfloat16=to_bfloat16, recomputes=recomputes)
        return Fitted(config, found, _available(self.record, setup))


def look_at_memory(setup: Setup, part_of: RankParts, *, begun: PlanRecord | None, has_begun: bool) -> Memory:
    """Return the memory that an earlier attempt (`begun`) found, else measure what a rank needs and has, in seconds.

    Nothing is measured if nothing is left to choose, memory is ample or not known, or the training has steps already
    (`has_begun`): what was begun without looking continues so, because in microbatches numbers differ by rounding.
    Raises what building the model raises.
    """
    config, record = setup.config, begun.memory if begun else None
    limit = limit_of(setup) if record is None and not silos_of(config) else None
    if limit is None:
        return Memory(record, part_of=part_of)
    ample = partial(_ample, limit)
    may_choose = "auto" in (config.mixed_precision, config.memory.activation_checkpointing)
    is_asked = config.accumulation_steps == 0 or may_choose
    if is_asked and not has_begun and not ample(setup):
        return Memory(measured(limit, setup, part_of(setup)), part_of=part_of)
    return Memory(None, limit, ample)


def measured(limit: Limit, setup: Setup, part: RankPart | None = None) -> MemoryRecord:
    """Measure some steps of a rank, or count them if ranks share the model; and derive the precision.

    Raises the errors of building the model.
    """
    if part is None:
        record = _probed(limit, setup)
    elif part.whole.step_problem and part.whole.state < (free_bytes(Path("/")) or math.inf):
        record = _probed(limit, setup, part)
        note = f"measured with the whole model in one process of this host: {part.whole.step_problem}"
        record = record.model_copy(update={"note": note})
    else:
        record = counted_record(limit, part.whole, setup.config)
    found = fit(facts_of(record, setup, part))
    return record.model_copy(update={"to_bfloat16": found.to_bfloat16})


def counted_record(limit: Limit, whole: StateBytes, config: TrainConfig) -> MemoryRecord:
    """The record of a rank that would have the whole model, as a measurement of it would find."""
    # A host also has the copy of the state from which a checkpoint is written.
    always = GPU_FRAMEWORK_BYTES + whole.state if limit.on_gpu else HOST_FRAMEWORK_BYTES + 2 * whole.state
    share = HALF if config.mixed_precision in ("bfloat16", "float16") else 1
    recomputes = whole.recomputed_image > 0
    return MemoryRecord(
        **asdict(limit),
        fixed_bytes=always + whole.step,
        image_bytes=math.ceil(share * whole.image),
        to_bfloat16=False,
        recomputed_fixed_bytes=always + whole.recomputed_step if recomputes else 0,
        recomputed_image_bytes=math.ceil(share * whole.recomputed_image),
        state_bytes=whole.state,
        recompute_problem=whole.recompute_problem,
        note=_without_activations(whole) if whole.step_problem else "",
    )


def _without_activations(whole: StateBytes) -> str:
    return (
        f"activations are not counted ({whole.step_problem}), nor measured: this host has less memory free than the "
        f"{size_of(whole.state)} of the whole model's state"
    )


def _probed(limit: Limit, setup: Setup, part: RankPart | None = None) -> MemoryRecord:
    """By a process that has the whole model."""
    # At once, whatever was set: the images are few. And alone.
    alone = {"accumulation_steps": 1, "sync_batch_norm": False}
    task = ProbeTask(
        decided(setup.config, 1, to_bfloat16=False).model_copy(update=alone),
        spec_of(setup),
        min(NUM_PROBED_IMAGES, images_at_once(setup)),
        max(1, setup.num_ranks_here),
        NUM_PROBED_STEPS,
        for_memory=True,
    )
    return considered(limit, task, probe(task), setup, part)


def considered(
    limit: Limit, task: ProbeTask, cost: StepCost, setup: Setup, part: RankPart | None = None
) -> MemoryRecord:
    """Compare the cost of `task` with the available memory, at the given precision.

    If nothing else fits, the step is measured once more, with activations that are computed twice.
    """
    record = probed_record(limit, cost)
    facts = facts_of(record, setup, part)
    may_help = setup.config.memory.activation_checkpointing == "auto" and facts.fixed_bytes < facts.device_bytes
    if fit(facts).choice == "too_large" and may_help:
        return _recomputed(record, limit, task, setup.config)
    return record


def _recomputed(record: MemoryRecord, limit: Limit, task: ProbeTask, config: TrainConfig) -> MemoryRecord:
    problem = recompute_problem(config)
    if problem is None:
        memory = task.config.memory.model_copy(update={"activation_checkpointing": "on"})
        recomputing = task.config.model_copy(update={"memory": memory})
        num_images = min(NUM_PROBED_IMAGES, task.local_batch_size)
        try:
            cost = probe(replace(task, config=recomputing, local_batch_size=num_images, num_steps=NUM_PROBED_STEPS))
        except ShardmillError as error:
            # Without it the training can still be tried.
            problem = str(error)
        else:
            there = probed_record(limit, cost)
            found = {"recomputed_fixed_bytes": there.fixed_bytes, "recomputed_image_bytes": there.image_bytes}
            return record.model_copy(update=found)
    return record.model_copy(update={"recompute_problem": problem})


def probed_record(limit: Limit, cost: StepCost) -> MemoryRecord:
    """Build the record of the measurement and the available memory."""
    in_process = cost.process_bytes + cost.weights_bytes + cost.base_bytes + cost.state_bytes
    return MemoryRecord(
        **asdict(limit),
        # In a host the process before its first step, gradients, and a copy of the state for a checkpoint.
        fixed_bytes=GPU_FRAMEWORK_BYTES + cost.state_bytes + cost.base_bytes if limit.on_gpu else in_process,
        image_bytes=cost.image_bytes,
        to_bfloat16=False,
        state_bytes=cost.state_bytes,
    )


def facts_of(record: MemoryRecord, setup: Setup, part: RankPart | None = None) -> MemoryFacts:
    """Return the facts for the rules, for so many ranks."""
    config, beside, share = setup.config, 0 if record.on_gpu else input_bytes(setup), 1.0
    if part is not None:
        # Measured was a rank with the whole model; in a host it has a copy of its state, for a checkpoint.
        num_copies = 1 if record.on_gpu else 2
        fewer = num_copies * (part.state.state - record.state_bytes) if record.state_bytes else 0
        beside, share = beside + fewer + part.state.gathered, part.image_share
    num_gpus = len(setup.gpus) if record.on_gpu and setup.strategy.devices_per_rank == "all" else 0
    num_images, microbatches = images_at_once(setup, num_gpus), most_microbatches(setup, num_gpus)
    if config.accumulation_steps:
        # Set: only the precision is left to choose.
        num_images, microbatches = -(-num_images // config.accumulation_steps), 1
    may_recompute = config.memory.activation_checkpointing == "auto"
    recomputed_image_bytes = int(share * record.recomputed_image_bytes) if may_recompute else 0
    # The first world size may have fitted without it, and then it was not looked at.
    problem = record.recompute_problem or recompute_problem(config)
    is_settled = config.memory.activation_checkpointing == "on" or recomputed_image_bytes > 0 or problem is not None
    return MemoryFacts(
        device=record.device,
        device_bytes=bytes_of_a_rank(record, setup),
        fixed_bytes=record.fixed_bytes + beside,
        image_bytes=int(share * record.image_bytes),
        num_images=num_images,
        max_microbatches=microbatches,
        may_change_precision=config.mixed_precision == "auto",
        is_halved=record.to_bfloat16 and config.mixed_precision in ("auto", "bfloat16"),
        recomputed_fixed_bytes=record.recomputed_fixed_bytes + beside,
        recomputed_image_bytes=recomputed_image_bytes,
        recompute_problem=problem if may_recompute else None,
        may_ask_to_recompute=not is_settled,
        may_divide=setup.trains_module and part is None,
    )


def _ample(limit: Limit, setup: Setup) -> str:
    """Why it is, with the numbers; empty if it is not, or if the user has set the limit."""
    pixels = math.prod(setup.config.augment.shape_of(setup.of_dataset.manifest.normalize.image_shape_HWC))
    num_images = images_at_once(setup)
    pixel_bytes = 4 * pixels * num_images
    if setup.config.memory.budget_bytes or AMPLE * pixel_bytes > bytes_of_a_rank(limit, setup):
        return ""
    of_step = f"the {num_images} images of a step take {size_of(pixel_bytes)}"
    return f"{of_step}: {_available(limit, setup)} hold more than {AMPLE:,} times as much"


def _available(limit: Limit | MemoryRecord, setup: Setup) -> str:
    return f"{size_of(bytes_of_a_rank(limit, setup))} ({limit.device})"


def model_size(store: Store, checkpoint: str) -> str:
    """Return the size of the model, from the files of a checkpoint; empty if they no longer exist."""
    try:
        found = open_checkpoint(store, checkpoint)
    except ShardmillError:
        return ""
    all_bytes = sum(file.size_bytes for file in found.marker.files)
    return f"trained weights take {size_of(weight_bytes(found))}, {size_of(all_bytes)} with the optimizer's state"
