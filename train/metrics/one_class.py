"""Metrics for one class per image: accuracy, top five, and a sparse confusion matrix.

A model may answer with a class that the dataset does not have: all such count as one more, behind the dataset's.
Shape legend: N batch, K classes, C columns of the model's classes, P pairs of a true and a predicted class that occur.
"""

from __future__ import annotations

import math

import numpy as np

from shardmill.values import Batch
from train.contracts.values import ClassFigures, Confusion, Evaluation
from train.labels import LabelSpec
from train.metrics.metrics import Exchange, check_finite

TOP = 5


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

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        pairs_P, counts_P = np.unique(np.concatenate([*self._pairs, np.empty(0, np.int64)]), return_counts=True)
        mine = np.array([self._loss_sum, self._num_top5]).tobytes() + np.stack([pairs_P, counts_P]).tobytes()
        of_ranks = exchange.gather_bytes(mine)
        sums = [np.frombuffer(data[:16]) for data in of_ranks]
        tables = [np.frombuffer(data[16:], np.int64).reshape(2, -1) for data in of_ranks]
        all_pairs = np.concatenate([table[0] for table in tables])
        pairs_P, place = np.unique(all_pairs, return_inverse=True)
        # Integers in float64 are exact below 2^53.
        counts_P = np.bincount(place, np.concatenate([table[1] for table in tables])).astype(np.int64)
        loss = math.fsum(each[0] for each in sums) / max(1, counts_P.sum())
        check_finite(loss, split)
        return self._figures(split, loss, int(sum(each[1] for each in sums)), pairs_P, counts_P)

    def _figures(self, split: str, loss: float, num_top5: int, pairs_P: np.ndarray, counts_P: np.ndarray) -> Evaluation:
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
            confused=Confusion(tuple(true_P.tolist()), tuple(predicted_P.tolist()), tuple(counts_P.tolist())),
        )
