"""One training step, compiled in two halves with a collective between them, or whole with the collective inside.

Why two halves: only the sum over ranks needs the other ranks. `gradients` returns addends (gradients, loss, number
correct) that already are shares of the global mean: each loss is divided by the weight of the GLOBAL batch, which the
plan knows, so a plain sum is exact although padding leaves ranks with different numbers of samples. `apply` decides by
the sums alone whether they are finite, so all ranks update or skip alike. Dividing by a local weight, or deciding
before the sum, would let the replicas diverge without an error. Every variable has a float32 addend, a zero if it has
no gradient, because ranks must pass the same group of tensors to the collective; otherwise they hang.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np

from shardmill.values import Batch
from train.backends.keras.batch_norms import KerasBatchNorms, tracing_step
from train.backends.keras.build import BuiltModel
from train.backends.keras.optimizers import ChosenOptimizer
from train.backends.keras.recompute import Segments, compute_in_tensorflow
from train.backends.keras.runtime import standardize, traced
from train.backends.model_spec import InputScale
from train.backends.rules import as_layers_raised_them, microbatches_of
from train.contracts.values import StepOutcome
from train.layers.sample_bits import drawing, sample_keys


class Rows(NamedTuple):
    """A batch as tensors. It is a tuple because TensorFlow does not trace dataclasses."""

    images_NHWC: Any
    labels_N: Any
    weights_N: Any
    sample_keys_N: Any
    """Keys from which `train.layers` derive their random numbers."""


Gradients = Callable[[Rows, Any, Any], list[Any]]
"""(rows, global_weight, share_of_streams) -> addends; all tensors."""
Run = Callable[[Gradients, Rows, Any, Any], list[Any]]
"""The wrapper of a strategy of tf.distribute: (the function, its arguments) -> addends."""


class SumInside(Protocol):
    """A strategy's sum over ranks as a part of the compiled step, which tells when it comes to it."""

    def begin(self) -> None:
        """Signal that this rank's contribution is computed. Called in each step, by a TensorFlow thread."""
        ...

    def sum_tensors(self, tensors: list[Any]) -> list[Any]:
        """`train.strategies.collective.Collective.sum_tensors`, called to be traced."""
        ...

    def end(self) -> None:
        """The sums are there. Called as `begin` is, if they come to be."""
        ...


