"""Compares one training step of shardmill with a hand-written one of the same model, optimizer and batches, in CPU
seconds.

    .venv/bin/python benchmarks/training_step.py --backend torch
    .venv/bin/python benchmarks/training_step.py --backend keras

Steps of the two are interleaved in one process and one world of one rank, so that they meet the same noise; both start
from the same kind of model. Ours goes through learner, member and collective as in a training; the other is what
PyTorch's and Horovod's guides show, with the loss of every sample weighted as padding needs it.
"""

# pyright: reportAttributeAccessIssue=false
from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import numpy as np

from shardmill.jobs.observer import SilentObserver
from shardmill.values import Batch
from train.backends import BACKENDS
from train.backends.model_spec import InputScale, ModelSpec
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.values import StepReport
from train.contracts.world import World
from train.labels import LabelSpec
from train.strategies import STRATEGIES

SHAPE = (64, 64, 3)
NUM_CLASSES = 10
SPEC = ModelSpec(SHAPE, LabelSpec("class", tuple(map(str, range(NUM_CLASSES)))), InputScale((120.0,) * 3, (60.0,) * 3))


class SilentReporter(SilentObserver):
    """Takes everything, and keeps nothing."""

    def step(self, report: StepReport) -> None:
        return

    def doing(self, activity: Activity) -> Activity:
        return activity


def torch_net(image_shape: tuple[int, int, int], num_classes: int) -> object:
    """What both train under PyTorch."""
    from torch import nn

    height, width, channels = image_shape
    return nn.Sequential(
        nn.Conv2d(channels, 64, 3, stride=2, padding=1), nn.GELU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(128 * height * width // 16, num_classes),
    )  # fmt: skip


def by_hand_in_torch() -> Callable[[Batch], float]:
    """DistributedDataParallel, Adam, cross-entropy."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    # In the process group that ours has opened: a process has one.
    net = torch_net(SHAPE, NUM_CLASSES)
    wrapped = DistributedDataParallel(net)
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)

    def step(batch: Batch) -> float:
        images = (torch.from_numpy(batch.images_NHWC).float() - 120.0) / 60.0
        losses = torch.nn.functional.cross_entropy(
            wrapped(images.permute(0, 3, 1, 2)), torch.from_numpy(batch.labels_N), reduction="none"
        )
        loss = (losses * torch.from_numpy(batch.weights_N)).sum() / len(batch.labels_N)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def by_hand_in_keras() -> Callable[[Batch], float]:
    """Horovod's DistributedGradientTape in one tf.function, Adam, cross-entropy."""
    import horovod.tensorflow as hvd
    import keras
    import tensorflow as tf

    from train.models.small_cnn import small_cnn

    hvd.init()
    model, optimizer = small_cnn(SHAPE, NUM_CLASSES), keras.optimizers.Adam(1e-3)
    optimizer.build(model.trainable_variables)

    @tf.function
    def compiled(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape:
            outputs = model((tf.cast(images, tf.float32) - 120.0) / 60.0, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, outputs)
            loss = tf.reduce_sum(losses * weights) / tf.cast(tf.shape(labels)[0], tf.float32)
        gradients = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    def step(batch: Batch) -> float:
        return float(
            compiled(tf.constant(batch.images_NHWC), tf.constant(batch.labels_N), tf.constant(batch.weights_N))
        )

    return step


def ours(backend: str) -> Callable[[Batch], float]:
    """A member of a world of one, as `train.rank.worker` has it."""
    strategy, model = {"torch": ("torch_ddp", "benchmarks.training_step:torch_net"), "keras": ("horovod", "small_cnn")}[
        backend
    ]
    config = TrainConfig(strategy=strategy, model=model, optimizer="adam", num_workers=1)
    BACKENDS[backend].start(World(), config.seed)
    member = STRATEGIES[strategy].join(
        World(), config, partial(BACKENDS[backend].build, config, SPEC), SilentReporter()
    )
    member.start({}, 0, "")
    return lambda batch: member.train_step(batch, len(batch.labels_N), None).outcome.loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("torch", "keras"), default="torch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    given = parser.parse_args()
    rng = np.random.default_rng(0)
    batches = [
        Batch(
            rng.integers(0, 256, (given.batch_size, *SHAPE), dtype=np.uint8),
            rng.integers(0, NUM_CLASSES, given.batch_size),
            np.ones(given.batch_size, np.float32),
            np.arange(given.batch_size),
            0,
            step,
        )
        for step in range(8)
    ]
    # Ours first: it starts the backend, deterministic kernels included, and both have the same.
    by_hand = {"torch": by_hand_in_torch, "keras": by_hand_in_keras}[given.backend]
    contestants = {"ours": ours(given.backend), "by hand": by_hand()}
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for step in range(given.steps + 10):
        for name, run in contestants.items():
            start = time.process_time()
            run(batches[step % len(batches)])
            if step >= 10:
                seconds[name].append(time.process_time() - start)
    medians = {name: statistics.median(each) for name, each in seconds.items()}
    ratios = [one / other for one, other in zip(seconds["ours"], seconds["by hand"], strict=True)]
    for name, median in medians.items():
        sys.stdout.write(f"{name:8s} {1e3 * median:8.2f} ms of CPU a step (median of {given.steps})\n")
    sys.stdout.write(f"ours / by hand: {statistics.median(ratios):.3f} (median of the pairs' ratios)\n")


if __name__ == "__main__":
    main()
