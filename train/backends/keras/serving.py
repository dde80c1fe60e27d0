"""Wraps a trained model for serving: uint8 images in, predictions out; also with the output of a named layer beside
them, which `predict --layer` stores as an embedding.

Shape legend: N batch, H height, W width, C channels, K outputs (classes, or numbers of a label), D length of a layer's
output.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import without_user_package
from train.api import LayerOutput, Predict, PredictWithLayer, ServedModel
from train.backends.keras.losses import predictions_of
from train.backends.keras.runtime import import_tensorflow, standardize, traced
from train.backends.model_spec import ModelSpec
from train.backends.rules import no_layer

# Outputs of an export.
PROBABILITIES = "probabilities"
VALUES = "values"
LOGITS = "logits"
# A class may have any name; this one is never asked for, because every index has its own.
_UNKNOWN = "\0unknown"


@dataclass(frozen=True, slots=True)
class ServingModel:
    """The parts of one trained model."""

    model: Any
    """A Keras 3 model: standardized float32 images_NHWC -> outputs_NK."""
    outputs_are_logits: bool
    spec: ModelSpec

    @property
    def predictions_name(self) -> str:
        """Return the name of an export's output."""
        return VALUES if self.spec.labels.are_numbers else PROBABILITIES

    def predictions(self, images_NHWC: Any) -> dict[str, Any]:
        """uint8 images -> float32 probabilities_NK (and the logits, if it gives some) or numbers_NK, by name.

        By the same operations as in training.
        """
        import tensorflow as tf

        outputs_NK = tf.cast(self.model(standardize(images_NHWC, self.spec.scale), training=False), tf.float32)
        predictions_NK = predictions_of(self.spec.labels.kind, self.outputs_are_logits, outputs_NK)
        carried = {LOGITS: outputs_NK} if self.outputs_are_logits else {}
        return {self.predictions_name: predictions_NK, **carried}

    def predict(self, images_NHWC: np.ndarray) -> np.ndarray:
        """`predictions`, compiled as training and serving compile it: other kernels would round otherwise."""
        import tensorflow as tf

        return traced(self.predictions)(tf.constant(images_NHWC, tf.uint8))[self.predictions_name].numpy()


def write_saved_model(serving: ServingModel, folder: Path) -> None:
    """A TensorFlow SavedModel: `serving_default(images)` gives `probabilities`, `logits` and `label`.

    If an image may have several classes, it gives `class_names` in place of one label; of numbers, `values` alone.
    """
    import keras
    import tensorflow as tf

    def serve(images: Any) -> dict[str, Any]:
        labels, found = serving.spec.labels, serving.predictions(images)
        if labels.kind == "class":
            found["label"] = tf.gather(tf.constant(labels.class_names), tf.argmax(found[PROBABILITIES], axis=-1))
        elif labels.kind == "multi_label":
            found["class_names"] = tf.constant(labels.class_names)
        return found

    signature = tf.TensorSpec((None, *serving.spec.image_shape_HWC), tf.uint8, name="images")
    archive: Any = keras.export.ExportArchive()
    archive.track(serving.model)
    archive.add_endpoint("serve", serve, input_signature=[signature])
    archive.write_out(str(folder), verbose=False)


def load_saved_model(folder: Path) -> ServedModel:
    """Load its functions images_NHWC uint8 -> NumPy arrays."""
    tf = import_tensorflow()
    loaded = tf.saved_model.load(str(folder))
    outputs = loaded.signatures["serving_default"].structured_outputs

    def named(name: str) -> Predict:
        def predict(images_NHWC: np.ndarray) -> np.ndarray:
            # `loaded` owns the variables, and would take them with it.
            return loaded.signatures["serving_default"](images=tf.constant(images_NHWC, tf.uint8))[name].numpy()

        return predict

    predictions = named(next(name for name in (PROBABILITIES, VALUES) if name in outputs))
    has_logits = LOGITS in outputs
    return ServedModel(predictions, named(LOGITS) if has_logits else predictions, has_logits)


@dataclass(frozen=True, slots=True)
class KerasCheck:
    """The expected outputs of a reloaded `.keras` file."""

    predictions_name: str
    images_NHWC: np.ndarray
    expected_NK: np.ndarray
    max_abs_diff: float

    def difference(self, loaded: Any) -> float:
        return float(np.abs(np.asarray(loaded(self.images_NHWC)[self.predictions_name]) - self.expected_NK).max())


