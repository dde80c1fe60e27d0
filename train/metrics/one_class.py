"""Metrics for one class per image: accuracy, top five, a sparse confusion matrix, and the most confident mistakes.

A model may answer with a class that the dataset does not have: all such count as one more, behind the dataset's.
Shape legend: N batch, K classes, C columns of the model's classes, P pairs of a true and a predicted class that occur,
M mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from shardmill.values import Batch
from train.contracts.values import ClassFigures, Confusion, Evaluation, Mistake
from train.labels import LabelSpec
from train.metrics.metrics import Exchange, check_finite

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
        num_answers = len(self._names) + 1
        mistakes = tuple(
            Mistake(sample_id, pair // num_answers, pair % num_answers, confidence)
            for confidence, sample_id, pair in _most_confident(mistakes_M).tolist()
        )
        return self._figures(split, loss, int(sum(each[1] for each in sums)), pairs_P, counts_P, mistakes)

    def _figures(
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
            ClassFigures(
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
