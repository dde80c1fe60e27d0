"""The metrics for each kind of labels, summed over ranks: a registry."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shardmill.registry import Entry, Registry

if TYPE_CHECKING:
    from train.labels import LabelSpec
    from train.metrics.metrics import Metrics

_NUMBERS = Entry("train.metrics.numbers:NumberMetrics", "mean squared and mean absolute error")

METRICS: Registry[Callable[[LabelSpec], Metrics]] = Registry(
    "chosen by the kind of labels",
    {
        "class": Entry("train.metrics.one_class:ClassMetrics", "accuracy, top five, confusion matrix"),
        "multi_label": Entry("train.metrics.multi_label:MultiLabelMetrics", "average precision"),
        "float": _NUMBERS,
        "float_vector": _NUMBERS,
    },
)
"""`LabelKind` -> what makes an empty metrics of such labels."""