def write_keras_file(serving: ServingModel, file: Path, check: KerasCheck) -> str:
    """A `.keras` file that does the same. -> what its reader must know, empty if `keras.models.load_model` is enough.

    A user's own model class is left out if its `call` can be written down as the layers that it calls. If no file
    loads again and passes the check, none is written, and the answer says why.
    """
    from train.layers.keras import SampleDropout

    reason, custom = "", _custom_classes(serving.model) - {SampleDropout}
    for inlined in (True, False) if custom else (False,):
        for custom_objects in ({}, {kind.__name__: kind for kind in custom}):
            try:
                _with_layers_of_keras(_functional(serving, inlined)).save(file)
                import keras

                loaded: Any = keras.models.load_model(
                    file, custom_objects=custom_objects, compile=False, safe_mode=True
                )
                difference = check.difference(loaded)
            except Exception as error:
                # The user's classes are asked for their configs here, and anything may come of it.
                reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                continue
            if not difference <= check.max_abs_diff:
                reason = f"reloaded, it differs by {difference:g}"
                continue
            names = (f"{kind.__module__}.{kind.__name__}" for kind in _custom_classes(loaded))
            classes = ", ".join(sorted(map(without_user_package, names)))
            return f"load it with custom_objects for {classes}" if classes else ""
    file.unlink(missing_ok=True)
    return f"no .keras file: {reason}; give the model class a get_config()"


def _functional(serving: ServingModel, inlined: bool) -> Any:
    """Keras's own layers around the trained model, which is one layer among them or, inlined, the layers it calls."""
    import keras

    variances = [deviation**2 for deviation in serving.spec.scale.std]
    images = keras.Input(serving.spec.image_shape_HWC, dtype="uint8", name="images")
    standardized = keras.layers.Normalization(
        axis=-1, mean=list(serving.spec.scale.mean), variance=variances, dtype="float32", name="standardize"
    )(images)
    if inlined:
        takes_training = "training" in inspect.signature(serving.model.call).parameters
        outputs = serving.model.call(standardized, **({"training": False} if takes_training else {}))
    else:
        outputs = serving.model(standardized, training=False)
    labels = serving.spec.labels
    link = "softmax" if labels.kind == "class" else "sigmoid"
    last = link if serving.outputs_are_logits else "linear"
    predictions = keras.layers.Activation(last, dtype="float32", name=serving.predictions_name)(outputs)
    found = {serving.predictions_name: predictions, **({LOGITS: outputs} if serving.outputs_are_logits else {})}
    if labels.kind == "class":
        found["label"] = keras.layers.StringLookup(
            vocabulary=list(labels.class_names), invert=True, num_oov_indices=0, oov_token=_UNKNOWN, name="label"
        )(keras.ops.argmax(predictions, axis=-1))
    return keras.Model(images, found)


def _with_layers_of_keras(model: Any) -> Any:
    """The same layers and weights, but for `SampleDropout`: who loads the file trains without our sample ids.

    Inside other layers, wrappers among them, it stays: only graphs can be made again with other layers.
    """
    import keras

    from train.layers.keras import SampleDropout

    def plain(layer: Any) -> Any:
        return keras.layers.Dropout(layer.rate, name=layer.name) if isinstance(layer, SampleDropout) else layer

    if not any(isinstance(layer, SampleDropout) for layer in model._flatten_layers()):
        return model
    return keras.models.clone_model(model, clone_function=plain, recursive=True)


def _custom_classes(model: Any) -> set[type]:
    """Classes of layers and models that are not Keras's own: they must be importable to load the model."""
    kinds = {type(layer) for layer in model._flatten_layers()}
    return {kind for kind in kinds if not kind.__module__.startswith("keras.")}


SAVED_MODEL = "saved_model"


KERAS_FILE = "model.keras"


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
    predictions = next(name for name in (PROBABILITIES, VALUES) if name in model.output)
    signature = tf.TensorSpec((None, *model.input.shape[1:]), tf.uint8)

    def compute(images_NHWC: Any) -> Any:
        predictions_NK = model(images_NHWC, training=False)[predictions]
        output = outputs[-1]
        return tf.cast(predictions_NK, tf.float32), tf.cast(tf.reshape(output, (tf.shape(output)[0], -1)), tf.float32)

    compiled = traced(compute, [signature])

    def predict(images_NHWC: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        predictions_NK, layer_ND = compiled(tf.constant(images_NHWC, tf.uint8))
        return predictions_NK.numpy(), layer_ND.numpy()

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
