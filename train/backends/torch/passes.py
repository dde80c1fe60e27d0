"""How a PyTorch model computes on a rank: forward and backward pass of a microbatch, and its outputs; with the
precision, the random bits and the loss of both.

`TorchLearner` computes by `WholeModel`, unless a strategy places parts of the model on other ranks, too: those of a
pipeline compute by `train/backends/torch/stages.py`.

Shape legend: N batch, H height, W width, C channels, K outputs. Labels: class numbers (N,), 0 or 1 for each class
(N, K), numbers (N,) or (N, K). Where rows are mixed, classes are shares (N, K).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from shardmill.values import Batch, LabelKind
from train.backends.torch.runtime import device, import_torch
from train.layers.sample_bits import drawing, number_layers, sample_keys

if TYPE_CHECKING:
    from train.backends.torch.recompute import Recomputed
    from train.config import TrainConfig


Objective = Callable[[Any, Any], Any]
"""(outputs_NK, their places in the microbatch) -> what the backward pass differentiates: their addend to the loss of
the global batch. It counts what it is called with."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a learner computes with."""

    classifier: Any
    """uint8 images_NHWC -> outputs_NK; its `inputs_of` -> what the module is given."""
    image_shape_HWC: tuple[int, int, int]
    draws: SampleDraws
    recomputed: Recomputed
    precision: Precision


class Passes(Protocol):
    """Both passes, and outputs without them."""

    def differentiate(
        self, batch: Batch, weights_N: Any, objective: Objective, before_backward: Callable[[], None]
    ) -> None:
        """Add the gradient of `objective` to what is at the weights. `weights_N`: those of `batch`, on the device."""
        ...

    def outputs(self, images_NHWC: Any) -> Any:
        """uint8 images -> float32 outputs_NK of all of them, without a gradient."""
        ...


MakePasses = Callable[[Parts], Passes]


class WholeModel:
    """One forward and one backward pass, by all of the model."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def differentiate(
        self, batch: Batch, weights_N: Any, objective: Objective, before_backward: Callable[[], None]
    ) -> None:
        parts = self._parts
        with parts.draws.of(batch):
            images_NHWC = on_device(batch.images_NHWC)
            with parts.precision.computing(), parts.recomputed.forward(weights_N):
                outputs_NK = parts.classifier(images_NHWC).float()
            loss = objective(outputs_NK, slice(None))
            before_backward()
            loss.backward()

    def outputs(self, images_NHWC: Any) -> Any:
        return self._parts.classifier(images_NHWC).float()


def on_device(array: Any) -> Any:
    """A NumPy array as a tensor."""
    return import_torch().from_numpy(array).to(device(), non_blocking=True)


class SampleDraws:
    """The random bits of one model's layers; without such layers, a step has no extra cost."""

    def __init__(self, config: TrainConfig, model: Any, is_keras: bool) -> None:
        self._seed = config.seed
        self._num_layers = _number(model, is_keras)

    def of(self, batch: Batch) -> AbstractContextManager[None]:
        """Around the forward and the backward pass of `batch`."""
        keys_N = self.keys(batch)
        return nullcontext() if keys_N is None else drawing(keys_N)

    def keys(self, batch: Batch) -> Any:
        """What `drawing` takes for the samples of `batch`; None if no layer draws."""
        if not self._num_layers:
            return None
        keys_N = sample_keys(self._seed, batch.epoch, batch.sample_ids_N)
        return import_torch().from_numpy(keys_N).to(device())


def _number(model: Any, is_keras: bool) -> int:
    if is_keras:
        from train.backends.keras.build import number_sample_dropouts

        return number_sample_dropouts(model)
    from train.layers.torch import SampleDropout

    return number_layers(module for module in model.modules() if isinstance(module, SampleDropout))


# As Keras's LossScaleOptimizer has them: the first scale, and the updates without an overflow before it is doubled.
FIRST_SCALE = 2.0**15
NUM_UPDATES_TO_DOUBLE = 2000
# An overflow at the smallest cannot come from the scale.
SMALLEST_SCALE = 1.0
# Gradients that are all 0 never overflow.
LARGEST_SCALE = 2.0**24


