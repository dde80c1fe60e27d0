"""Steps of two ranks that exchange gradients: ours, a hand-written loop, and the same two processes without exchange.

    .venv/bin/python benchmarks/coupled_ranks.py --strategy horovod
    .venv/bin/python benchmarks/coupled_ranks.py --strategy torch_ddp --compression bf16
    .venv/bin/python benchmarks/coupled_ranks.py --bucket-bytes 4194304 --model resnet50 --parts 1
    .venv/bin/python benchmarks/coupled_ranks.py --strategy torch_ddp --beside compression=bf16 --parts 1

The contestants take turns in the same two processes, in blocks of steps that both ranks begin together; what counts is
rank 0's wall time of a block, and on a busy machine its CPU time. By hand: under Horovod one allreduce for each
gradient, as its first guide shows; under PyTorch DistributedDataParallel. Uncoupled: each process trains for itself,
which two processes on one machine cannot beat. `accumulated`, in two processes of its own: ours with 8 parts to one
exchange (`--parts`), beside 8 uncoupled steps. A model of one's own (`--model`) has no contestant by hand. `--beside`
adds ours with another setting of the training, in the process group of the first (`torch_ddp`). More `--blocks` make
the medians surer.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.training_step import NUM_CLASSES, SHAPE, SPEC, SilentReporter, torch_net
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.values import Batch, DatasetPin
from train.api import Learner, Member
from train.backends import BACKENDS
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.mesh import Mesh
from train.contracts.task import WorkerTask
from train.contracts.values import ModelIdentity, Reporter, TimeShares, TrainResult
from train.contracts.world import World
from train.launching import LAUNCHERS
from train.planning.checks import check
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES

LOCAL_BATCH_SIZE = 32
NUM_PARTS = 8
STEPS_OF_BLOCK = 8
NUM_RESAMPLES = 2000
ACCUMULATED = "accumulated"
BESIDE = "SHARDMILL_BENCHMARK_BESIDE"
BLOCKS, WITHOUT = "SHARDMILL_BENCHMARK_BLOCKS", "SHARDMILL_BENCHMARK_WITHOUT"
MODELS = {"horovod": "small_cnn", "torch_ddp": "benchmarks.training_step:torch_net"}


def random_batch(num_rows: int, seed: int) -> Batch:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_rows, *SHAPE), dtype=np.uint8)
    labels = rng.integers(0, NUM_CLASSES, num_rows)
    return Batch(images, labels, np.ones(num_rows, np.float32), np.arange(num_rows), 0, 0)


def coupled_step_in_torch(world_size: int) -> Callable[[Batch], object]:
    """DistributedDataParallel, Adam, cross-entropy; in the process group that ours has opened."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(torch_net(SHAPE, NUM_CLASSES))
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step(batch: Batch) -> float:
        images = (torch.from_numpy(batch.images_NHWC).float() - 120.0) / 60.0
        loss = torch.nn.functional.cross_entropy(net(images.permute(0, 3, 1, 2)), torch.from_numpy(batch.labels_N))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def coupled_step_in_keras(world_size: int) -> Callable[[Batch], object]:
    """One `hvd.allreduce` for each gradient, in one tf.function; in the world that ours has joined."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from train.models.small_cnn import small_cnn

    model, optimizer = small_cnn(SHAPE, NUM_CLASSES), keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function
    def compiled(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            outputs = model((tf.cast(images, tf.float32) - 120.0) / 60.0, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs))
        gradients = tape.gradient(loss, variables)
        sums = [hvd.allreduce(each, op=hvd.Average, name=f"by_hand_{n}") for n, each in enumerate(gradients)]
        optimizer.apply(sums, model.trainable_variables)
        return loss

    return lambda batch: float(compiled(tf.constant(batch.images_NHWC), tf.constant(batch.labels_N)))


def join_beside(world: World, config: TrainConfig, learner: Learner, ours: Member) -> Member:
    """Ours with other settings, in the process group that `ours` has opened."""
    from train.strategies.torch_ddp import DdpMember

    data = Mesh.of(config).data_index(world.rank)
    return DdpMember(cast(Any, learner), cast(Any, ours)._collective, data, SilentReporter(), config)


def measure(task: WorkerTask, world: World, reporter: Reporter) -> TrainResult:
    """On each rank: `train.launching.rank.Worker`."""
    name = task.config.strategy
    (backend,) = STRATEGIES[name].backends
    BACKENDS[backend].start(world, task.config.seed)

    def learner(config: TrainConfig) -> Callable[..., Learner]:
        return partial(BACKENDS[backend].build, config, SPEC)

    silent, num_microbatches = SilentReporter(), task.config.accumulation_steps
    at_once = task.config.model_copy(update={"accumulation_steps": 1})
    batch, small = (random_batch(LOCAL_BATCH_SIZE * each, world.rank) for each in (num_microbatches, 1))
    member = STRATEGIES[name].join(world, task.config, learner(task.config), silent)
    member.start({}, 0, "")
    alone = STRATEGIES["single"].join(World(), at_once, learner(at_once), silent)
    alone.start({}, 0, "")
    total = LOCAL_BATCH_SIZE * num_microbatches * world.world_size
    contestants: dict[str, Callable[[], object]] = {
        ACCUMULATED if num_microbatches > 1 else "ours": lambda: member.train_step(batch, total, None),
        "uncoupled": lambda: alone.train_step(small, LOCAL_BATCH_SIZE, None),
    }
    if num_microbatches == 1 and task.config.model == MODELS[name]:
        coupled = {"keras": coupled_step_in_keras, "torch": coupled_step_in_torch}[backend](world.world_size)
        contestants["by hand"] = lambda: coupled(small)
    if BESIDE in os.environ:
        changed = at_once.model_copy(update=json.loads(os.environ[BESIDE]))
        other = join_beside(world, changed, learner(changed)(), member)
        other.start({}, 0, "")
        contestants["beside"] = lambda: other.train_step(small, total, None)
    contestants.pop(os.environ[WITHOUT], None)
    order = list(contestants.items())
    seconds: dict[str, list[float]] = {each: [] for each in contestants}
    cpu_seconds: dict[str, list[float]] = {each: [] for each in contestants}
    for block in range(int(os.environ[BLOCKS]) + 1):
        reporter.doing(Activity(f"block {block}"))
        # Who begins a block changes from block to block.
        first = block % len(order)
        for each, step in order[first:] + order[:first]:
            num_steps = STEPS_OF_BLOCK // (num_microbatches if each == ACCUMULATED else 1)
            member.barrier()
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(num_steps):
                step()
            # Both ranks' share of the work has to be done.
            member.barrier()
            if block:
                seconds[each].append((time.perf_counter() - start) / STEPS_OF_BLOCK)
                cpu_seconds[each].append((time.process_time() - cpu_start) / STEPS_OF_BLOCK)
    for clock, of_clock in (("wall", seconds), ("CPU", cpu_seconds)):
        for each, of_blocks in of_clock.items():
            fields = {"clock": clock, "contestant": each, "seconds": " ".join(map(repr, of_blocks))}
            reporter.event("block_seconds", fields)
    member.barrier()
    member.close()
    return no_training(task, world)


def no_training(task: WorkerTask, world: World) -> TrainResult:
    """What a rank returns that has trained nothing."""
    return TrainResult(
        dataset=task.dataset, training_dir="", exported="last", weights_epoch=0, checkpoint="", last_checkpoint="",
        continued_from="", model=ModelIdentity("", ""), strategy=task.config.strategy, world_size=world.world_size,
        num_epochs=0, num_steps=0, seconds=0.0, images_per_second=0.0, time_shares=TimeShares(), final_loss_hex="",
        weights_sha256="", stopped_early=False, resumed_from=None, history=(), evaluation=None,
    )  # fmt: skip


class Figures:
    """A driver's observer that keeps rank 0's block times."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], list[float]] = {}

    def step(self, step: GlobalStep) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "block_seconds" and fields["rank"] == 0:
            key = str(fields["clock"]), str(fields["contestant"])
            self.seconds[key] = [float(each) for each in str(fields["seconds"]).split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=tuple(MODELS), default="horovod")
    parser.add_argument("--compression", choices=("none", "fp16", "bf16"), default="none", help="of ours")
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of ours; 0: the strategy's own")
    parser.add_argument("--model", default="", help="in place of a small one")
    parser.add_argument("--beside", type=lambda each: each.split("=", 1), help="KEY=VALUE of [train]")
    parser.add_argument("--parts", type=int, nargs="+", default=[1, NUM_PARTS], help="of a step of ours")
    parser.add_argument("--blocks", type=int, default=42, help="of each contestant")
    parser.add_argument("--without", choices=("", "uncoupled", "by hand"), default="", help="leave a contestant out")
    given = parser.parse_args()
    os.environ[BLOCKS], os.environ[WITHOUT] = str(given.blocks), given.without
    settings = {
        "strategy": given.strategy, "compression": given.compression, "bucket_bytes": given.bucket_bytes,
        "model": given.model or MODELS[given.strategy],
    }  # fmt: skip
    if given.beside:
        name, text = given.beside
        value = json.loads(text) if text.isdecimal() else text
        _config({**settings, name: value}, 1)
        os.environ[BESIDE] = json.dumps({name: value})
        sys.stdout.write(f"beside: {name} = {value}\n")
    what = ", ".join(f"{name} {value}" for name, value in settings.items())
    sys.stdout.write(f"{what}, 2 ranks of {LOCAL_BATCH_SIZE} images; medians of {given.blocks} blocks\n")
    for num_microbatches in given.parts:
        ours = ACCUMULATED if num_microbatches > 1 else "ours"
        seconds = _block_seconds(_config(settings, num_microbatches))
        for (clock, name), each in seconds.items():
            median = 1e3 * statistics.median(each)
            sys.stdout.write(f"{name:12s} {median:8.2f} ms of {clock} time for {LOCAL_BATCH_SIZE} images a rank\n")
        for (clock, name), each in seconds.items():
            if name != ours:
                ratios = np.array(each) / np.array(seconds[clock, ours])
                low, high = interval_of_median(ratios)
                sys.stdout.write(
                    f"{clock} time of {name} / {ours}: {np.median(ratios):.3f} (median of the pairs; 90 % of resampled "
                    f"medians are from {low:.3f} to {high:.3f})\n"
                )


