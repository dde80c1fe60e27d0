"""Metrics for several classes per image: exact average precision of each class, from the probabilities of all samples.

They are kept (5 bytes for each sample and class) and gathered class by class, so a rank holds its own part and a
block of everyone's. Shape legend: N batch, K classes, B classes of a block.
"""

from __future__ import annotations

import numpy as np

from shardmill.values import Batch
from train.contracts.values import ClassFigures, Evaluation
from train.labels import LabelSpec
from train.metrics.metrics import Exchange, check_finite

BLOCK_BYTES = 64_000_000
_BYTES_EACH = 5


class MultiLabelMetrics:
    """`train.metrics.Metrics` for labels that are 0 or 1 for each class."""

    def __init__(self, labels: LabelSpec) -> None:
        self._names = labels.class_names
        self._loss_sum = 0.0
        self._probabilities = [np.empty((0, len(self._names)), np.float32)]
        self._truths = [np.empty((0, len(self._names)), np.bool_)]

    def add(self, scores_NK: np.ndarray, batch: Batch) -> None:
        is_real_N = batch.weights_N > 0
        truth_NK, scores_NK = batch.labels_N[is_real_N] > 0.5, scores_NK[is_real_N]
        # log(1 + exp(-x)) for a yes, log(1 + exp(x)) for a no.
        self._loss_sum += float(np.logaddexp(0, np.where(truth_NK, -scores_NK, scores_NK)).mean(axis=1).sum())
        # As float32, in which an export answers: what is equal there counts as equal here.
        self._probabilities.append(np.exp(-np.logaddexp(0, -scores_NK)).astype(np.float32))
        self._truths.append(truth_NK)

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        probabilities_NK, truth_NK = np.concatenate(self._probabilities), np.concatenate(self._truths)
        num_right = int(((probabilities_NK >= 0.5) == truth_NK).sum())
        total = exchange.sum_array(np.array([self._loss_sum, num_right, len(probabilities_NK)], np.float64))
        num_samples, num_classes = int(total[2]), len(self._names)
        loss = float(total[0]) / max(1, num_samples)
        check_finite(loss, split)
        per_class: list[ClassFigures] = []
        block = max(1, BLOCK_BYTES // (_BYTES_EACH * max(1, num_samples)))
        for start in range(0, num_classes, block):
            classes = slice(start, start + block)
            all_scores_NB, all_truth_NB = _gathered(probabilities_NK[:, classes], truth_NK[:, classes], exchange)
            per_class += [
                _figures(name, all_scores_NB[:, place], all_truth_NB[:, place])
                for place, name in enumerate(self._names[classes])
            ]
        known = [each.average_precision for each in per_class if each.average_precision is not None]
        return Evaluation(
            split=split,
            num_samples=num_samples,
            loss=loss,
            accuracy=float(total[1]) / max(1, num_samples * num_classes),
            top5_accuracy=None,
            per_class=tuple(per_class),
            label_kind="multi_label",
            mean_average_precision=float(np.mean(known)) if known else 0.0,
        )


def average_precision(scores_N: np.ndarray, truth_N: np.ndarray) -> float | None:
    """Precision at each distinct score, weighted by the recall that it adds; None without a sample of the class.

    Samples of equal score count together, so their order does not matter.
    """
    order_N = np.argsort(-scores_N, kind="stable")
    scores_N, truth_N = scores_N[order_N], truth_N[order_N]
    if not truth_N.any():
        return None
    ends = np.flatnonzero(np.append(np.diff(scores_N) != 0, True))
    num_right = np.cumsum(truth_N)[ends]
    return float((np.diff(num_right, prepend=0) * num_right / (ends + 1)).sum() / num_right[-1])


def _figures(name: str, scores_N: np.ndarray, truth_N: np.ndarray) -> ClassFigures:
    is_chosen_N = scores_N >= 0.5
    num_right, num_chosen, num_true = int((is_chosen_N & truth_N).sum()), int(is_chosen_N.sum()), int(truth_N.sum())
    return ClassFigures(
        name=name,
        num_samples=num_true,
        precision=num_right / num_chosen if num_chosen else 0.0,
        recall=num_right / num_true if num_true else 0.0,
        average_precision=average_precision(scores_N, truth_N),
    )


def _gathered(scores_NB: np.ndarray, truth_NB: np.ndarray, exchange: Exchange) -> tuple[np.ndarray, np.ndarray]:
    """Of all ranks."""
    num_classes = scores_NB.shape[1]
    # One byte more, because not all ranks may send none.
    of_ranks = exchange.gather_bytes(b"\0" + scores_NB.tobytes() + truth_NB.tobytes())
    scores, truths = [], []
    for data in of_ranks:
        num_rows = (len(data) - 1) // (_BYTES_EACH * num_classes)
        border = 1 + 4 * num_rows * num_classes
        scores.append(np.frombuffer(data[1:border], np.float32).reshape(num_rows, num_classes))
        truths.append(np.frombuffer(data[border:], np.bool_).reshape(num_rows, num_classes))
    return np.concatenate(scores), np.concatenate(truths)
