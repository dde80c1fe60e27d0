"""Puts TensorFlow and Keras of this process into the state in which equal inputs give equal bits."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from train.values import World


def start_tensorflow(world: World, seed: int) -> None:
    """Threads for this rank's share of the node, seeds, deterministic kernels, and no left-overs of earlier models."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")
    import keras
    import tensorflow as tf

    if keras.backend.backend() != "tensorflow":
        raise UsageError(
            f"Keras runs on {keras.backend.backend()!r} here",
            "expected the backend 'tensorflow'",
            "unset KERAS_BACKEND, or set it to tensorflow",
        )
    num_threads = max(1, len(os.sched_getaffinity(0)) // world.ranks_per_node)
    try:
        tf.config.threading.set_intra_op_parallelism_threads(num_threads)
        tf.config.threading.set_inter_op_parallelism_threads(1)
    except RuntimeError:
        # TensorFlow is running already: a notebook, or a test. It keeps the threads that it was started with.
        pass
    # Keras counts layers and seeds globally; a second model in one process must come out as the first did.
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    tf.config.experimental.enable_op_determinism()


def decorrelate_seed_states(model: Any, rank: int) -> None:
    """Let each rank's dropout draw numbers of its own: all ranks have just been given rank 0's seed states.

    A Keras seed generator's state is (seed, counter); different seeds give independent sequences.
    """
    for variable in model.non_trainable_variables:
        if "uint" in str(variable.dtype) and tuple(variable.shape) == (2,):
            seed, counter = np.asarray(variable)
            variable.assign(np.array([seed + np.uint32(rank), counter], dtype=np.uint32))
