"""Builds the Keras model that `train.model` names, checks it, adds its loss, freezes weights, and names them.

What concerns frozen weights and names works on each of Keras's own backends.

Shape legend: N batch, H height, W width, C channels, K outputs. Models take float32 images_NHWC, standardized
unless `train.standardize` is false.
"""

from __future__ import annotations

import io
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import with_line_of_user
from train.api import NamedWeights
from train.backends.keras.losses import PerSample, choose_loss, compiled_for_logits, right_of, weighted_loss
from train.backends.keras.runtime import config_sha256
from train.backends.output_form import Probe, are_logits
from train.backends.rules import frozen_names
from train.backends.weight_files import read_arrays
from train.checkpoints.arrays import ArrayLike, WeightFile
from train.config import TrainConfig
from train.labels import LabelSpec, check_labels
from train.layers.sample_bits import number_layers
from train.models import MODELS
from train.models.user import build_named

# Keras's names for our words.
DTYPE_POLICIES = {"off": "float32", "bfloat16": "mixed_bfloat16", "float16": "mixed_float16"}


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model whose variables exist and whose output fits the dataset's labels."""

    model: Any
    """A Keras 3 model: standardized float32 images_NHWC -> outputs_NK."""
    outputs_are_logits: bool
    per_sample_loss: PerSample
    per_sample_right: PerSample
    """Function of per-sample correctness, summed in `StepOutcome.num_correct`."""
    frozen: Frozen
    """The weights that `train.freeze` names."""
    compiled_optimizer: Any | None
    """The optimizer that a user's factory compiled the model with."""
    config_sha256: str
    """Digest of the built model before any step: `config_sha256`."""


def build_model(
    config: TrainConfig,
    image_shape_HWC: tuple[int, int, int],
    labels: LabelSpec,
    class_weights: tuple[float, ...] = (),
) -> BuiltModel:
    """Build the model that `train.model` names, with fresh weights.

    Raises UsageError for an unknown name, a factory that does not import or fails, or an output other than (N, K).
    """
    import keras

    check_labels(config, labels)
    former_policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy(DTYPE_POLICIES[config.mixed_precision])
    try:
        model = build_named(config, image_shape_HWC, labels.num_outputs)
        if not isinstance(model, keras.Model):
            raise UsageError(
                f"train.model = {config.model!r}: the factory returned {type(model).__module__}.{type(model).__name__}",
                "expected a Keras 3 model (keras.Model, keras.Sequential or a subclass)",
                'return the model itself; for a PyTorch module set train.backend = "torch"',
            )
        check_pixels(config, model)
        outputs = _first_outputs(config.model, model, image_shape_HWC, labels)
        outputs_are_logits = are_logits(
            config, labels.kind, image_shape_HWC, _probe(config, model), compiled_for_logits(config, model)
        )
        loss = choose_loss(config, model, outputs_are_logits, labels)
        _try_loss(loss, outputs, labels)
    finally:
        # The policy is Keras's global; nothing built later in this process should inherit it.
        keras.config.set_dtype_policy(former_policy)
    number_sample_dropouts(model)
    optimizer = model.optimizer if getattr(model, "compiled", False) else None
    loss = weighted_loss(loss, class_weights)
    is_right = right_of(labels.kind, outputs_are_logits)
    frozen = freeze(config, model)
    return BuiltModel(model, outputs_are_logits, loss, is_right, frozen, optimizer, config_sha256(model))


def number_sample_dropouts(model: Any) -> int:
    """Tell those of a Keras model their places in it, on any of Keras's own backends. -> how many it has."""
    from train.layers.keras import SampleDropout

    return number_layers(layer for layer in model._flatten_layers() if isinstance(layer, SampleDropout))


def check_pixels(config: TrainConfig, model: Any) -> None:
    """Raises UsageError if a model of a library scales pixels by itself, and would get standardized ones."""
    import keras

    scales = any(isinstance(layer, keras.layers.Rescaling) for layer in model.layers)
    if scales and config.standardize and MODELS.is_of_library(config.model):
        raise UsageError(
            f"train.model = {config.model!r} scales pixels itself, but train.standardize is true",
            "expected pixels from 0 to 255",
            "set train.standardize = false",
        )


