"""Keras `fit` on PyTorch; it resumes in the middle of an epoch, at the step after the last saved model.

KERAS_BACKEND=torch python examples/loops/keras_fit_torch.py DATASET
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset")
parser.add_argument("--checkpoint", type=Path, default=Path("loop.keras"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop-after", type=int, help="end after so many steps, to try how it resumes")
args = parser.parse_args()

dataset = shardmill.open_dataset(args.dataset)
loader = dataset.torch_loader("train", global_batch_size=32, seed=0, layout="NHWC")


def rest_of_the_epoch() -> Iterator[tuple[Any, Any, Any]]:
    """Keras takes the weights as `sample_weight`, so rows of padding count nothing."""
    for batch in loader:
        yield batch.images, batch.labels, batch.weights


class Save(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        steps = int(self.model.optimizer.iterations)
        print(
            f"epoch {(steps - 1) // len(loader)} step {(steps - 1) % len(loader)} loss {logs['loss']:.4f}", flush=True
        )
        self.model.save(args.checkpoint)
        if steps == args.stop_after:
            raise SystemExit


keras.utils.set_random_seed(0)
if args.checkpoint.exists():
    model = keras.saving.load_model(args.checkpoint)
    # The optimizer counts steps; what `fit` has read ahead does not matter.
    loader.seek_to_step(int(model.optimizer.iterations))
else:
    model = keras.Sequential(
        [
            keras.Input(dataset.manifest.normalize.image_shape_HWC),
            keras.layers.Rescaling(1 / 255),
            keras.layers.Conv2D(8, 3, padding="same", activation="relu"),
            keras.layers.AveragePooling2D(4),
            keras.layers.Flatten(),
            keras.layers.Dense(len(dataset.class_names)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(0.01), loss, weighted_metrics=["accuracy"])

for epoch in range(loader.epoch, args.epochs):
    steps = len(loader) - loader.step
    model.fit(
        rest_of_the_epoch(), steps_per_epoch=steps, initial_epoch=epoch, epochs=epoch + 1,
        shuffle=False, verbose=0, callbacks=[Save()],
    )  # fmt: skip
