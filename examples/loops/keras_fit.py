"""Keras `fit` on a dataset of shardmill, with TensorFlow: exact epochs, and rows of padding that count nothing.

python examples/loops/keras_fit.py DATASET
"""

from __future__ import annotations

import sys

import keras

import shardmill

dataset = shardmill.open_dataset(sys.argv[1])
# (images, labels, weights): Keras takes the weights as `sample_weight`. Each epoch has an order of its own.
train = dataset.tf_dataset("train", global_batch_size=32, seed=0)
validation = dataset.tf_dataset("validation", global_batch_size=32, shuffle=False)

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
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.AdamW(0.01), loss, weighted_metrics=["accuracy"])
model.fit(train, validation_data=validation, epochs=3, verbose=2)