def _first_outputs(name: str, model: Any, image_shape_HWC: tuple[int, int, int], labels: LabelSpec) -> Any:
    """Call the model on two black images: creates the variables of subclassed models and shows the output's shape."""
    import tensorflow as tf

    images_NHWC = tf.zeros((2, *image_shape_HWC), tf.float32)
    try:
        outputs = model(images_NHWC, training=False)
    except (Exception, SystemExit) as error:
        # A user's own layers may raise anything.
        raise UsageError(
            f"train.model = {name!r}: calling the model failed: {with_line_of_user(error)}",
            f"expected it to take float32 images of shape (N, {', '.join(map(str, image_shape_HWC))})",
            "build it for the image_shape that the factory is called with",
        ) from error
    shape = tuple(getattr(outputs, "shape", ()))
    if shape != (2, labels.num_outputs):
        given = f"an output of shape {shape} for 2 images" if shape else f"a {type(outputs).__name__}"
        if len(shape) == 2 and shape[0] == 2:
            given = f"{shape[1]} outputs"
        raise UsageError(
            f"train.model = {name!r} returns {given}",
            f"expected {labels.num_outputs} outputs: the dataset has {labels}",
            "use the num_classes that the factory is called with in the last layer",
        )
    if not model.trainable_variables:
        raise UsageError(
            f"train.model = {name!r} has no trainable variables", "expected at least one", "unfreeze a layer"
        )
    return outputs


def _probe(config: TrainConfig, model: Any) -> Probe:
    import tensorflow as tf

    def outputs(images_NHWC: np.ndarray) -> np.ndarray:
        pixels_NHWC = tf.cast(images_NHWC, tf.float32)
        # About as it is in training; the exact scale decides nothing.
        standardized_NHWC = (pixels_NHWC - 127.5) / 64.0 if config.standardize else pixels_NHWC
        return tf.cast(model(standardized_NHWC, training=False), tf.float32).numpy()

    def weights() -> list[np.ndarray]:
        return [np.asarray(variable) for variable in model.trainable_variables]

    def assign(arrays: Sequence[np.ndarray]) -> None:
        for variable, array in zip(model.trainable_variables, arrays, strict=True):
            variable.assign(array)

    return Probe(outputs, weights, assign)


def _try_loss(loss: PerSample, outputs: Any, labels: LabelSpec) -> None:
    import tensorflow as tf

    # Class numbers, or zeros of the outputs' shape: also for one number, whose labels come without a second axis.
    examples = tf.zeros(2, tf.int64) if labels.kind == "class" else tf.zeros((2, labels.num_outputs))
    loss(examples, tf.cast(outputs, tf.float32))


@dataclass(frozen=True, slots=True)
class Frozen:
    """The weights that `train.freeze` names; none if it is empty."""

    variables: tuple[Any, ...] = ()
    layers: tuple[Any, ...] = ()
    """Layers without other trainable weights: their batch norms keep their statistics, too."""

    def set_trainable(self, is_trainable: bool) -> None:
        """Whether Keras counts them among the model's trainable variables; seen when a step is traced."""
        kept = [each for layer in self.layers for each in layer.variables if not each.trainable]
        for layer in self.layers:
            layer.trainable = is_trainable
        # A layer takes all its variables with it, also those that a factory freezes for itself.
        for variable in kept:
            variable.trainable = False
        for variable in self.variables:
            variable.trainable = is_trainable


