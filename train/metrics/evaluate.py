"""Computes exact metrics over one split: every sample counted once at any world size, summed over ranks, divided once.

Of what is counted, each kind of labels has its own (train/metrics/kinds.py). The loss is the negative log-likelihood of
the labels (of numbers the mean squared error), whatever loss the training minimised, so that models compare. Shape
legend: N batch, H height, W width, C channels, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np

from shardmill.checksummed import with_checksum
from shardmill.errors import TrainingError
from shardmill.registry import Entry, Registry
from shardmill.storage import Store
from shardmill.values import Batch, LabelKind
from train.contracts.values import CONFUSION, Confusion, Evaluation, to_json
from train.labels import LabelSpec
from train.records import read_if_whole

# Keeps the logarithm of a probability of 0 finite, and no more than that. The training loss clips at 1e-7
# (backends/keras/losses.py) to bound its gradient; none is taken here, and errors made with confidence should differ.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
SMALLEST_LOG_PROBABILITY = float(np.log(SMALLEST_PROBABILITY))
# The float32 before 1. Of a sigmoid that rounds to 1 nothing is left to say how sure it was; and another kernel may
# give the number before it, which must not be worth five times less.
LARGEST_PROBABILITY = float(np.nextafter(np.float32(1), np.float32(0)))

Outputs = Callable[[np.ndarray], np.ndarray]
"""images_NHWC uint8 -> outputs_NK float32."""
Scores = Callable[[np.ndarray], np.ndarray]
"""images_NHWC uint8 -> scores_NK, as `scores_of` gives them."""


def scores_of(kind: LabelKind, outputs_NK: np.ndarray, are_logits: bool) -> np.ndarray:
    """Outputs -> log-probabilities of one class an image, log-odds of each of several classes, or the numbers.

    From logits they are exact at any size. A float32 probability near 1 is not: a sigmoid is 1 from a logit of 16.7 on,
    and what it was made of can no longer be told. So an export carries its logits, and the loss is computed from them
    everywhere. In float64: the sum over a split should not depend on how it was cut into ranks.
    """
    outputs_NK = np.asarray(outputs_NK, dtype=np.float64)
    if kind == "class":
        return _log_softmax(outputs_NK) if are_logits else _log(outputs_NK)
    if kind == "multi_label" and not are_logits:
        outputs_NK = np.minimum(outputs_NK, LARGEST_PROBABILITY)
        return _log(outputs_NK) - np.log1p(-outputs_NK)
    return outputs_NK


def scores_by(outputs: Outputs, kind: LabelKind, are_logits: bool) -> Scores:
    """`scores_of` behind the function of a model."""
    return lambda images_NHWC: scores_of(kind, outputs(images_NHWC), are_logits)


_NUMBERS = Entry("train.metrics.kinds:NumberMetrics", "mean squared and mean absolute error")

METRICS: Registry[Callable[[LabelSpec], Metrics]] = Registry(
    "chosen by the kind of labels",
    {
        "class": Entry("train.metrics.kinds:ClassMetrics", "accuracy, top five, confusion matrix"),
        "multi_label": Entry("train.metrics.kinds:MultiLabelMetrics", "average precision"),
        "float": _NUMBERS,
        "float_vector": _NUMBERS,
    },
)
"""`LabelKind` -> what makes an empty metrics of such labels."""


def metrics_of(labels: LabelSpec) -> Metrics:
    """An empty metrics for labels of that kind."""
    return METRICS[labels.kind](labels)


def evaluate_batches(
    scores: Scores, batches: Iterable[Batch], split: str, labels: LabelSpec, exchange: Exchange
) -> Evaluation:
    """Figures of a model over the batches of one split; all ranks call it, each with its own, and all get the same.

    Raises TrainingError if an output is not a number.
    """
    metrics = metrics_of(labels)
    for batch in batches:
        metrics.add(scores(batch.images_NHWC), batch)
    return metrics.evaluation(split, exchange)


def evaluation_section(evaluation: Evaluation | None) -> dict[str, Any] | None:
    """The metrics that a run's summary holds; None if there was no split to evaluate on."""
    if evaluation is None:
        return None
    names = ["split", "num_samples", "loss", "accuracy", "top5_accuracy"]
    if evaluation.metric.name not in names:
        names.append(evaluation.metric.name)
    return {name: getattr(evaluation, name) for name in names}


def write_confusion(store: Store, training_dir: str, confused: Confusion) -> None:
    """Write the confusion matrix to a separate file: it grows with the square of the number of classes."""
    store.put(f"{training_dir}/{CONFUSION}", with_checksum(to_json(confused)))


def read_confusion(store: Store, training_dir: str) -> Confusion | None:
    """Read the file of `write_confusion`; None if there is none, or it was altered: it is for display only."""
    return read_if_whole(Confusion, store, f"{training_dir}/{CONFUSION}")


def _log(probabilities_NK: np.ndarray) -> np.ndarray:
    return np.log(np.clip(probabilities_NK, SMALLEST_PROBABILITY, 1.0))


def _log_softmax(logits_NK: np.ndarray) -> np.ndarray:
    shifted_NK = logits_NK - logits_NK.max(axis=1, keepdims=True)
    return shifted_NK - np.log(np.exp(shifted_NK).sum(axis=1, keepdims=True))


class Exchange(Protocol):
    """The collective operations that metrics need; implemented by a `Member`, and by a world of one."""

    def sum_array(self, array: np.ndarray) -> np.ndarray:
        """The sum over all ranks, in the array's own type."""
        ...

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes in rank order; not all of them may be empty."""
        ...


class Metrics(Protocol):
    """The part of one rank."""

    def add(self, scores_NK: np.ndarray, batch: Batch, /) -> None:
        """Count a batch, by the scores of `train.metrics.evaluate`; rows of weight 0 are left out."""
        ...

    def evaluation(self, split: str, exchange: Exchange) -> Evaluation:
        """The metrics over all ranks, equal on all of them; all call it. Raises TrainingError for a loss of NaN."""
        ...


def check_finite(loss: float, split: str) -> None:
    """Raises TrainingError if a loss is not a number."""
    if not np.isfinite(loss):
        raise TrainingError(
            f"the evaluation on {split!r} gave a loss of {loss}", "expected finite outputs", "lower train.learning_rate"
        )
