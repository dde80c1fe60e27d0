"""Estimates a training for `shardmill plan`: its choices at a world size, its memory and its speed, before anything
trains. The process that times some steps runs this module, too.
"""

from __future__ import annotations

import math
import os
import socket
import time
from dataclasses import asdict, astuple, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardmill.calls.results import PlannedTraining
from shardmill.dataset.dataset import open_pinned
from shardmill.errors import TrainingError, UsageError
from shardmill.loader.reader import read_batches
from shardmill.memory import free_bytes
from shardmill.values import DatasetPin
from shardmill.words import counted, size_of
from train.backends import BACKENDS
from train.backends.model_spec import model_spec
from train.config import TrainConfig
from train.contracts.row_source import evaluation_spec, reader_options
from train.contracts.values import to_json
from train.contracts.world import World
from train.labels import LabelSpec
from train.launching.rank_failures import FIX
from train.launching.side_process import Question, answer, ask
from train.metrics.evaluate import metrics_of, scores_by
from train.planning.checks import window_memory
from train.planning.memory import HOST_FRAMEWORK_BYTES, look_at_memory
from train.planning.memory_fit import Fit, decided
from train.planning.probe import ProbeTask, StepCost, probe
from train.planning.shard import begun_setup
from train.planning.state_bytes import RankParts, StateBytes, spec_of
from train.planning.trainings import training_to_plan
from train.readers import reader_of
from train.readers.planned import Epochs
from train.strategies import has_chief, mesh_of
from train.strategies.options import silos_of
from train.tree import TrainTree

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardmill.dataset.dataset import Dataset
    from shardmill.epoch_plan import EpochPlan
    from train.api import Learner
    from train.contracts.mesh import MeshShape

MEASURED_SECONDS = 6.0
"""Duration of measured steps, over as many epochs as needed; the same limit applies to validation."""
CACHED_SECONDS = 2.0
"""Duration of measured steps on a batch in memory."""
MIN_STEPS = 3
PREFETCHED_BATCHES = 2
"""A full queue would feed the few measured steps faster than the reader can fill it."""