class TrainStep:
    """The step of `train.api.Learner`, which says what goes in and comes out."""

    def __init__(
        self,
        built: BuiltModel,
        chosen: ChosenOptimizer,
        scale: InputScale,
        accumulation_steps: int = 1,
        norms: KerasBatchNorms | None = None,
        segments: Segments | None = None,
        seed: int = 0,
    ) -> None:
        self._built = built
        self._chosen = chosen
        self._scale = scale
        self._accumulation_steps = accumulation_steps
        self._norms = norms
        self._segments = segments
        self._seed = seed
        self._around: Run | None = None
        self._sum_inside: SumInside | None = None
        self.compile()
        self._compiled_sum = traced(_sum_of)
        self._compiled_outputs = traced(self._outputs)

    def wrap(self, run: Run) -> None:
        """Compute gradients inside `run`, in one compiled function."""
        self._around = run
        self.compile()

    def sum_by(self, sum_inside: SumInside) -> None:
        """Let `whole` sum over ranks in its one compiled function."""
        self._sum_inside = sum_inside
        self.compile()

    def compile(self) -> None:
        """Trace the step anew when it is next called: which variables are trained has changed."""
        run = self._around
        self._wrapped = self._gradients if run is None else lambda *arguments: run(self._gradients, *arguments)
        self._compiled_gradients = traced(self._wrapped)
        self._compiled_update = traced(self._update)
        self._compiled_whole = traced(self._whole)

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        microbatches = list(microbatches_of(batch, self._accumulation_steps))
        return self._accumulated(microbatches, global_weight, share_of_streams / len(microbatches))

    def _accumulated(self, microbatches: list[Batch], global_weight: int, share_of_each: float) -> list[Any]:
        addends: list[Any] = []
        for microbatch in microbatches:
            # The first call traces.
            with self._changed_layers(), as_layers_raised_them():
                addends_here = self._compiled_gradients(*self._arguments(microbatch, global_weight, share_of_each))
            addends = self._compiled_sum(addends, addends_here) if addends else addends_here
            # An accelerator computes asynchronously: waiting here keeps its time out of the time of the allreduce, and
            # the activations of one microbatch at a time in its memory.
            addends[-1].numpy()
        return addends

    def whole(
        self, batch: Batch, global_weight: int, share_of_streams: float, learning_rate: float | None
    ) -> StepOutcome:
        """Gradients, their sum over ranks (`sum_by`) and the update, all with the last microbatch.

        The halves are traced when they are called: for the other microbatches, or to find what was not finite.
        """
        *earlier, last = microbatches_of(batch, self._accumulation_steps)
        share_of_each = share_of_streams / (len(earlier) + 1)
        addends = self._accumulated(earlier, global_weight, share_of_each)
        self._set_learning_rate(learning_rate)
        with self._changed_layers(), as_layers_raised_them():
            return _outcome(*self._compiled_whole(addends, *self._arguments(last, global_weight, share_of_each)))

    def _arguments(self, microbatch: Batch, global_weight: int, share_of_streams: float) -> tuple[Rows, Any, Any]:
        import tensorflow as tf

        rows = Rows(
            tf.constant(microbatch.images_NHWC),
            tf.constant(microbatch.labels_N),
            tf.constant(microbatch.weights_N, tf.float32),
            tf.constant(sample_keys(self._seed, microbatch.epoch, microbatch.sample_ids_N)),
        )
        return rows, tf.constant(global_weight, tf.float32), tf.constant(share_of_streams, tf.float32)

    @contextmanager
    def _changed_layers(self) -> Iterator[None]:
        norms = self._norms.synchronized() if self._norms else nullcontext()
        with norms, self._segments.replaced(compute_in_tensorflow) if self._segments else nullcontext():
            yield

    @property
    def trained_variables(self) -> list[Any]:
        """Variables that an update currently changes."""
        return self._built.model.trainable_variables

    def whole_without_sum(self, rows: Rows, global_weight: Any, learning_rate: Any) -> tuple[Any, Any, Any]:
        """Traced, for a strategy that has a worker compute a whole batch and update the weights by it.

        -> whether the update was applied, the gradient's norm, (loss, number correct).
        """
        import tensorflow as tf

        if self._chosen.follows_schedule:
            self._chosen.optimizer.learning_rate.assign(learning_rate)
        sums = self._gradients(rows, global_weight, tf.constant(1.0))
        return *self._update(sums), sums[-1]

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        self._set_learning_rate(learning_rate)
        is_applied, gradient_norm = self._compiled_update(sums)
        return _outcome(is_applied, gradient_norm, sums[-1])

    def _set_learning_rate(self, learning_rate: float | None) -> None:
        if learning_rate is not None:
            self._chosen.optimizer.learning_rate = learning_rate

    def are_finite(self, addends: list[Any]) -> bool:
        import tensorflow as tf

        *gradients, metrics = addends
        return math.isfinite(float(tf.linalg.global_norm(gradients))) and math.isfinite(float(metrics[0]))

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        import tensorflow as tf

        return self._compiled_outputs(tf.constant(images_NHWC)).numpy()

    def _gradients(self, rows: Rows, global_weight: Any, share_of_streams: Any) -> list[Any]:
        # Around the backward pass, too: it may compute activations again.
        with drawing(rows.sample_keys_N):
            return self._gradients_of(rows, global_weight, share_of_streams)

    def _gradients_of(self, rows: Rows, global_weight: Any, share_of_streams: Any) -> list[Any]:
        import tensorflow as tf

        model, optimizer = self._built.model, self._chosen.optimizer
        images_NHWC, labels_N, weights_N, _ = rows
        variables = [variable.value for variable in model.trainable_variables]
        with tf.GradientTape() as tape, tracing_step(weights_N):
            outputs_NK = tf.cast(model(self._standardize(images_NHWC), training=True), tf.float32)
            losses_N = self._built.per_sample_loss(labels_N, outputs_NK)
            # Divided by the weight of the GLOBAL batch, not of this rank's share: then a plain sum over ranks is the
            # mean over all samples, also if padding leaves the ranks with different numbers of them.
            loss = tf.reduce_sum(weights_N * losses_N) / global_weight
            if model.losses:
                # The losses of 16-bit outputs are in 16-bit, those of weights in 32-bit.
                loss += tf.add_n([tf.cast(each, tf.float32) for each in model.losses]) * share_of_streams
            objective = optimizer.scale_loss(loss) if self._chosen.scales_loss else loss
        gradients = tape.gradient(objective, variables)
        is_correct_N = self._built.per_sample_right(labels_N, outputs_NK)
        # A variable without influence still has its place in the group, which must be the same on every rank and has
        # one dtype.
        dense = [
            tf.cast(tf.zeros_like(variable) if gradient is None else tf.convert_to_tensor(gradient), tf.float32)
            for gradient, variable in zip(gradients, variables, strict=True)
        ]
        return [*dense, tf.stack([loss, tf.reduce_sum(weights_N * is_correct_N)])]

    def _whole(self, earlier: list[Any], rows: Rows, global_weight: Any, share_of_streams: Any) -> tuple[Any, Any, Any]:
        """-> whether the update was applied, the gradient's norm, (loss, number correct)."""
        import tensorflow as tf

        inside = self._sum_inside
        assert inside is not None
        addends = self._wrapped(rows, global_weight, share_of_streams)
        addends = _sum_of(earlier, addends) if earlier else addends
        # A Python function takes its arguments from the host's memory. Before an accelerator can copy one there, it
        # has to finish all earlier computation, so `begin` is called when the gradients are complete.
        with tf.control_dependencies(addends):
            begun = tf.numpy_function(lambda _: inside.begin(), [tf.identity(addends[-1])], [])
        with tf.control_dependencies([begun]):
            sums = inside.sum_tensors([tf.identity(each) for each in addends])
        with tf.control_dependencies(sums):
            ended = tf.numpy_function(lambda _: inside.end(), [tf.identity(sums[-1])], [])
        with tf.control_dependencies([ended]):
            return *self._update([tf.identity(each) for each in sums]), sums[-1]

    def _update(self, sums: list[Any]) -> tuple[Any, Any]:
        import tensorflow as tf

        *gradients, metrics = sums
        model, optimizer = self._built.model, self._chosen.optimizer
        gradient_norm = tf.linalg.global_norm(gradients)
        is_usable = tf.math.is_finite(gradient_norm)
        if self._chosen.scales_loss:
            # If scaled gradients overflow, the optimizer skips the step and halves the scale. At a scale of 1 the
            # scale cannot be the cause.
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            is_usable |= scale > 1.0
            gradient_norm /= scale
        is_usable &= tf.math.is_finite(metrics[0])

        def update() -> Any:
            variables = model.trainable_variables
            typed = [tf.cast(gradient, variable.dtype) for gradient, variable in zip(gradients, variables, strict=True)]
            optimizer.apply(typed, variables)
            return tf.constant(True)

        return tf.cond(is_usable, update, lambda: tf.constant(False)), gradient_norm

    def _outputs(self, images_NHWC: Any) -> Any:
        import tensorflow as tf

        return tf.cast(self._built.model(self._standardize(images_NHWC), training=False), tf.float32)

    def _standardize(self, images_NHWC: Any) -> Any:
        return standardize(images_NHWC, self._scale)


def _outcome(is_applied: Any, gradient_norm: Any, metrics: Any) -> StepOutcome:
    loss, num_correct = metrics.numpy().tolist()
    # The optimizer has left out a scaled loss that overflowed, which is no failure.
    overflowed = bool(is_applied) and not math.isfinite(gradient_norm)
    return StepOutcome(loss, num_correct, float(gradient_norm), bool(is_applied), overflowed)


def _sum_of(left: list[Any], right: list[Any]) -> list[Any]:
    return [one + other for one, other in zip(left, right, strict=True)]
