"""Labels that are numbers or vectors: mean squared error as the loss, and mean absolute error.

Shape legend: N batch, K numbers of a label.
"""

from __future__ import annotations

import numpy as np

from shardmill.values import Batch
from train.contracts.values import Evaluation
from train.labels import LabelSpec
from train.metrics.metrics import Exchange, check_finite


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
