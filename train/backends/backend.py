"""The interface of a backend: it owns one framework and all code that imports it.

Outside it, an image is a NumPy array, state is a list of NumPy arrays, and the tensors that pass between ranks are
lists that nothing but the backend and its strategies look into.

Shape legend: N batch, H height, W width, C channels, K outputs (classes, or numbers of a label).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shardmill.values import Batch
from train.backends.class_weights import class_weights
from train.checkpoints.stored_arrays import ArrayLike, WeightFile
from train.contracts.step_outcome import StepOutcome
from train.contracts.world import World
from train.labels import LabelSpec

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest
    from train.config import TrainConfig

Predict = Callable[[np.ndarray], np.ndarray]
"""images_NHWC uint8 -> answers_NK float32: probabilities of classes, or the numbers that labels are."""


PredictWithLayer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
"""images_NHWC uint8 -> answers_NK as `Predict` gives them, and the output of a layer, flat: layer_ND float32."""


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """Loads the model of an export with the output of one of its layers."""

    file: str
    """The file or folder of an export that `load` reads."""
    load: Callable[[Path, str], PredictWithLayer]
    """(that file or folder, name of the layer). Raises UsageError if there is none of that name."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The functions inside an export."""

    answers: Predict
    outputs: Predict
    """Inputs of the loss: the logits behind probabilities if the export contains them, else the predictions."""
    outputs_are_logits: bool


SumInStep = Callable[[Any, str], Any]
"""(float64 tensor, a name equal on all ranks) -> its sum over all ranks; called inside the forward and the backward
pass, on every rank in the same order. In a compiled step each has a name of its own."""


@dataclass(frozen=True, slots=True)
class InputScale:
    """Value subtracted from the pixels of each channel, and then their divisor; on the 0..255 scale."""

    mean: tuple[float, ...]
    std: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Input and output shape of a model; the same in training, export and serving."""

    image_shape_HWC: tuple[int, int, int]
    labels: LabelSpec
    scale: InputScale
    class_weights: tuple[float, ...] = ()
    """Loss weight of each class; empty if all are equal."""
    steps_per_epoch: int = 0
    """Number of steps per epoch; 0 if unknown."""
    mixes_labels: bool = False
    """Whether labels of classes come as shares, (N, K), because `train.augment` mixes rows."""


def model_spec(manifest: Manifest, config: TrainConfig) -> ModelSpec:
    """The images and labels of a dataset; pixels standardized over the train split, or untouched."""
    num_channels = len(manifest.channel_mean)
    scale = InputScale((0.0,) * num_channels, (1.0,) * num_channels)
    if config.standardize:
        scale = InputScale(manifest.channel_mean, manifest.channel_std)
    labels = LabelSpec.of(manifest)
    steps_per_epoch = -(-manifest.splits["train"].num_rows // config.global_batch_size)
    shape_HWC = config.augment.shape_of(manifest.normalize.image_shape_HWC)
    weights = class_weights(config, manifest)
    return ModelSpec(shape_HWC, labels, scale, weights, steps_per_epoch, config.augment.mixes)


def synthetic_batch(spec: ModelSpec, num_rows: int) -> Batch:
    """(num_rows, H, W, C) random bytes, with labels as the model learns them; for steps that are only measured."""
    rng = np.random.default_rng(0)
    images_NHWC = rng.integers(0, 256, (num_rows, *spec.image_shape_HWC), dtype=np.uint8)
    kind, num_outputs = spec.labels.kind, spec.labels.num_outputs
    shape = (num_rows,) if kind == "float" else (num_rows, num_outputs)
    labels = np.zeros(shape, np.float32)
    if kind == "class" and not spec.mixes_labels:
        labels = rng.integers(0, num_outputs, num_rows)
    return Batch(images_NHWC, labels, np.ones(num_rows, np.float32), np.arange(num_rows), 0, 0)


class StatePart(Enum):
    """The three parts of a learner's state."""

    WEIGHTS = "trainable weights, or, with `train.ema_decay`, their averages; equal on all ranks between steps"
    OPTIMIZER = "optimizer state, and the trainable weights if WEIGHTS are averages; equal on all ranks between steps"
    OWN = "moving statistics and states of random generators: each rank has its own"


@dataclass(frozen=True, slots=True)
class NamedWeights:
    """All weights of a model, without optimizer and generators, by the names that files give them."""

    shapes: Mapping[str, tuple[int, ...]]
    """Of whole arrays, also if this rank holds a part."""
    head: tuple[str, ...]
    """The names of the last layer's."""
    arrays: Callable[[], dict[str, np.ndarray]]
    """-> copies of what they are now; only if this rank holds all of them."""
    assign: Callable[[Mapping[str, ArrayLike]], None]
    """Gives some of them new values, of which this rank's are read."""