def freeze(config: TrainConfig, model: Any) -> Frozen:
    """Freeze what `train.freeze` names; with `train.unfreeze_epoch` only name it.

    Raises UsageError for a pattern that matches nothing.
    """
    if not config.freeze:
        return Frozen()
    trainable = model.trainable_variables
    head = {id(variable) for variable in head_of(model).weights}
    names = frozen_names(
        config, [each.path for each in trainable], [each.path for each in trainable if id(each) in head]
    )
    variables = tuple(each for each in trainable if each.path in names)
    chosen = {id(each) for each in variables}
    leaves = [layer for layer in model._flatten_layers() if not list(layer._flatten_layers(include_self=False))]
    layers = tuple(
        layer
        for layer in leaves
        if layer.trainable_variables and all(id(each) in chosen for each in layer.trainable_variables)
    )
    frozen = Frozen(variables, layers)
    if not config.unfreeze_epoch:
        frozen.set_trainable(False)
    return frozen


def head_of(model: Any) -> Any:
    """The last layer that has weights."""
    layers = [layer for layer in model.layers if layer.weights]
    if not layers:
        raise UsageError("the model has no layers with weights of their own", "expected at least one, the head")
    return head_of(layers[-1]) if getattr(layers[-1], "layers", None) else layers[-1]


# Keras's own files number the variables of each layer below this name.
VARIABLES = "vars"
# Older files of whole models.
LEGACY_WEIGHTS, LEGACY_OPTIMIZER = "model_weights/", "optimizer_weights/"


def read_weights(file: WeightFile) -> dict[str, np.ndarray]:
    """`train.api.Learner.read_weights` of a Keras model."""
    arrays = read_arrays(file.read(), file.suffix, file.where)
    return _legacy_names(arrays) if file.suffix == ".h5" else arrays


def named_weights(model: Any, like: Collection[str] = ()) -> NamedWeights:
    """Weights by position in the model, as `.keras` and `.weights.h5` files name them, if `like` has such names; else
    by layer.
    """
    import keras

    by_position = any(f"{VARIABLES}/" in name for name in like)
    variables = _by_position(model) if by_position else _by_path(model)
    head = {id(variable) for variable in head_of(model).weights}

    def arrays() -> dict[str, np.ndarray]:
        return {name: np.array(keras.ops.convert_to_numpy(variable)) for name, variable in variables.items()}

    def assign(given: Mapping[str, ArrayLike]) -> None:
        for name, array in given.items():
            now = np.asarray(keras.ops.convert_to_numpy(variables[name]))
            variables[name].assign(np.array(array[...], dtype=now.dtype, order="C"))

    return NamedWeights(
        shapes={name: tuple(variable.shape) for name, variable in variables.items()},
        head=tuple(name for name, variable in variables.items() if id(variable) in head),
        arrays=arrays,
        assign=assign,
    )


def _legacy_names(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays of an older `.h5` file, as keras.applications offers them: `conv1/conv1/kernel:0` -> `conv1/kernel`."""
    renamed = {}
    for name, array in arrays.items():
        if not name.startswith(LEGACY_OPTIMIZER):
            layer, _, weight = name.removeprefix(LEGACY_WEIGHTS).partition(":")[0].partition("/")
            renamed[weight or layer] = array
    return renamed


def _by_path(model: Any) -> dict[str, Any]:
    """Layers of two nested models may have one name."""
    named: dict[str, Any] = {}
    for variable in model.weights:
        count = sum(name.partition("#")[0] == variable.path for name in named) if variable.path in named else 0
        named[f"{variable.path}#{count + 1}" if count else variable.path] = variable
    return named


def _by_position(model: Any) -> dict[str, Any]:
    """As Keras walks a model when it saves it; it offers no other way to these names."""
    from keras.src.saving import saving_lib

    ours, found = {id(variable) for variable in model.weights}, {}

    class Walker(saving_lib.H5IOStore):
        """Notes which variable Keras would write where; Keras insists on a store of its own."""

        place = ""

        def make(self, path: str, metadata: Any = None) -> Walker:
            self.place = path
            return self

        def __setitem__(self, key: str, variable: Any) -> None:
            if id(variable) in ours:
                found["/".join(part for part in (self.place, VARIABLES, key) if part)] = variable

    walker = Walker(io.BytesIO(), mode="w")
    try:
        saving_lib._save_state(model, walker, assets_store=None, inner_path="", visited_saveables=set())
    finally:
        walker.close()
    return found
