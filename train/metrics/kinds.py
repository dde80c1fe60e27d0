"""The metrics of each kind of labels: one class an image, several classes, or numbers.

One class: accuracy, top five, a sparse confusion matrix, and the most confident mistakes. A model may answer with a
class that the dataset does not have: all such count as one more, behind the dataset's. Several classes: exact average
precision of each, from the probabilities of all samples; they are kept (5 bytes for each sample and class) and gathered
class by class, so a rank holds its own part and a block of everyone's. Numbers: mean squared error as the loss, and
mean absolute error.

Shape legend: N batch, K classes or numbers of a label, C columns of the model's classes, P pairs of a true and a
predicted class that occur, M mistakes, B classes of a block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardmill.values import Batch
from train.contracts.values import Confusion, Evaluation, MetricsOfClass, Mistake
from train.labels import LabelSpec
from train.metrics.evaluate import Exchange, check_finite

TOP = 5
NUM_MISTAKES = 24
_MISTAKE = np.dtype([("confidence", "f8"), ("sample_id", "i8"), ("pair", "i8")])


class ClassMetrics:
    """`train.metrics.Metrics` for labels that are class numbers.

    A pair of classes is one number, true * (K + 1) + predicted: at 10,000 classes a matrix would take 800 MB on every
    rank.
    """

    def __init__(self, labels: LabelSpec) -> None:
        self._names = labels.class_names
        self._loss_sum = 0.0
        self._num_top5 = 0
        self._pairs: list[np.ndarray] = []
        self._mistakes_M = np.empty(0, _MISTAKE)

    def add(self, scores_NC: np.ndarray, batch: Batch) -> None:
        """The first K columns are the dataset's classes; those behind them are others that the model knows."""
        is_real_N, num_classes = batch.weights_N > 0, len(self._names)
        labels_N, scores_NC = batch.labels_N[is_real_N], scores_NC[is_real_N]
        rows_N = np.arange(len(labels_N))
        self._loss_sum -= float(scores_NC[rows_N, labels_N].sum())
        # The place of the true class among all; of equal ones the lower index comes first, as argmax has it.
        of_true_N1 = scores_NC[rows_N, labels_N][:, None]
        is_tied_before_NC = (scores_NC == of_true_N1) & (np.arange(scores_NC.shape[1]) < labels_N[:, None])
        self._num_top5 += int((((scores_NC > of_true_N1) | is_tied_before_NC).sum(axis=1) < TOP).sum())
        predicted_N = np.minimum(scores_NC.argmax(axis=1), num_classes)
        self._pairs.append(labels_N * (num_classes + 1) + predicted_N)
        is_wrong_N = predicted_N != labels_N
        found_M = np.empty(int(is_wrong_N.sum()), _MISTAKE)
        found_M["confidence"] = np.exp(scores_NC[is_wrong_N].max(axis=1)).round(6)
        found_M["sample_id"] = batch.sample_ids_N[is_real_N][is_wrong_N]
        found_M["pair"] = self._pairs[-1][is_wrong_N]
        self._mistakes_M = _most_confident([self._mistakes_M, found_M])

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        pairs_P, counts_P = np.unique(np.concatenate([*self._pairs, np.empty(0, np.int64)]), return_counts=True)
        mine = np.array([self._loss_sum, self._num_top5, len(self._mistakes_M)]).tobytes()
        of_ranks = exchange.gather_bytes(mine + self._mistakes_M.tobytes() + np.stack([pairs_P, counts_P]).tobytes())
        sums = [np.frombuffer(data[:24]) for data in of_ranks]
        ends = [24 + int(each[2]) * _MISTAKE.itemsize for each in sums]
        mistakes_M = [np.frombuffer(data[24:end], _MISTAKE) for data, end in zip(of_ranks, ends, strict=True)]
        tables = [np.frombuffer(data[end:], np.int64).reshape(2, -1) for data, end in zip(of_ranks, ends, strict=True)]
        all_pairs = np.concatenate([table[0] for table in tables])
        pairs_P, place = np.unique(all_pairs, return_inverse=True)
        # Integers in float64 are exact below 2^53.
        counts_P = np.bincount(place, np.concatenate([table[1] for table in tables])).astype(np.int64)
        loss = math.fsum(each[0] for each in sums) / max(1, counts_P.sum())
        check_finite(loss, split)
        num_columns = len(self._names) + 1
        mistakes = tuple(
            Mistake(sample_id, pair // num_columns, pair % num_columns, confidence)
            for confidence, sample_id, pair in _most_confident(mistakes_M).tolist()
        )
        return self._evaluation(split, loss, int(sum(each[1] for each in sums)), pairs_P, counts_P, mistakes)

    def _evaluation(
        self, split: str, loss: float, num_top5: int, pairs_P: np.ndarray, counts_P: np.ndarray,
        mistakes: tuple[Mistake, ...],
    ) -> Evaluation:  # fmt: skip
        num_classes, num_samples = len(self._names), int(counts_P.sum())
        true_P, predicted_P = np.divmod(pairs_P, num_classes + 1)
        is_right_P = true_P == predicted_P
        num_true_K = np.bincount(true_P, counts_P, num_classes)
        num_predicted_K = np.bincount(predicted_P, counts_P, num_classes + 1)[:num_classes]
        num_right_K = np.bincount(true_P[is_right_P], counts_P[is_right_P], num_classes)
        per_class = tuple(
            MetricsOfClass(
                name=name,
                num_samples=int(num_true),
                precision=float(num_right / num_predicted) if num_predicted else 0.0,
                recall=float(num_right / num_true) if num_true else 0.0,
            )
            for name, num_true, num_predicted, num_right in zip(
                self._names, num_true_K, num_predicted_K, num_right_K, strict=True
            )
        )
        return Evaluation(
            split=split,
            num_samples=num_samples,
            loss=loss,
            accuracy=float(num_right_K.sum() / num_samples),
            top5_accuracy=num_top5 / num_samples if num_classes > TOP else None,
            per_class=per_class,
            confused=Confusion(tuple(true_P.tolist()), tuple(predicted_P.tolist()), tuple(counts_P.tolist()), mistakes),
        )


def _most_confident(found: Sequence[np.ndarray]) -> np.ndarray:
    """Of equally confident ones the lowest sample ids, so that they are the same at any world size."""
    all_M = np.concatenate(found)
    return all_M[np.lexsort((all_M["sample_id"], -all_M["confidence"]))[:NUM_MISTAKES]]


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
        per_class: list[MetricsOfClass] = []
        block = max(1, BLOCK_BYTES // (_BYTES_EACH * max(1, num_samples)))
        for start in range(0, num_classes, block):
            classes = slice(start, start + block)
            all_scores_NB, all_truth_NB = _gathered(probabilities_NK[:, classes], truth_NK[:, classes], exchange)
            per_class += [
                _metrics_of_class(name, all_scores_NB[:, place], all_truth_NB[:, place])
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


def _metrics_of_class(name: str, scores_N: np.ndarray, truth_N: np.ndarray) -> MetricsOfClass:
    is_chosen_N = scores_N >= 0.5
    num_right, num_chosen, num_true = int((is_chosen_N & truth_N).sum()), int(is_chosen_N.sum()), int(truth_N.sum())
    return MetricsOfClass(
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


class NumberMetrics:
    """`train.metrics.Metrics` for float32 labels."""

    def __init__(self, labels: LabelSpec) -> None:
        self._labels = labels
        self._sums = np.zeros(3)
        """Sums of squared errors, of absolute errors, and of samples."""

    def add(self, scores_NK: np.ndarray, batch: Batch) -> None:
        is_real_N = batch.weights_N > 0
        scores_NK = scores_NK[is_real_N]
        errors_NK = scores_NK - batch.labels_N[is_real_N].reshape(scores_NK.shape)
        self._sums += (float((errors_NK**2).sum()), float(np.abs(errors_NK).sum()), len(errors_NK))

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        squared, absolute, num_samples = exchange.sum_array(self._sums).tolist()
        num_numbers = max(1, num_samples * self._labels.num_outputs)
        check_finite(squared, split)
        return Evaluation(
            split=split,
            num_samples=int(num_samples),
            loss=squared / num_numbers,
            accuracy=None,
            top5_accuracy=None,
            per_class=(),
            label_kind=self._labels.kind,
            mean_absolute_error=absolute / num_numbers,
        )
