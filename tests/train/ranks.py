"""Trainings on several forked ranks, whole or killed in the middle, and what is seen of them (no tests here)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.loader.reader import read_batches
from tests.lab.scale import exhaustive, usually
from tests.train.forked_ranks import launch_forked
from tests.train.multi_rank_workers import KILL_AT
from tests.train.training import MODELS, DriverRecorder, Recorder, task_of
from train.checkpoints.arrays import INDEX, MARKER, OPTIMIZER, WEIGHTS, rank_file
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, shard_file
from train.config import TrainConfig
from train.contracts.values import BEFORE_CHECKPOINT, TrainResult
from train.launching.rank_failures import RankLost
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES, mesh_of

WORKERS = "tests.train.multi_rank_workers"
TORCH_MODELS = "tests.train.torch_models"
STATEFUL_MODEL = {"keras": f"{MODELS}:stateful", "torch": f"{TORCH_MODELS}:stateful"}
# PyTorch's does not use all of its weights in every step, on no rank or on some.
SMOOTH_MODEL = {"keras": f"{MODELS}:smooth", "torch": f"{TORCH_MODELS}:routed"}
ORDINARY_MODEL = {"keras": "tests.train.models_under_test:relu_cnn", "torch": f"{TORCH_MODELS}:relu_cnn"}

STATEFUL = {"checkpoint_every_steps": 2, "num_streams": 6, "global_batch_size": 24, "record_samples": True,
            "epochs": 3}  # fmt: skip
# Smoothed labels keep the loss from 0, where a relative bound means nothing. What is evaluated are averages of weights;
# losses of steps are those of the weights themselves.
LONG = {"num_streams": 12, "global_batch_size": 24, "epochs": usually(4, 27), "label_smoothing": 0.1,
        "record_samples": True, "checkpoint_every_steps": 5, "ema_decay": 0.9}  # fmt: skip
VIT: dict[str, Any] = {
    "model": f"{TORCH_MODELS}:tiny_vit", "num_streams": 12, "global_batch_size": 24, "epochs": 3,
    "label_smoothing": 0.1, "record_samples": True, "checkpoint_every_steps": 3, "gradient_clip_norm": 1.0,
}  # fmt: skip

SERVED = {
    "strategy": "parameter_server", "launcher": "local", "num_workers": 2,
    "parameter_server": {"num_servers": 2}, "num_streams": 6,
    "global_batch_size": 12, "epochs": 6, "model": f"{MODELS}:counting", "learning_rate": 0.003, "record_samples": True,
    "checkpoint_every_steps": 3,
}  # fmt: skip

# What makes a strategy do what others do not.
OF_STRATEGY: dict[str, dict[str, Any]] = {
    "local_sgd": {"local_sgd": {"local_steps": 2}, "ema_decay": 0.9},
    # Several buckets: in which place a value lies decides the order in which three ranks are added.
    "torch_ddp": {"ema_decay": 0.9, "bucket_bytes": 2000},
}


def stateful(strategy: str) -> dict[str, Any]:
    model = STATEFUL_MODEL[STRATEGIES[strategy].backends[0]]
    if "pipeline" in STRATEGIES[strategy].axes:
        # Stages take no batch norm.
        model = "tests.train.sharded_models:stateful_chain"
    # Where the model has batch norms; the others keep statistics of their own.
    shared = {"sync_batch_norm": strategy == "horovod"}
    return {**STATEFUL, **OF_STRATEGY.get(strategy, {}), **shared, "strategy": strategy, "model": model}


def usually_of(usual: set[str], names: Iterable[str]) -> list[object]:
    """For `parametrize`: all names, of which `make test` and `make drill` try the usual ones."""
    # What is not among them cannot run here.
    assert usual - set(names) <= set(STRATEGIES) - set(STRATEGIES.installed())
    return [name if name in usual else exhaustive(name, id=name) for name in names]


@dataclass
class Watcher(DriverRecorder):
    before_checkpoint: set[tuple[int, int]] = field(default_factory=set)
    """The steps that were told before the last checkpoint counted."""

    def step(self, step: GlobalStep) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert {report.loss_hex for report in step.reports} == {step.loss_hex}, "every rank has the same global loss"
        super().step(step)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        super().event(name, fields)
        if name == BEFORE_CHECKPOINT:
            self.before_checkpoint = set(self.losses)


def train_on_ranks(
    uri: str, models: Path, world_size: int, config: dict[str, Any], worker: str = "every_rank_reports_its_weights"
) -> tuple[TrainResult, Watcher]:
    task = task_of(uri, models, num_workers=world_size, launcher="local", **config)
    watcher = Watcher()
    result = launch_forked(task, watcher, f"{WORKERS}:{worker}")
    told = {(models / "told" / f"rank-{rank}").read_text() for rank in range(world_size)}
    assert told == {result.weights_sha256}, "every rank ends with the same weights and moving statistics"
    return result, watcher


def kill_on_ranks(uri: str, models: Path, world_size: int, config: dict[str, Any], killed_at: int) -> Watcher:
    """The same training, but the last rank is killed in the middle of global step `killed_at`."""
    task = task_of(uri, models, num_workers=world_size, launcher="local", **config)
    watcher = Watcher()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(KILL_AT, str(killed_at))
        # The driver may not have heard of the signal yet.
        with pytest.raises(RankLost, match=f"rank {world_size - 1} .*(SIGKILL|killed by an unknown signal)") as lost:
            launch_forked(task, watcher, f"{WORKERS}:last_rank_dies")
    # Not another death, before the one that is meant.
    num_steps, last = watcher.steps[-1].num_steps, lost.value.last_step
    assert last is not None and last.epoch * num_steps + last.step == killed_at - 1
    return watcher


def numbers(losses: dict[tuple[int, int], str]) -> dict[tuple[int, int], float]:
    return {step: float.fromhex(loss) for step, loss in losses.items()}


def ids_of(recorder: Recorder) -> dict[tuple[int, int], tuple[str, ...]]:
    return {(report.epoch, report.step): report.sample_ids for report in recorder.steps}


def files_of_checkpoint(config: TrainConfig, num_replicas: int = 0) -> set[str]:
    """Ranks that compute the same layers with the same rows have one state of their own, which the first of them
    writes."""
    ranks, mesh = range(num_replicas or config.num_workers), mesh_of(config)
    own = {rank_file(rank) for rank in ranks if mesh.shape.place(rank)["tensor"] == 0}
    if STRATEGIES[config.strategy].needs_module:
        shards = {shard_file(part, rank) for part in (WEIGHTS_PART, OPTIMIZER_PART) for rank in ranks}
        return {MARKER, INDEX, *own, *shards}
    return {MARKER, WEIGHTS, OPTIMIZER, *own}


def assert_weights_close(found: list[np.ndarray], expected: list[np.ndarray]) -> None:
    for several, one in zip(found, expected, strict=True):
        # Some gradients are rounding alone, as those of the biases of attention's keys.
        assert np.linalg.norm(several - one) <= 1e-5 * np.linalg.norm(one) + 1e-7


def planned(uri: str, config: TrainConfig) -> dict[tuple[int, int], tuple[str, ...]]:
    """The sample ids of every step, as the plan has them."""
    dataset, config = open_dataset(uri), resolve(config, SparkConfig()).config
    found = {}
    for epoch in range(config.epochs):
        with read_batches(dataset, dataset.plan_epoch(config.plan_spec(dataset), epoch)) as batches:
            for batch in batches:
                ids = batch.sample_ids_N[batch.weights_N > 0].tolist()
                found[epoch, batch.step] = tuple(map(format_sample_id, ids))
    return found
