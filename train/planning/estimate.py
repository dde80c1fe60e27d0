"""Estimates a training for `shardmill plan`: its choices at a world size, its memory and its speed, before anything
trains.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shardmill.dataset.dataset import Dataset, first_alike, open_dataset, open_pinned
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig, require_uri
from shardmill.memory import free_bytes
from shardmill.words import counted, size_of
from train.backends.model_spec import model_spec
from train.config import TrainConfig
from train.initialization.initial import check_initial
from train.planning.divide import with_room
from train.planning.host_memory import HOST_FRAMEWORK_BYTES, Limit, input_bytes, limit_of, ranks_here
from train.planning.make import plan_training
from train.planning.memory import Memory, measured
from train.planning.memory_fit import Fit, decided
from train.planning.pace import PaceTask, Speed, speed_of
from train.planning.preflight import check_trainable, window_memory
from train.planning.probe import ProbeTask, StepCost, probe
from train.planning.state_bytes import RankParts, StateBytes
from train.strategies import mesh_of
from train.strategies.options import silos_of
from train.tree import TrainTree


@dataclass(frozen=True, slots=True)
class Estimate:
    """The plan of a training and its cost, measured here in one process; no exchange between ranks is predicted."""

    dataset: str
    strategy: str
    launcher: str
    backend: str
    reason: str
    num_workers: int
    steps_per_epoch: int
    global_batch_size: int
    local_batch_size: int
    """Local batch size of the rank with most streams."""
    window_bytes_per_rank: int
    cost: StepCost
    num_dividing: int
    """Number of ranks that compute each step of a model together."""
    speed: Speed
    host: str
    fit: Fit | None
    """Into the memory that a rank may use here; None if that is not known."""
    mesh: dict[str, int]
    """Numbers of ranks along the axes."""

    @property
    def needed_bytes(self) -> int:
        """Memory needed on the device of a rank."""
        return self.cost.state_bytes + self.cost.work_bytes

    def document(self) -> dict[str, Any]:
        """The document of `--json`."""
        return {
            **asdict(self),
            "needed_bytes": self.needed_bytes,
            "images_per_second": self.speed.images_per_second,
        }

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
            ("step", f"{whole / parts:.1f} ms computation{of_whole} (measured on {self.host})"),
            ("speed", str(self.speed)),
            *([("fit", self.fit.reason)] if self.fit else []),
        ]  # fmt: skip


def estimate_training(tree: TrainTree) -> Estimate:
    """Plan, check and measure. Raises UsageError for what cannot run."""
    dataset = open_pinned(first_alike(open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin))
    plan = with_room(plan_training(tree.train, tree.spark, dataset), tree.spark, dataset)
    config = plan.config
    check_initial(config)
    check_trainable(config, dataset)
    # Before the step is measured: it refuses what cannot run.
    windows, mesh = window_memory(config, dataset), mesh_of(config).shape
    local_batch_size = mesh_of(config).largest_share(config.global_batch_size)
    paced = PaceTask(decided(config, 1, to_bfloat16=False), dataset.pin, max(1, ranks_here(config, tree.spark)))
    # The same rank with random images, whose bytes and seconds are counted.
    spec = model_spec(dataset.manifest, paced.config)
    part_of = RankParts(lambda config: model_spec(dataset.manifest, config))
    _check_host(paced.config, part_of.whole_of(config), local_batch_size)
    cost = probe(ProbeTask(paced.config, spec, local_batch_size, paced.ranks_per_node))
    epoch = dataset.plan_epoch(config.plan_spec(dataset), 0)
    return Estimate(
        dataset=f"{dataset.pin.uri}@{dataset.pin.version}",
        strategy=config.strategy,
        launcher=config.launcher,
        backend=config.backend,
        reason="; ".join((plan.reason, *plan.warnings)),
        num_workers=config.num_workers,
        steps_per_epoch=epoch.num_steps,
        global_batch_size=config.global_batch_size,
        local_batch_size=local_batch_size,
        window_bytes_per_rank=windows.bytes_per_rank,
        cost=cost,
        num_dividing=mesh.num_dividing,
        speed=speed_of(paced, epoch, mesh, cost),
        host=socket.gethostname(),
        fit=_fit(limit_of(config, tree.spark), tree.spark, config, dataset, part_of),
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


def _fit(
    limit: Limit | None, spark: SparkConfig, config: TrainConfig, dataset: Dataset, part_of: RankParts
) -> Fit | None:
    """By a measurement of its own, as the training will make it: where seconds count, bytes are not exact."""
    if limit is None or silos_of(config):
        return None
    record = measured(limit, config, dataset, spark, input_bytes(config, dataset), part_of(config))
    return Memory(record, spark, partial(input_bytes, dataset=dataset), part_of=part_of).fitted(config).fit