class Learner(Protocol):
    """A model whose variables exist, with its loss and its optimizer."""

    config_sha256: str
    """Digest of the built model before any step: two factories that build the same model have the same digest."""
    outputs_are_logits: bool
    follows_schedule: bool
    """False if the optimizer of a compiled user model keeps the learning rate that it was compiled with."""

    export_backend: str
    """The backend that exports this kind of model, from the same arrays."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update."""
        ...

    def gradients(self, batch: Batch, global_weight: int, share_of_streams: float) -> list[Any]:
        """This rank's addends, as tensors: one gradient per weight, then (loss, number correct) as one float32 pair.

        The objective is the mean over the GLOBAL batch, of which `global_weight` is the number of samples: summed over
        all ranks, the addends are its gradient exactly. `share_of_streams` is this rank's part of the regularisation
        losses, which belong to no sample.
        """
        ...

    def are_finite(self, addends: list[Any]) -> bool:
        """Whether `apply` would find their loss and the norm of their gradient finite."""
        ...

    def apply(self, sums: list[Any], learning_rate: float | None) -> StepOutcome:
        """Update the weights by the summed addends, unless the loss or the gradient is not finite.

        `learning_rate`: what the schedule says; None to leave it to the optimizer.
        """
        ...

    def outputs(self, images_NHWC: np.ndarray) -> np.ndarray:
        """uint8 images -> the model's outputs_NK in inference mode, float32."""
        ...

    def arrays(self, part: StatePart) -> list[np.ndarray]:
        """A part of the state, in an order that the model's configuration fixes: copies, which no step changes."""
        ...

    def assign(self, part: StatePart, arrays: Sequence[np.ndarray], source: str) -> None:
        """Take over what `arrays` gave. Raises UsageError, before any assignment, if number, shapes or types differ.

        Averages become the model's weights, too, until `StatePart.OPTIMIZER` is assigned.
        """
        ...

    def averaged(self) -> AbstractContextManager[None]:
        """Inside it the model has the averages of its weights (`train.ema_decay`), and must not be trained."""
        ...

    def sum_moments_by(self, sum_in_step: SumInStep) -> None:
        """Set the function that sums batch norms' moments over ranks, if `train.sync_batch_norm` is set."""
        ...

    def moving_statistics(self) -> list[int]:
        """Return which arrays of `StatePart.OWN` are floating point: averages over batches that ranks can average
        again.
        """
        ...

    def read_weights(self, file: WeightFile) -> Mapping[str, ArrayLike]:
        """Name -> array of a file of weights. Raises UsageError for an invalid file; runs nothing in it."""
        ...

    def named_weights(self, like: Collection[str] = ()) -> NamedWeights:
        """The model's weights; where a framework has several ways to name them, as `like` names some."""
        ...

    def freeze(self) -> None:
        """From now on, updates do not change the weights of `train.freeze`, until `train.unfreeze_epoch`."""
        ...

    def unfreeze(self) -> None:
        """From now on, updates change these weights again, and the optimizer starts anew.

        Adam corrects its means by the number of steps: with that of the first epochs and without their gradients it
        would change what was frozen several times as fast as the learning rate says.
        """
        ...

    def decorrelate(self, rank: int) -> None:
        """Let each rank's random layers draw numbers of their own, after all were given rank 0's generators."""
        ...

    def weights_sha256(self) -> str:
        """Over shape, type and bytes of all weights in the model's own order; not of generators."""
        ...

    def answers(self, images_NHWC: np.ndarray) -> np.ndarray:
        """uint8 images -> what `Predict` gives, by the same operations as in training."""
        ...

    def check_exportable(self) -> None:
        """Raises UsageError if the model that was built cannot be exported; changes nothing."""
        ...

    def write_served(self, folder: Path) -> None:
        """The trained model with standardization and class names inside, as `Backend.load_served` reads it.

        One that gives logits carries them beside its answers.
        """
        ...

    def write_portable(self, folder: Path, images_NHWC: np.ndarray, max_abs_diff: float) -> str:
        """A file in the framework's own format, if one loads again and agrees. -> what its reader must know."""
        ...


class Recording(Protocol):
    """Records the computations of this process, with times, in the format of the framework's own tools."""

    def step(self, global_step: int) -> AbstractContextManager[None]:
        """Marks one training step in it."""
        ...

    def stop(self) -> None:
        """Stop recording and complete its files."""
        ...


class Backend(Protocol):
    """One framework."""

    served: str
    """The folder of an export that holds the form that `load_served` reads."""
    layer_output: str
    """`package.module:object`: the `LayerOutput` of its exports."""
    recomputes_sync_batch_norm: bool
    """Whether activation checkpointing works with `train.sync_batch_norm`: a block may sum its moments twice."""

    def start(self, world: World, seed: int) -> None:
        """Threads for this rank's share of the node, seeds, deterministic kernels."""
        ...

    def build(self, config: TrainConfig, spec: ModelSpec, *, has_numbers: bool = True) -> Learner:
        """Build the model that `train.model` names, with fresh weights from `train.seed`. Raises UsageError if it does
        not fit.

        `has_numbers`: false if the weights of rank 0 will be given to it, which has tried the model, too. It may have
        shapes alone then.
        """
        ...

    def load_served(self, folder: Path) -> ServedModel:
        """Load the model of an export."""
        ...

    def record(self, folder: Path) -> Recording:
        """Begin to record into files of `folder`; a process records one thing at a time."""
        ...
