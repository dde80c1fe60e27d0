"""The step that the chief of the strategy `parameter_server` dispatches to its workers: read, compute, update.

A step is traced once, here, and computed by whichever worker TensorFlow's `ClusterCoordinator` gives it to. Counts on
the servers tell how often steps were begun and applied, which is more often than they were dispatched if workers are
lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardmill.errors import TrainingError
from train.backends.keras.runtime import traced
from train.backends.keras.step import Rows
from train.backends.layer_errors import as_layers_raised_them
from train.contracts.world import Role
from train.strategies.parameter_server_cluster import ClusterTask


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A step that a worker has, or will get."""

    step: int
    arguments: tuple[Any, ...]
    answer: Any
    """TensorFlow's `RemoteValue`."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A worker's answer for a finished step."""

    is_applied: bool
    gradient_norm: float
    loss: float
    num_correct: float
    labels_N: np.ndarray
    weights_N: np.ndarray
    sample_ids_N: np.ndarray
    wait_seconds: float
    """Time spent waiting for the rows."""
    fetch_seconds: float
    decode_seconds: float
    """Time of its reader's threads since its last answer."""


class RemoteSteps:
    """Dispatches steps and takes their answers."""

    def __init__(self, learner: Any, coordinator: Any, cluster: list[ClusterTask]) -> None:
        import tensorflow as tf

        self._coordinator = coordinator
        self._num_workers = sum(each.role is Role.WORKER for each in cluster)
        with coordinator.strategy.scope():
            # On a server, like all variables: a worker that is lost takes no count with it.
            self._begun = tf.Variable(tf.constant(0, tf.int64), trainable=False)
            self._applied = tf.Variable(tf.constant(0, tf.int64), trainable=False)
        self._num_dispatched = 0
        self._repeats_seen = (0, 0)
        self._learner = learner
        self._cluster = cluster
        self._trained: list[int] = []
        self._function: Any = None

    def prepare(self) -> None:
        """Trace the step, if that has not been done since the model last changed which of its variables are trained."""
        trained = [id(variable) for variable in self._learner.step.trained_variables]
        if self._function is None or trained != self._trained:
            self._function, self._trained = self._traced(), trained

    def dispatch(self, epoch: int, step: int, global_weight: int, learning_rate: float) -> Dispatched:
        """Queue a step for the next worker that is free."""
        import tensorflow as tf

        self._num_dispatched += 1
        arguments = (
            tf.constant(epoch, tf.int64),
            tf.constant(step, tf.int64),
            tf.constant(global_weight, tf.float32),
            tf.constant(learning_rate, tf.float32),
        )
        return Dispatched(step, arguments, self._scheduled(arguments))

    def answer_of(self, done: Dispatched) -> Answer:
        """Wait for a worker's answer. One that dies when its step is done takes the answer with it: then another worker
        repeats the step, and the counts on the servers tell so."""
        import tensorflow as tf

        answer = done.answer
        for _ in range(self._num_workers):
            try:
                return _answer(answer.get())
            except (tf.errors.UnavailableError, tf.errors.AbortedError):
                answer = self._scheduled(done.arguments)
        return _answer(answer.get())

    def take_repeats(self) -> tuple[int, int]:
        """Return how many steps were begun, and applied, more than once since the last call; all dispatched ones are
        done.
        """
        repeats = int(self._begun.numpy()) - self._num_dispatched, int(self._applied.numpy()) - self._num_dispatched
        begun, applied = (now - before for now, before in zip(repeats, self._repeats_seen, strict=True))
        self._repeats_seen = repeats
        return begun, applied

    def _scheduled(self, arguments: tuple[Any, ...]) -> Any:
        return self._coordinator.schedule(self._function, args=arguments)

    def _traced(self) -> Any:
        import tensorflow as tf

        workers = [each for each in self._cluster if each.role is Role.WORKER]
        reads = {(each.reads, each.image_shape_HWC, each.label_dtype, each.label_shape) for each in workers}
        if len(reads) != 1:
            raise TrainingError(
                f"workers read their input in {len(reads)} different ways",
                "expected one",
                "start all processes from the same code",
            )
        read, image_shape_HWC, label_dtype, label_shape = reads.pop()
        types = [tf.uint8, tf.as_dtype(label_dtype), tf.float32, tf.int64, tf.int64, tf.float64]

        def work(epoch: Any, step: Any, global_weight: Any, learning_rate: Any) -> Any:
            with tf.control_dependencies([self._begun.assign_add(1, read_value=False)]):
                # The worker's own Python function, known by a name that it gave: see parameter_server_worker.
                images_NHWC, labels_N, weights_N, sample_keys_N, sample_ids_N, seconds = tf.raw_ops.PyFunc(
                    input=[epoch, step], token=read, Tout=types
                )
            images_NHWC.set_shape([None, *image_shape_HWC])
            labels_N.set_shape([None, *label_shape])
            weights_N.set_shape([None])
            sample_keys_N.set_shape([None])
            rows = Rows(images_NHWC, labels_N, weights_N, sample_keys_N)
            is_applied, gradient_norm, figures = self._learner.step.whole_without_sum(
                rows, global_weight, learning_rate
            )
            with tf.control_dependencies([is_applied]):
                self._applied.assign_add(1, read_value=False)
            return is_applied, gradient_norm, figures, labels_N, weights_N, sample_ids_N, seconds

        # Traced here, outside the strategy's scope: inside it Keras's optimizers would exchange gradients themselves.
        signature = [tf.TensorSpec([], dtype) for dtype in (tf.int64, tf.int64, tf.float32, tf.float32)]
        with as_layers_raised_them():
            return traced(work, signature).get_concrete_function()


def _answer(values: tuple[Any, ...]) -> Answer:
    is_applied, gradient_norm, figures, labels_N, weights_N, sample_ids_N, seconds = [each.numpy() for each in values]
    loss, num_correct = figures.tolist()
    wait_seconds, fetch_seconds, decode_seconds = seconds.tolist()
    return Answer(
        bool(is_applied),
        float(gradient_norm),
        loss,
        num_correct,
        labels_N,
        weights_N,
        sample_ids_N,
        wait_seconds,
        fetch_seconds,
        decode_seconds,
    )
