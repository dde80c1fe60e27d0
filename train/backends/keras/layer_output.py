"""Gives the output of a named layer of an export beside its answers: what `predict --layer` stores as an embedding.

Shape legend: N batch, H height, W width, C channels, K outputs, D length of a layer's output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.backends.backend import LayerOutput, PredictWithLayer
from train.backends.keras.backend import KERAS_FILE
from train.backends.keras.runtime import import_tensorflow
from train.backends.keras.serving import PROBABILITIES, VALUES
from train.backends.layer_names import no_layer


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
    both = _with_output(model, layer)
    if both is None:
        raise no_layer(layer, _layer_names(model))
    answers = next(name for name in (PROBABILITIES, VALUES) if name in model.output)
    signature = tf.TensorSpec((None, *model.input.shape[1:]), tf.uint8)

    @tf.function(input_signature=[signature])
    def compute(images_NHWC: Any) -> Any:
        outputs, found = both(images_NHWC, training=False)
        return tf.cast(outputs[answers], tf.float32), tf.cast(tf.reshape(found, (tf.shape(found)[0], -1)), tf.float32)

    def predict(images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        answers_NK, layer_ND = compute(tf.constant(images_NHWC, tf.uint8))
        return answers_NK.numpy(), layer_ND.numpy()

    return predict


LAYER_OUTPUT = LayerOutput(KERAS_FILE, load_layer)


def _with_output(model: Any, name: str) -> Any:
    """A model of the same layers that also gives the output of one; None if there is none of that name.

    One inside a layer that is itself a model is computed once: what follows it is applied again to what it gives.
    """
    import keras

    for layer in model.layers:
        if layer.name == name and not isinstance(layer, keras.layers.InputLayer):
            return keras.Model(model.inputs, [model.output, layer.output])
    for layer in model.layers:
        inner = _with_output(layer, name) if isinstance(layer, keras.Model) and layer.inputs else None
        if inner is not None:
            # Where the outer graph calls it: its own input and output are those of the inner one.
            [taken], [given] = layer._inbound_nodes[-1].input_tensors, layer._inbound_nodes[-1].output_tensors
            output, found = inner(taken)
            return keras.Model(model.inputs, [keras.Model(given, model.output)(output), found])
    return None


def _layer_names(model: Any) -> list[str]:
    import keras

    names: list[str] = []
    for layer in model.layers:
        names += [*(_layer_names(layer) if isinstance(layer, keras.Model) else ()), layer.name]
    return names
