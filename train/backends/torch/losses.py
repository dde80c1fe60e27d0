"""The loss of a PyTorch model for each kind of label, its answers, and what counts as right.

Shape legend: N batch, K outputs. Labels: class numbers (N,), 0 or 1 for each class (N, K), numbers (N,) or (N, K).
Where rows are mixed, classes are shares (N, K).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardmill.values import LabelKind
from train.backends.torch.runtime import import_torch

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


def answers_of(kind: LabelKind, are_logits: bool, outputs_NK: Any) -> Any:
    """Return the served outputs: probabilities, or numbers."""
    if not are_logits:
        return outputs_NK
    return outputs_NK.softmax(dim=1) if kind == "class" else outputs_NK.sigmoid()
