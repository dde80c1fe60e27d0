"""Estimates a training for `shardmill plan`: its choices at a world size, its memory and its speed, before anything
trains.
"""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import first_alike, open_dataset, open_pinned
from shardmill.jobs.config import SparkConfig, require_uri
from shardmill.words import counted
from train.backends.backend import model_spec
from train.config import TrainConfig
from train.initialization.initial import check_initial
from train.planning.divide import with_room
from train.planning.division import Divisions
from train.planning.exchange import ExchangeFacts, Weighed, weigh
from train.planning.host_memory import Limit, limit_of, ranks_here
from train.planning.input_memory import input_bytes
from train.planning.make import plan_training
from train.planning.memory import Memory, measured
from train.planning.memory_fit import Fit, decided, size_of
from train.planning.pace import PaceTask, Speed, speed_of
from train.planning.preflight import check_trainable, window_memory
from train.planning.probe import ProbeTask, StepCost, probe
from train.strategies import has_chief, mesh_of
from train.strategies.options import silos_of
from train.tree import TrainTree


@dataclass(frozen=True, slots=True)
class Estimate:
    """The plan of a training and its cost. Seconds and work are measured here; the rest is arithmetic."""

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
    exchange_seconds: float
    """One allreduce of all gradients, as they travel, at the given bandwidth, 0 for one worker; with servers, what one
    worker reads and sends."""
    speed: Speed
    host: str
    fit: Fit | None
    """Into the memory that a rank may use here; None if that is not known."""
    exchange: Weighed | None
    """Share of the exchange in a step; None for one worker, and with servers."""

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
        cost = self.cost
        exchange = f", exchange {1000 * self.exchange_seconds:.1f} ms (of {size_of(cost.sent_bytes)})"
        exchange = exchange if self.exchange_seconds else ""
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
            ("step", f"{1000 * cost.step_seconds:.1f} ms computation{exchange} (measured on {self.host})"),
            ("speed", str(self.speed)),
            *([("fit", self.fit.reason)] if self.fit else []),
            *([("exchange", self.exchange.reason)] if self.exchange else []),
        ]  # fmt: skip


def estimate_training(tree: TrainTree, network_gbit: float = 10.0) -> Estimate:
    """Plan, check and measure. Raises UsageError for what cannot run."""
    dataset = open_pinned(first_alike(open_dataset(require_uri("dataset.uri", tree.dataset.uri)).pin))
    plan = with_room(plan_training(tree.train, tree.spark, dataset), tree.spark, dataset)
    config = plan.config
    check_initial(config)
    check_trainable(config, dataset)
    # Before the step is measured: it refuses what cannot run.
    windows = window_memory(config, dataset)
    local_batch_size = mesh_of(config).largest_share(config.global_batch_size)
    paced = PaceTask(decided(config, 1, to_bfloat16=False), dataset.pin, max(1, ranks_here(config, tree.spark)))
    # The same rank with random images, whose bytes and seconds are counted.
    spec = model_spec(dataset.manifest, paced.config)
    cost = probe(ProbeTask(paced.config, spec, local_batch_size, paced.ranks_per_node))
    exchange_seconds = _exchange_seconds(config, cost.sent_bytes, network_gbit)
    epoch = dataset.plan_epoch(config.plan_spec(dataset), 0)
    return Estimate(
        dataset=f"{dataset.pin.uri}@{dataset.pin.version}",
        strategy=config.strategy,
        launcher=config.launcher,
        backend=config.backend,
        reason=plan.reason,
        num_workers=config.num_workers,
        steps_per_epoch=epoch.num_steps,
        global_batch_size=config.global_batch_size,
        local_batch_size=local_batch_size,
        window_bytes_per_rank=windows.bytes_per_rank,
        cost=cost,
        exchange_seconds=exchange_seconds,
        speed=speed_of(paced, epoch, cost, exchange_seconds),
        host=socket.gethostname(),
        fit=_fit(limit_of(config, tree.spark), tree.spark, config, dataset),
        exchange=_weighed(config, cost, exchange_seconds, network_gbit),
    )


def _fit(limit: Limit | None, spark: SparkConfig, config: TrainConfig, dataset: Dataset) -> Fit | None:
    """By a measurement of its own, as the training will make it: where seconds count, bytes are not exact."""
    if limit is None or silos_of(config):
        return None
    division = Divisions(lambda config: model_spec(dataset.manifest, config))
    record = measured(limit, config, dataset, spark, input_bytes(config, dataset), division(config))
    return Memory(record, spark, partial(input_bytes, dataset=dataset), division=division).fitted(config).fit


def _exchange_seconds(config: TrainConfig, num_bytes: int, network_gbit: float) -> float:
    if not has_chief(config):
        return exchange_time(num_bytes, config.num_workers, network_gbit)
    return 2 * transfer_time(num_bytes, network_gbit)


def _weighed(config: TrainConfig, cost: StepCost, exchange_seconds: float, network_gbit: float) -> Weighed | None:
    """None if no gradients are exchanged."""
    if config.num_workers == 1 or has_chief(config):
        return None
    step_seconds = cost.step_seconds + exchange_seconds
    sent = size_of(cost.sent_bytes)
    how = f"computed for {sent} at {network_gbit:g} Gbit/s, without overlap with computation"
    return weigh(ExchangeFacts(step_seconds, exchange_seconds, config.num_workers, how))


def exchange_time(num_bytes: int, world_size: int, network_gbit: float) -> float:
    """Seconds of a ring allreduce: each rank sends 2 (N - 1) / N of the data (Patarasuk and Yuan, 2009)."""
    return 2 * (world_size - 1) / world_size * transfer_time(num_bytes, network_gbit)


def transfer_time(num_bytes: int, network_gbit: float) -> float:
    """Seconds for the bytes at that many Gbit/s."""
    return num_bytes * 8 / (network_gbit * 1e9)
