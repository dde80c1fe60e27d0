"""A loop of Horovod with TensorFlow: each rank reads its share of every global batch, in equal numbers of steps.

    horovodrun --gloo -np 2 python examples/loops/horovod_loop.py DATASET@1

Started again, with any number of ranks up to `num_streams`, it continues with the next step.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="with its version, which all ranks must share: DATASET@1")
parser.add_argument("--checkpoint", type=Path, default=Path("loop.weights.h5"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop-after", type=int, help="end after so many steps, to try how it resumes")
args = parser.parse_args()

hvd.init()
dataset = shardmill.open_dataset(args.dataset)
# Rank and world size are Horovod's.
loader = dataset.batches("train", global_batch_size=32, seed=0)

keras.utils.set_random_seed(0)
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
optimizer = keras.optimizers.AdamW(0.01)
optimizer.build(model.trainable_variables)
model.compile(optimizer)
if args.checkpoint.exists():
    # All ranks read one file. The optimizer counts steps over all epochs, so it is all that the loader needs.
    model.load_weights(args.checkpoint)
    loader.seek_to_step(int(optimizer.iterations))


@tf.function
def train_step(images: tf.Tensor, labels: tf.Tensor, weights: tf.Tensor) -> tf.Tensor:
    # The mean over the real rows of all ranks: rows of padding have weight 0, and gradients are summed.
    num_real = hvd.allreduce(tf.reduce_sum(weights), op=hvd.Sum, name="num_real")
    with tf.GradientTape() as tape:
        losses = keras.ops.sparse_categorical_crossentropy(labels, model(images), from_logits=True)
        loss = tf.reduce_sum(losses * weights) / num_real
    gradients = tape.gradient(loss, model.trainable_variables)
    summed = [hvd.allreduce(each, op=hvd.Sum, name=f"gradient_{place}") for place, each in enumerate(gradients)]
    optimizer.apply(summed, model.trainable_variables)
    return hvd.allreduce(loss, op=hvd.Sum, name="loss")


steps_done = 0
while loader.epoch < args.epochs and steps_done != args.stop_after:
    for batch in loader:
        loss = train_step(batch.images, batch.labels, batch.weights)
        steps_done += 1
        if hvd.rank() == 0:
            print(f"epoch {batch.epoch} step {batch.step} loss {float(loss):.4f}", flush=True)
            model.save_weights(args.checkpoint)
        if steps_done == args.stop_after:
            break
hvd.shutdown()