def interval_of_median(values: np.ndarray) -> tuple[float, float]:
    """The 5th and the 95th percentile of its bootstrap distribution (Efron, 1979)."""
    resampled = np.random.default_rng(0).choice(values, (NUM_RESAMPLES, len(values)))
    low, high = np.percentile(np.median(resampled, axis=1), (5, 95))
    return float(low), float(high)


def _config(settings: Mapping[str, object], num_microbatches: int) -> TrainConfig:
    """Raises UsageError for what no command would run."""
    config = TrainConfig.model_validate(
        {
            **settings, "launcher": "local", "num_workers": 2, "optimizer": "adam",
            "global_batch_size": 2 * LOCAL_BATCH_SIZE * num_microbatches, "accumulation_steps": num_microbatches,
        }
    )  # fmt: skip
    check(resolve(config, SparkConfig()))
    return config


def _block_seconds(config: TrainConfig) -> dict[tuple[str, str], list[float]]:
    """(clock, contestant) -> its blocks on rank 0."""
    figures = Figures()
    with tempfile.TemporaryDirectory() as scratch:
        task = WorkerTask(config, DatasetPin(Path(scratch).as_uri(), 1, ""), scratch, "t", "")
        LAUNCHERS["local"].launch(task, SparkConfig(), figures, worker="benchmarks.coupled_ranks:measure")
    return figures.seconds


if __name__ == "__main__":
    main()