class Precision:
    """`name`: the value of `train.mixed_precision`."""

    def __init__(self, name: str) -> None:
        torch = import_torch()
        self._dtype = {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
        self._scales = name == "float16"
        # Not on a GPU: each step asks for them.
        self._scale = torch.tensor(FIRST_SCALE, dtype=torch.float32)
        self._num_updates = torch.zeros((), dtype=torch.int64)

    def computing(self) -> AbstractContextManager[None]:
        """Around a forward pass."""
        return nullcontext() if self._dtype is None else import_torch().autocast(device().type, dtype=self._dtype)

    def objective(self, loss: Any) -> Any:
        """Return the value to differentiate in place of the loss."""
        return loss * float(self._scale) if self._scales else loss

    def unscaled(self, gradients: list[Any]) -> list[Any]:
        """The loss's own gradients, from those of the objective."""
        return [each / float(self._scale) for each in gradients] if self._scales else gradients

    def lower(self) -> bool:
        """Gradients of a finite loss have overflowed: halve the scale. False if that is not the reason."""
        if not self._scales or float(self._scale) <= SMALLEST_SCALE:
            return False
        self._scale.copy_((self._scale / 2).clamp(min=SMALLEST_SCALE))
        self._num_updates.zero_()
        return True

    def after_update(self) -> None:
        """Gradients were finite: after many of such updates in a row the scale is doubled."""
        if not self._scales:
            return
        self._num_updates += 1
        if int(self._num_updates) == NUM_UPDATES_TO_DOUBLE:
            self._scale.copy_((self._scale * 2).clamp(max=LARGEST_SCALE))
            self._num_updates.zero_()

    def begin(self) -> None:
        """Forget all, as a fresh optimizer has."""
        self._scale.fill_(FIRST_SCALE)
        self._num_updates.zero_()

    def state(self) -> list[Any]:
        """The tensors that a resumed training needs."""
        return [self._scale, self._num_updates] if self._scales else []


# As in train/backends/keras/losses.py.
SMALLEST_PROBABILITY = 1e-7


@dataclass(frozen=True, slots=True)
class Loss:
    """That of a training."""

    kind: LabelKind
    are_logits: bool
    label_smoothing: float
    class_weights: tuple[float, ...]
    """Empty if all are equal."""

    def sums(self, outputs_NK: Any, labels: Any, weights_N: Any) -> tuple[Any, Any]:
        """-> the weighted sum of the losses, and the number correct."""
        losses_N = per_sample_losses(self.kind, outputs_NK, labels, self.are_logits, self.label_smoothing)
        if self.class_weights:
            losses_N = losses_N * loss_weights(self.class_weights, labels)
        is_right_N = right_of(self.kind, outputs_NK, labels, self.are_logits)
        return (weights_N * losses_N).sum(), (weights_N * is_right_N).sum()


def per_sample_losses(kind: LabelKind, outputs_NK: Any, labels: Any, are_logits: bool, label_smoothing: float) -> Any:
    """Softmax cross-entropy of each sample; of several classes the mean of the sigmoids'; of numbers squared errors."""
    torch = import_torch()
    functional = torch.nn.functional
    if kind == "multi_label":
        targets_NK = labels * (1.0 - label_smoothing) + label_smoothing / 2
        if are_logits:
            losses_NK = functional.binary_cross_entropy_with_logits(outputs_NK, targets_NK, reduction="none")
        else:
            clipped_NK = outputs_NK.clamp(SMALLEST_PROBABILITY, 1.0 - SMALLEST_PROBABILITY)
            losses_NK = functional.binary_cross_entropy(clipped_NK, targets_NK, reduction="none")
        return losses_NK.mean(dim=1)
    if kind != "class":
        return (outputs_NK - labels.reshape(outputs_NK.shape)).square().mean(dim=1)
    if are_logits:
        return functional.cross_entropy(outputs_NK, labels, reduction="none", label_smoothing=label_smoothing)
    outputs_NK = outputs_NK.clamp(SMALLEST_PROBABILITY, 1.0).log()
    shares_NK = functional.one_hot(labels, outputs_NK.shape[1]) if labels.ndim == 1 else labels
    targets_NK = shares_NK * (1.0 - label_smoothing)
    return -((targets_NK + label_smoothing / outputs_NK.shape[1]) * outputs_NK).sum(dim=1)


def loss_weights(class_weights: tuple[float, ...], labels: Any) -> Any:
    """The weight of each sample's class; of a mixed row the mean of its classes' weights."""
    weights_K = import_torch().tensor(class_weights, device=labels.device)
    return weights_K[labels] if labels.ndim == 1 else labels @ weights_K


def right_of(kind: LabelKind, outputs_NK: Any, labels: Any, are_logits: bool) -> Any:
    """Whether the class of each sample is right; of several classes the share that is; 0 for numbers. float32 (N,).

    The class of a mixed row is that of the larger share.
    """
    if kind == "class":
        classes_N = labels if labels.ndim == 1 else labels.argmax(dim=1)
        return (outputs_NK.argmax(dim=1) == classes_N).float()
    if kind == "multi_label":
        return ((outputs_NK >= (0.0 if are_logits else 0.5)) == (labels > 0.5)).float().mean(dim=1)
    return outputs_NK.new_zeros(len(outputs_NK))


def predictions_of(kind: LabelKind, are_logits: bool, outputs_NK: Any) -> Any:
    """Return the served outputs: probabilities, or numbers."""
    if not are_logits:
        return outputs_NK
    return outputs_NK.softmax(dim=1) if kind == "class" else outputs_NK.sigmoid()
