"""Keras 3 on TensorFlow: a learner made of its model, its optimizer and its compiled step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.values import Batch
from train.api import NamedWeights, ServedModel, StatePart, SumInStep
from train.backends.keras.batch_norms import KerasBatchNorms, TensorFlowMoments, limit_momentum
from train.backends.keras.build import BuiltModel, build_model, named_weights, read_weights
from train.backends.keras.optimizers import ChosenOptimizer, build_optimizer, check_unfreezable
from train.backends.keras.recompute import Segments
from train.backends.keras.runtime import assign_variables, reseed_seed_states, start_tensorflow, traced
from train.backends.keras.serving import (
    KERAS_FILE,
    SAVED_MODEL,
    KerasCheck,
    ServingModel,
    load_saved_model,
    write_keras_file,
    write_saved_model,
)
from train.backends.keras.step import Run, SumInside, TrainStep
from train.backends.model_spec import ModelSpec
from train.backends.rules import alone, ema_decay_after, largest_momentum, with_averages
from train.checkpoints.arrays import ArrayLike, WeightFile, arrays_sha256
from train.contracts.values import StepOutcome
from train.contracts.world import World
from train.models import MODELS

if TYPE_CHECKING:
    from train.config import TrainConfig


class WeightAverages:
    """One average for each weight, in the weight's type. Before the first update it is the weight itself."""

    def __init__(self, weights: Sequence[Any], limit: float) -> None:
        import keras

        self.weights = tuple(weights)
        self.averages = tuple(
            keras.Variable(np.asarray(weight), dtype=weight.dtype, trainable=False, name="average")
            for weight in self.weights
        )
        self.num_updates = keras.Variable(0, dtype="int64", trainable=False, name="num_averaged")
        self._limit = limit
        self._compiled_move = traced(self._move)

    def update(self) -> None:
        """After an update of the weights."""
        import tensorflow as tf

        num_updates = int(np.asarray(self.num_updates))
        self._compiled_move(tf.constant(1 - ema_decay_after(num_updates, self._limit), tf.float32))
        self.num_updates.assign(num_updates + 1)

    def begin(self) -> None:
        """Forget all: other weights were given."""
        self.num_updates.assign(0)
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.assign(np.asarray(weight))

    def give(self) -> None:
        """Let the weights be their averages."""
        for average, weight in zip(self.averages, self.weights, strict=True):
            weight.assign(np.asarray(average))

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside it the model computes with the averages; behind it with its weights."""
        kept = [np.array(weight) for weight in self.weights]
        self.give()
        try:
            yield
        finally:
            for weight, value in zip(self.weights, kept, strict=True):
                weight.assign(value)

    def _move(self, share: Any) -> None:
        import tensorflow as tf

        for average, weight in zip(self.averages, self.weights, strict=True):
            # In this form a weight that is frozen keeps its bits.
            old = tf.convert_to_tensor(average.value)
            average.assign(old + tf.cast(share, old.dtype) * (tf.convert_to_tensor(weight.value) - old))


class TensorFlowRecording:
    """`train.api.Recording`: `plugins/profile/<time>/<host>.xplane.pb`."""

    def __init__(self, folder: Path) -> None:
        import tensorflow as tf

        # Python's own calls are too many to record: they would slow a step down, and hide its operations.
        tf.profiler.experimental.start(str(folder), tf.profiler.experimental.ProfilerOptions(python_tracer_level=0))

    def step(self, global_step: int) -> AbstractContextManager[None]:
        import tensorflow as tf

        # `_r`: the root of a step, by which the tools tell steps apart.
        return tf.profiler.experimental.Trace("train", step_num=global_step, _r=1)

    def stop(self) -> None:
        import tensorflow as tf

        tf.profiler.experimental.stop()


class KerasLearner:
    """`train.api.Learner` of a Keras model."""

    export_backend = "keras"

    def __init__(
        self,
        config: TrainConfig,
        built: BuiltModel,
        chosen: ChosenOptimizer,
        spec: ModelSpec,
        sum_in_step: SumInStep | None = None,
    ) -> None:
        self.config_sha256 = built.config_sha256
        self.outputs_are_logits = built.outputs_are_logits
        self.follows_schedule = chosen.follows_schedule
        moments = TensorFlowMoments(sum_in_step or alone)
        norms = KerasBatchNorms(built.model, config.model, moments) if config.sync_batch_norm else None
        segments = Segments(config.model, built.model) if config.memory.activation_checkpointing == "on" else None
        self.step = TrainStep(built, chosen, spec.scale, config.num_accumulated, norms, segments, config.seed)
        self._model = built.model
        self._frozen = built.frozen
        self._is_frozen = False
        # As they are now: what is frozen for some epochs keeps its place among the weights.
        self._trainable = tuple(built.model.trainable_variables)
        self._own = tuple(built.model.non_trainable_variables)
        self._optimizer = chosen.optimizer
        self._fresh_optimizer: list[np.ndarray] = []
        if config.unfreeze_epoch:
            check_unfreezable(chosen)
            self._fresh_optimizer = [np.asarray(variable) for variable in self._optimizer.variables]
        self._averages = WeightAverages(self._trainable, config.ema_decay) if config.ema_decay else None
        self._serving = ServingModel(built.model, built.outputs_are_logits, spec)

    @property
    def learning_rate(self) -> float:
        return float(np.asarray(self._optimizer.learning_rate))

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        return self.step.gradients(batch, global_weight, share_of_streams)

    def are_finite(self, addends: list[Any]) -> bool:
        return self.step.are_finite(addends)

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        return self._with_averages(self.step.apply(sums, learning_rate))

    def whole_step(
        self, batch: Batch, global_weight: int, share_of_streams: float, learning_rate: float | None
    ) -> StepOutcome:
        """`gradients`, a sum over ranks and `apply` as one compiled function: for strategies that can sum inside it."""
        return self._with_averages(self.step.whole(batch, global_weight, share_of_streams, learning_rate))

    def _with_averages(self, outcome: StepOutcome) -> StepOutcome:
        if self._averages and outcome.is_applied and not outcome.overflowed:
            self._averages.update()
        return outcome

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        return self.step.outputs(images_NHWC)

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        return [np.asarray(variable) for variable in self.variables(part)]

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        assign_variables(self.variables(part), arrays, source)
        if self._averages and part is StatePart.WEIGHTS:
            self._averages.give()

    def averaged(self) -> AbstractContextManager[None]:
        return self._averages.swapped() if self._averages else nullcontext()

    def read_weights(self, file: WeightFile) -> Mapping[str, ArrayLike]:
        return read_weights(file)

    def named_weights(self, like: Collection[str] = ()) -> NamedWeights:
        named = named_weights(self._model, like)
        return with_averages(named, self._averages.begin) if self._averages else named

    def freeze(self) -> None:
        # Asked for before every epoch; tracing takes seconds.
        if not self._is_frozen:
            self._is_frozen = True
            self._frozen.set_trainable(False)
            self.step.compile()

    def unfreeze(self) -> None:
        self._is_frozen = False
        self._frozen.set_trainable(True)
        self.step.compile()
        assign_variables(self._optimizer.variables, self._fresh_optimizer, "a fresh optimizer")

    def reseed(self, rank: int) -> None:
        reseed_seed_states(self._own, rank)

    def weights_sha256(self) -> str:
        return arrays_sha256(np.asarray(variable) for variable in self._model.weights)

    def predictions(self, images_NHWC: np.ndarray) -> np.ndarray:
        return self._serving.predict(images_NHWC)

    def check_exportable(self) -> None:
        """TensorFlow traces a model for its first step as it does for an export."""

    def write_served(self, folder: Path) -> None:
        write_saved_model(self._serving, folder / SAVED_MODEL)

    def write_portable(self, folder: Path, images_NHWC: np.ndarray, max_abs_diff: float) -> str:
        agrees = KerasCheck(self._serving.predictions_name, images_NHWC, self.predictions(images_NHWC), max_abs_diff)
        return write_keras_file(self._serving, folder / KERAS_FILE, agrees)

    def sum_by(self, sum_inside: SumInside) -> None:
        """Let `whole_step` sum over ranks."""
        self.step.sum_by(sum_inside)

    def wrap(self, run: Run) -> None:
        """Compute gradients inside `run`: what strategies of tf.distribute need."""
        self.step.wrap(run)

    def variables(self, part: StatePart) -> Sequence[Any]:
        """Keras's own, in the order of `arrays`: for strategies that spread a variable over devices."""
        match part:
            case StatePart.WEIGHTS:
                return self._averages.averages if self._averages else self._trainable
            case StatePart.OPTIMIZER:
                if self._averages is None:
                    return self._optimizer.variables
                return [*self._optimizer.variables, self._averages.num_updates, *self._trainable]
            case StatePart.OWN:
                return self._own


class KerasBackend:
    """`train.api.Backend` of Keras 3 on TensorFlow."""

    served = SAVED_MODEL
    layer_output = "train.backends.keras.serving:LAYER_OUTPUT"
    recomputes_sync_batch_norm = False

    def start(self, world: World, seed: int) -> None:
        start_tensorflow(world, seed)

    def build(
        self,
        config: TrainConfig,
        spec: ModelSpec,
        *,
        materialized: bool = True,
        sum_in_step: SumInStep | None = None,
    ) -> KerasLearner:
        built = build_model(config, spec.image_shape_HWC, spec.labels, spec.class_weights)
        if not MODELS.is_own(config.model):
            limit_momentum(built.model, largest_momentum(spec.steps_per_epoch))
        chosen = build_optimizer(config, built.model, built.compiled_optimizer)
        return KerasLearner(config, built, chosen, spec, sum_in_step)

    def load_served(self, folder: Path) -> ServedModel:
        return load_saved_model(folder / SAVED_MODEL)

    def record(self, folder: Path) -> TensorFlowRecording:
        return TensorFlowRecording(folder)


KERAS = KerasBackend()