COUNTED = (
    "including reading, augmentation, the compilation of the first step and validation; excluding the start of the "
    "ranks, their exchanges and waits for each other, checkpoints, the final evaluation and the export"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate(PlannedTraining):
    """The plan of a training and its cost, measured here in one process; no exchange between ranks is predicted."""

    window_bytes_per_rank: int
    cost: StepCost
    num_dividing: int
    """Number of ranks that compute each step of a model together."""
    speed: Speed
    fit: Fit | None
    """Into the memory that a rank may use here, as the training will find it; None if it will not look."""
    fit_reason: str
    """Why it fits so, or need not be looked at; empty if that is not known."""
    mesh: dict[str, int]
    """Numbers of ranks along the axes."""

    def document(self) -> dict[str, Any]:
        """The document of `--json`."""
        return asdict(self)

    def rows(self) -> list[tuple[str, str]]:
        """The rows for people."""
        cost, parts = self.cost, self.num_dividing
        whole = 1000 * cost.step_seconds
        of_whole = f", a part of {parts} of the {whole:.1f} ms of one rank" if parts > 1 else ""
        return [
            ("dataset", self.dataset),
            ("choice", f"{counted(self.num_workers, 'worker')}, backend {self.backend}; {self.reason}"),
            ("batch", f"{self.global_batch_size} images a step, at most {self.local_batch_size} on a rank; "
             f"{self.steps_per_epoch:,} steps an epoch"),
            ("model", (
                f"{cost.num_weights:,} weights, {size_of(cost.model_bytes)}; trainable weights "
                f"{size_of(cost.weights_bytes)}"
            )),
            ("memory", (
                f"{size_of(cost.state_bytes)} of state and {size_of(cost.work_bytes)} for a step on a rank's device; "
                f"{size_of(self.window_bytes_per_rank)} of read windows in its host's memory"
            )),
            ("step", f"{whole / parts:.1f} ms for random images, without other ranks{of_whole} (measured on "
             f"{self.host})"),
            ("speed", str(self.speed)),
            *([("fit", self.fit_reason)] if self.fit_reason else []),
        ]  # fmt: skip


def estimate_training(tree: TrainTree) -> Estimate:
    """Plan, check and measure. Raises UsageError for what cannot run."""
    found = training_to_plan(tree)
    setup = begun_setup(found)
    config, dataset, mesh = setup.config, setup.of_dataset, setup.mesh.shape
    local_batch_size = setup.mesh.largest_share(config.global_batch_size)
    paced = PaceTask(decided(config, 1, to_bfloat16=False), dataset.pin, max(1, setup.num_ranks_here))
    # The same rank with random images, whose bytes and seconds are counted.
    part_of = RankParts()
    _check_host(paced.config, part_of.whole_of(setup), local_batch_size)
    cost = probe(ProbeTask(paced.config, spec_of(setup), local_batch_size, paced.ranks_per_node))
    epoch = dataset.plan_epoch(config.plan_spec(dataset, setup.mesh.streams), 0)
    speed = speed_of(paced, epoch, mesh, cost)
    fitted = look_at_memory(setup, part_of, begun=found.begun, has_begun=found.has_steps).fitted(setup)
    return Estimate(
        dataset=f"{dataset.pin.uri}@{dataset.pin.version}",
        strategy=config.strategy,
        launcher=config.launcher,
        backend=config.backend,
        reason="; ".join((setup.reason, *setup.warnings)),
        num_workers=config.num_workers,
        steps_per_epoch=epoch.num_steps,
        global_batch_size=config.global_batch_size,
        local_batch_size=local_batch_size,
        window_bytes_per_rank=window_memory(setup).bytes_per_rank,
        cost=cost,
        num_dividing=mesh.num_dividing,
        needed_bytes=cost.state_bytes + cost.work_bytes,
        images_per_second=speed.images_per_second,
        speed=speed,
        host=socket.gethostname(),
        fit=fitted.fit,
        fit_reason=fitted.reason,
        mesh=mesh.sizes,
    )


def _check_host(config: TrainConfig, whole: StateBytes | None, local_batch_size: int) -> None:
    """Raises UsageError if a model is known to be too large for the process that times its step here."""
    if whole is None:
        return
    free, num_images = free_bytes(Path("/")), -(-local_batch_size // config.num_accumulated)
    of_model = HOST_FRAMEWORK_BYTES + whole.state + whole.step
    needed = of_model + num_images * whole.image
    if free and needed > free:
        of_fewer = "set train.accumulation_steps; " if of_model + whole.image < free else ""
        raise UsageError(
            f"a step of train.model = {config.model!r} takes {size_of(needed)}, and this host has {size_of(free)} free",
            f"expected memory for the whole model and {num_images} images: plan times such a step in one process",
            "run shardmill plan with --memory SIZE, which counts what each rank would hold and builds nothing; "
            f"{of_fewer}or plan on a larger host",
        )


@dataclass(frozen=True, slots=True)
class PaceTask:
    """The training whose rank 0 is timed."""

    config: TrainConfig
    """Without `auto`."""
    dataset: DatasetPin
    ranks_per_node: int
    """Ranks that will share this machine's cores."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What a rank computes of a model that several compute together."""

    step: float = 1.0
    validation: float = 1.0
    """With the time in which the stages of a pipeline wait."""

    @classmethod
    def of(cls, mesh: MeshShape) -> Shares:
        # A batch goes through P stages in P parts, which takes 2 P - 1 of them.
        in_turn = (2 * mesh.pipeline - 1) / mesh.pipeline**2
        return cls(1 / mesh.num_dividing, in_turn / mesh.tensor)


WHOLE = Shares()


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds of one rank with its real input, on its share of the machine."""

    compile_seconds: float
    """Time of the first step beyond that of the second."""
    step_seconds: float
    """Mean of a step, with the wait for its batch and its share of the start of an epoch."""
    input_wait_seconds: float
    """Part of it that is spent waiting for the batch."""
    cached_step_seconds: float
    """Mean of a step on a batch that is in memory, while nothing is read: what a step would take if input cost
    nothing. It is less than a step without its wait, because readers compute on the same cores."""
    first_validation_seconds: float = 0.0
    """Time of the first validation batch beyond that of the others, because the model's outputs are compiled then."""
    validation_seconds: float = 0.0
    """Time of this rank's validation batches after each epoch; 0 without a validation split."""
    validation_computing_seconds: float = 0.0
    """Part of it that is computation; for the rest a batch was waited for."""

    def among(self, num_ranks: int, num_processors: int) -> Pace:
        """As it is if so many ranks run on so many processors: where they are more, they take turns."""
        return Pace(*(each * max(1.0, num_ranks / num_processors) for each in astuple(self)))

    @property
    def input_share(self) -> float:
        """Part of a step that its input costs."""
        return max(0.0, 1 - self.cached_step_seconds / self.step_seconds)

    def training_seconds(self, num_epochs: int, steps_per_epoch: float, shares: Shares = WHOLE) -> float:
        """Return the time of so many epochs, counted like `train.seconds` but without checkpoints and exchanges.

        `shares`: of the computation; all ranks read.
        """
        computing = min(self.step_seconds, self.cached_step_seconds)
        step_seconds = self.step_seconds - (1 - shares.step) * computing
        validation_seconds = self.validation_seconds - (1 - shares.validation) * self.validation_computing_seconds
        epoch_seconds = steps_per_epoch * step_seconds + validation_seconds
        return self.compile_seconds + num_epochs * epoch_seconds + self.first_validation_seconds


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of a training if every rank is as fast as the measured one."""

    num_epochs: int
    num_rows: int
    """Number of rows of the train split."""
    computed_images_per_second: float
    """Speed of computation alone."""
    pace: Pace | None
    """The pace; None with silos, each of which reads its own dataset."""
    training_seconds: float | None
    """Time of all epochs, as defined by `COUNTED`; None without a pace."""

    @property
    def images_per_second(self) -> float:
        """Speed of the whole training; with silos, of computation alone."""
        if self.training_seconds is None:
            return self.computed_images_per_second
        return self.num_epochs * self.num_rows / self.training_seconds

    def __str__(self) -> str:
        speed = f"{self.images_per_second:,.0f} images/s"
        if self.training_seconds is None or self.pace is None:
            return f"{speed} for computation only, excluding reading, augmentation, validation and exchanges"
        pace = self.pace
        step, wait, cached = (
            1000 * each for each in (pace.step_seconds, pace.input_wait_seconds, pace.cached_step_seconds)
        )
        epochs = f"{self.num_epochs} epoch(s) in {timedelta(seconds=round(self.training_seconds))}"
        return (
            f"{speed}, {epochs}, {COUNTED}; of a rank beside the others, a step with its input takes {step:.1f} ms "
            f"(waiting for the batch: {wait:.1f} ms), and one on a batch kept in memory {cached:.1f} ms: input costs "
            f"{max(0.0, step - cached):.1f} of {step:.1f} ms, {pace.input_share:.0%}"
        )


def speed_of(task: PaceTask, epoch: EpochPlan, mesh: MeshShape, cost: StepCost) -> Speed:
    """Measure the pace of a rank, and what follows for all epochs. `cost`: of the whole model. Raises what `pace_of`
    raises."""
    config = task.config
    # Each worker of a parameter server takes a whole batch of its own.
    batches_at_once = config.num_workers if has_chief(config) else 1
    computed = config.global_batch_size * batches_at_once * mesh.num_dividing / cost.step_seconds
    pace = None if silos_of(config) else pace_of(task)
    steps_in_turn = epoch.num_steps / batches_at_once
    seconds = pace.training_seconds(config.epochs, steps_in_turn, Shares.of(mesh)) if pace else None
    return Speed(config.epochs, epoch.num_rows, computed, pace, seconds)


def pace_of(task: PaceTask) -> Pace:
    """Measure it in a process of its own, while no other rank runs; what follows for the ranks that share this machine.

    Raises what building the model and reading raise (UsageError, IntegrityError, StorageError), else TrainingError.
    """
    pace = ask(Question("train.planning.estimate", to_json(task), {}, timeout_seconds=None), Pace, _not_measured)
    return pace.among(task.ranks_per_node, len(os.sched_getaffinity(0)))


def _not_measured(how: str) -> TrainingError:
    return TrainingError(f"the process that measured some steps with their input {how}", fix=FIX)


def measure_on_share(task: PaceTask) -> Pace:
    """Measure in this process, on the processors that are left to a rank and its readers beside the other ranks."""
    processors = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, processors[: max(1, len(processors) // task.ranks_per_node)])
    return measure(replace(task, ranks_per_node=1))


def measure(task: PaceTask) -> Pace:
    """Measure in this process, with a fresh framework."""
    dataset = open_pinned(task.dataset)
    batch_bytes = task.config.global_batch_size * math.prod(
        task.config.augment.shape_of(dataset.manifest.normalize.image_shape_HWC)
    )
    prefetch_bytes = min(task.config.reading.prefetch_bytes, PREFETCHED_BATCHES * batch_bytes)
    reading = task.config.reading.model_copy(update={"prefetch_bytes": prefetch_bytes})
    config = task.config.model_copy(update={"reading": reading})
    backend = BACKENDS[config.backend]
    backend.start(World(ranks_per_node=task.ranks_per_node), config.seed)
    learner = backend.build(config, model_spec(dataset.manifest, config))
    compile_seconds = _measure_compilation(learner, config, dataset)
    step_seconds, wait_seconds = _measure_steps(learner, config, dataset)
    cached_seconds = _measure_cached_steps(learner, config, dataset)
    validation = _measure_validation(learner, config, dataset) if "validation" in dataset.manifest.splits else ()
    return Pace(compile_seconds, step_seconds, wait_seconds, cached_seconds, *validation)


def _measure_compilation(learner: Learner, config: TrainConfig, dataset: Dataset) -> float:
    """Measure the time of the first of two steps on one batch beyond that of the second."""
    step = _step_on_one_batch(learner, config, dataset)
    first, second = step(), step()
    return max(0.0, first - second)


def _measure_cached_steps(learner: Learner, config: TrainConfig, dataset: Dataset) -> float:
    """-> mean seconds of a step on a batch in memory."""
    step = _step_on_one_batch(learner, config, dataset)
    seconds = []
    while len(seconds) < MIN_STEPS or sum(seconds) < CACHED_SECONDS:
        seconds.append(step())
    return sum(seconds) / len(seconds)


def _step_on_one_batch(learner: Learner, config: TrainConfig, dataset: Dataset) -> Callable[[], float]:
    """-> a step on the first batch, which returns its seconds. Nothing is read any more."""
    epoch = _epochs(config, dataset)[0]
    share = mesh_of(config).data_index(0).fraction
    with epoch.read(0) as batches:
        batch = next(iter(batches))

    def step() -> float:
        started = time.perf_counter()
        learner.apply(learner.gradients(batch, epoch.num_rows_of_step(0), share), None)
        return time.perf_counter() - started

    return step


def _epochs(config: TrainConfig, dataset: Dataset) -> Epochs:
    return Epochs(reader_of(config), dataset, config, mesh_of(config).data_index(0))


def _measure_steps(learner: Learner, config: TrainConfig, dataset: Dataset) -> tuple[float, float]:
    """-> mean seconds of a step, mean seconds that it waited for its batch."""
    epochs = _epochs(config, dataset)
    share = mesh_of(config).data_index(0).fraction
    num_steps, wait_seconds, started = 0, 0.0, time.perf_counter()
    for number in range(config.epochs):
        epoch = epochs[number]
        with epoch.read(0) as batches:
            before = time.perf_counter()
            for step, batch in enumerate(batches):
                wait_seconds += time.perf_counter() - before
                learner.apply(learner.gradients(batch, epoch.num_rows_of_step(step), share), None)
                num_steps, before = num_steps + 1, time.perf_counter()
                if num_steps >= MIN_STEPS and before - started > MEASURED_SECONDS:
                    return (before - started) / num_steps, wait_seconds / num_steps
    return (time.perf_counter() - started) / num_steps, wait_seconds / num_steps


def _measure_validation(learner: Learner, config: TrainConfig, dataset: Dataset) -> tuple[float, float, float]:
    """-> seconds that compilation added to the first batch, seconds of all batches of the rank, part of these that it
    computes."""
    plan = dataset.plan_epoch(evaluation_spec(dataset, config, "validation"), 0)
    labels = LabelSpec.of(dataset.manifest)
    metrics, scores_of = metrics_of(labels), scores_by(learner.outputs, labels.kind, learner.outputs_are_logits)
    seconds, waits = [], []
    streams, augment = mesh_of(config).data_index(0).streams, config.augment.unchanged
    options = reader_options(config, dataset, plan.spec)
    with read_batches(dataset, plan, streams=streams, options=options, augment=augment) as batches:
        before = time.perf_counter()
        for batch in batches:
            waits.append(time.perf_counter() - before)
            metrics.add(scores_of(batch.images_NHWC), batch)
            after = time.perf_counter()
            seconds.append(after - before)
            before = after
            if len(seconds) > MIN_STEPS and sum(seconds[1:]) > MEASURED_SECONDS:
                break
    mean_seconds, mean_wait = (
        sum(each[1:]) / (len(each) - 1) if len(each) > 1 else each[0] for each in (seconds, waits)
    )
    computing = plan.num_steps * (mean_seconds - mean_wait)
    return max(0.0, seconds[0] - mean_seconds), plan.num_steps * mean_seconds, computing


if __name__ == "__main__":
    answer(PaceTask, measure_on_share)
