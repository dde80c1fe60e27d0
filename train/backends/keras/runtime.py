"""Starts TensorFlow and Keras deterministically in this process, standardizes pixels, assigns variables and identifies
models.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.registry import install_hint, without_user_package
from train.backends.frameworks import check_seen, without_collection
from train.backends.model_spec import InputScale
from train.contracts.world import World


def import_tensorflow() -> Any:
    """The module `tensorflow`. Raises UsageError that names the extra if it cannot be imported."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    try:
        with without_collection():
            import tensorflow as tf
    except ImportError as error:
        raise UsageError(f"this needs TensorFlow: {error}", "which is an extra", install_hint("tensorflow")) from None
    return tf


def traced(function: Callable[..., Any], signature: Sequence[Any] | None = None) -> Any:
    """`function` as a TensorFlow function, which is traced when it is first called with tensors of new shapes.

    AutoGraph would translate the sources of ours first. None of them branches on a tensor's value, and layers of Keras,
    with all that their `call` does, it leaves as they are.
    """
    import tensorflow as tf

    return tf.function(function, input_signature=signature, autograph=False)


def start_tensorflow(world: World, seed: int) -> None:
    """Threads for this rank's share of the node, GPU memory as it is needed, seeds, deterministic kernels, and no
    left-overs of earlier models."""
    tf = import_tensorflow()
    import keras

    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            f"Keras runs on {keras.backend.backend()!r} here",
            "expected the backend 'tensorflow'",
            "unset KERAS_BACKEND, or set it to tensorflow",
        )
    num_threads = max(1, len(os.sched_getaffinity(0)) // world.ranks_per_node)
    gpus = tf.config.list_physical_devices("GPU")
    check_seen(world, "TensorFlow", len(gpus))
    try:
        for gpu in gpus:
            # Else it takes all of the GPU's memory at once.
            tf.config.experimental.set_memory_growth(gpu, True)
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        # TensorFlow is running already: a notebook, or a test. It keeps what it was started with.
        pass
    # Keras counts layers and seeds globally; a second model in one process must come out as the first did.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()


def reseed_seed_states(variables: Sequence[Any], place: int) -> None:
    """Let the dropout of each rank or device draw numbers of its own: all have just been given the first one's states.

    `variables`: Keras's, or TensorFlow's of one device. A Keras seed generator's state is (seed, counter); different
    seeds give independent sequences.
    """
    for variable in variables:
        if "seed_generator_state" in variable.name:
            seed, counter = np.asarray(variable)
            variable.assign(np.array([seed + place, counter], dtype=variable.numpy().dtype))


def config_sha256(model: Any) -> str:
    """Over the configuration and the variables' shapes of a built Keras model, compiled optimizer and loss included.

    Names that Keras counts up in each process do not matter, nor dtypes: an export computes in float32 what was trained
    in another precision. A model without a configuration counts by its layers and variables.
    """
    try:
        with warnings.catch_warnings():
            # Keras warns that a lambda cannot be loaded again; this JSON is only hashed.
            warnings.simplefilter("ignore")
            config = json.loads(model.to_json())
    except Exception:  # a user's get_config may raise anything, and subclassed models need not have one
        config = [type(layer).__name__ for layer in model.layers]
    variables = [[list(variable.shape), bool(variable.trainable)] for variable in model.variables]
    # Whether a user's module needed a name of its own depends on what else is installed.
    text = without_user_package(json.dumps([_canonical(config), variables], sort_keys=True))
    return hashlib.sha256(text.encode()).hexdigest()


def assign_variables(variables: Sequence[Any], arrays: Sequence[np.ndarray], source: str) -> None:
    """Give Keras variables these values. Raises UsageError, before any assignment, if they do not fit."""
    fix = "make train.model build the same model as then, or train under another models.uri"
    if len(arrays) != len(variables):
        raise UsageError(f"{source} holds {len(arrays)} variables", f"this model has {len(variables)}", fix)
    for variable, array in zip(variables, arrays, strict=True):
        if tuple(variable.shape) != array.shape or str(variable.dtype) != array.dtype.name:
            raise UsageError(
                f"{source} holds {array.dtype.name} {array.shape} for {variable.path}",
                f"this model has {variable.dtype} {tuple(variable.shape)} there",
                fix,
            )
    for variable, array in zip(variables, arrays, strict=True):
        variable.assign(array)


def _canonical(config: Any) -> Any:
    """The configuration with every layer's name replaced by its place in the order of appearance, without dtypes."""
    places: dict[str, str] = {}

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                places.setdefault(value["name"], f"#{len(places)}")
            for inner in value.values():
                collect(inner)
        elif isinstance(value, list):
            for inner in value:
                collect(inner)

    def rename(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: rename(inner) for key, inner in value.items() if key != "dtype"}
        if isinstance(value, list):
            return [rename(inner) for inner in value]
        return places.get(value, value) if isinstance(value, str) else value

    collect(config)
    return rename(config)


def standardize(images_NHWC: Any, scale: InputScale) -> Any:
    """uint8 images on the 0..255 scale -> float32 with mean 0 and deviation 1 per channel over the train split.

    Their width is known when this is traced. Along whole rows of pixels, as in train/backends/torch/model.py.
    """
    import tensorflow as tf

    width = images_NHWC.shape[2]
    mean, std = (tf.constant(channels * width, tf.float32) for channels in (scale.mean, scale.std))
    rows = tf.reshape(tf.cast(images_NHWC, tf.float32), [-1, width * images_NHWC.shape[3]])
    return tf.reshape((rows - mean) / std, tf.shape(images_NHWC))
