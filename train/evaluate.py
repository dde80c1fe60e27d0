"""Exact figures over one split: every sample counted once at any world size, summed over ranks, divided once.

The loss is the negative log-likelihood of the true class, whatever loss the training minimised, so that models compare.
Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from shardmill.errors import TrainingError
from shardmill.values import Batch
from train.values import ClassFigures, Evaluation

# Keeps the logarithm of a probability of 0 finite, and no more than that. The training loss clips at 1e-7
# (backends/keras/build.py) to bound its gradient; none is taken here, and errors made with confidence should differ.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
TOP = 5

SumArray = Callable[[np.ndarray], np.ndarray]
"""A float64 array -> its sum over all ranks."""


class EvaluationSums:
    """What a rank adds up: the sums from which every figure follows by one division."""

    def __init__(self, num_classes: int) -> None:
        self.loss_sum = 0.0
        self.num_top5 = 0
        self.confusion_KK = np.zeros((num_classes, num_classes), dtype=np.int64)

    def add(self, outputs_NK: np.ndarray, outputs_are_logits: bool, batch: Batch) -> None:
        """Count a batch; rows of weight 0 are left out."""
        is_real_N = batch.weights_N > 0
        labels_N = batch.labels_N[is_real_N]
        outputs_NK = outputs_NK[is_real_N]
        rows_N = np.arange(len(labels_N))
        self.loss_sum -= float(_log_probabilities(outputs_NK, outputs_are_logits)[rows_N, labels_N].sum())
        # The place of the true class among all; of equal ones the lower index comes first, as argmax has it.
        of_true_N1 = outputs_NK[rows_N, labels_N][:, None]
        is_tied_before_NK = (outputs_NK == of_true_N1) & (np.arange(outputs_NK.shape[1]) < labels_N[:, None])
        self.num_top5 += int((((outputs_NK > of_true_N1) | is_tied_before_NK).sum(axis=1) < TOP).sum())
        np.add.at(self.confusion_KK, (labels_N, outputs_NK.argmax(axis=1)), 1)

    def summed(self, sum_array: SumArray) -> EvaluationSums:
        """One vector in one collective. Counts travel as float64, which is exact below 2^53."""
        total = sum_array(np.concatenate([[self.loss_sum, self.num_top5], self.confusion_KK.ravel()]))
        summed = EvaluationSums(len(self.confusion_KK))
        summed.loss_sum, summed.num_top5 = float(total[0]), int(total[1])
        summed.confusion_KK = total[2:].astype(np.int64).reshape(self.confusion_KK.shape)
        return summed


def evaluate_batches(
    outputs_of: Callable[[np.ndarray], np.ndarray],
    batches: Iterable[Batch],
    split: str,
    class_names: tuple[str, ...],
    *,
    sum_array: SumArray,
    outputs_are_logits: bool,
) -> Evaluation:
    """Figures of a model over the batches of one split; all ranks call it, each with its own, and all get the same.

    `outputs_of`: images_NHWC uint8 -> outputs_NK. Raises TrainingError if an output is not a number.
    """
    sums = EvaluationSums(len(class_names))
    for batch in batches:
        sums.add(outputs_of(batch.images_NHWC), outputs_are_logits, batch)
    return build_evaluation(split, class_names, sums.summed(sum_array))


def evaluate_predictions(
    probabilities_of: Callable[[np.ndarray], np.ndarray],
    batches: Iterable[Batch],
    split: str,
    class_names: tuple[str, ...],
) -> Evaluation:
    """The same figures in one process, for anything that maps images_NHWC uint8 to probabilities_NK (an export)."""
    return evaluate_batches(
        probabilities_of, batches, split, class_names, sum_array=lambda array: array, outputs_are_logits=False
    )


def build_evaluation(split: str, class_names: tuple[str, ...], sums: EvaluationSums) -> Evaluation:
    """The figures that follow from the sums. Raises TrainingError if the loss is not a number."""
    confusion_KK = sums.confusion_KK
    num_samples = int(confusion_KK.sum())
    loss = sums.loss_sum / num_samples
    if not np.isfinite(loss):
        raise TrainingError(
            f"the evaluation on {split!r} gave a loss of {loss}", "expected finite outputs", "lower train.learning_rate"
        )
    num_true_K, num_predicted_K, num_right_K = (
        confusion_KK.sum(axis=1),
        confusion_KK.sum(axis=0),
        confusion_KK.diagonal(),
    )
    per_class = tuple(
        ClassFigures(
            name=name,
            num_samples=int(num_true),
            precision=float(num_right / num_predicted) if num_predicted else 0.0,
            recall=float(num_right / num_true) if num_true else 0.0,
        )
        for name, num_true, num_predicted, num_right in zip(
            class_names, num_true_K, num_predicted_K, num_right_K, strict=True
        )
    )
    return Evaluation(
        split=split,
        num_samples=num_samples,
        loss=loss,
        accuracy=float(num_right_K.sum() / num_samples),
        top5_accuracy=sums.num_top5 / num_samples if len(class_names) > TOP else None,
        per_class=per_class,
        confusion=tuple(tuple(row) for row in confusion_KK.tolist()),
    )


def evaluation_section(evaluation: Evaluation | None) -> dict[str, str | int | float | None] | None:
    """The figures that a run's summary holds; None if there was no split to evaluate on."""
    if evaluation is None:
        return None
    return {name: getattr(evaluation, name) for name in ("split", "num_samples", "loss", "accuracy", "top5_accuracy")}


def _log_probabilities(outputs_NK: np.ndarray, outputs_are_logits: bool) -> np.ndarray:
    """In float64: the sum over a split should not depend on how it was cut into ranks."""
    outputs_NK = np.asarray(outputs_NK, dtype=np.float64)
    if not outputs_are_logits:
        return np.log(np.clip(outputs_NK, SMALLEST_PROBABILITY, 1.0))
    shifted_NK = outputs_NK - outputs_NK.max(axis=1, keepdims=True)
    return shifted_NK - np.log(np.exp(shifted_NK).sum(axis=1, keepdims=True))
