"""Gives the output of a named layer of an export beside its answers: what `predict --layer` stores as an embedding.

Shape legend: N batch, H height, W width, C channels, K outputs, D length of a layer's output.
"""

from __future__ import annotations

from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import LayerOutput, PredictWithLayer
from train.backends.keras.backend import KERAS_FILE
from train.backends.keras.runtime import import_tensorflow, traced
from train.backends.keras.serving import PROBABILITIES, VALUES
from train.backends.model_errors import no_layer


def load_layer(file: Path, layer: str) -> PredictWithLayer:
    """Load a `.keras` file of ours. Raises UsageError, which names the layers that there are, if it has no such one."""
    tf = import_tensorflow()
    import keras

    try:
        model: Any = keras.models.load_model(file, compile=False, safe_mode=True)
    except (TypeError, ValueError) as error:
        raise UsageError(
            f"the model's .keras file does not load here: {' '.join(str(error).split())[:200]}",
            "expected layers of Keras's own for --layer",
            "predict without --layer: the SavedModel needs no classes",
        ) from None
    found = next((each for each in model._flatten_layers(include_self=False) if each.name == layer), None)
    if found is None:
        raise no_layer(layer, _layer_names(model))
    outputs = _kept_outputs(found)
    answers = next(name for name in (PROBABILITIES, VALUES) if name in model.output)
    signature = tf.TensorSpec((None, *model.input.shape[1:]), tf.uint8)

    def compute(images_NHWC: Any) -> Any:
        answers_NK = model(images_NHWC, training=False)[answers]
        output = outputs[-1]
        return tf.cast(answers_NK, tf.float32), tf.cast(tf.reshape(output, (tf.shape(output)[0], -1)), tf.float32)

    compiled = traced(compute, [signature])

    def predict(images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answers_NK, layer_ND = compiled(tf.constant(images_NHWC, tf.uint8))
        return answers_NK.numpy(), layer_ND.numpy()

    return predict


def _kept_outputs(layer: Any) -> list[Any]:
    """What the layer gives from now on, wherever in the model it is called."""
    call, kept = layer.call, []

    # Keras looks at the arguments that a layer's `call` takes.
    @wraps(call)
    def keep(*arguments: Any, **named: Any) -> Any:
        kept.append(call(*arguments, **named))
        return kept[-1]

    layer.call = keep
    return kept


LAYER_OUTPUT = LayerOutput(KERAS_FILE, load_layer)


def _layer_names(model: Any) -> list[str]:
    import keras

    names: list[str] = []
    for layer in model.layers:
        names += [*(_layer_names(layer) if isinstance(layer, keras.Model) else ()), layer.name]
    return names
