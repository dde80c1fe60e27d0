"""A model's outputs in the one form that all figures are computed from: in training, of an export, for the gate.

Shape legend: N batch, H height, W width, C channels, K outputs (classes, or numbers of a label).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from shardmill.values import LabelKind

# Keeps the logarithm of a probability of 0 finite, and no more than that. The training loss clips at 1e-7
# (backends/keras/losses.py) to bound its gradient; none is taken here, and errors made with confidence should differ.
SMALLEST_PROBABILITY = float(np.finfo(np.float32).tiny)
SMALLEST_LOG_PROBABILITY = float(np.log(SMALLEST_PROBABILITY))

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
        return _log(outputs_NK) - _log(1.0 - outputs_NK)
    return outputs_NK


def scores_by(outputs: Outputs, kind: LabelKind, are_logits: bool) -> Scores:
    """`scores_of` behind the function of a model."""
    return lambda images_NHWC: scores_of(kind, outputs(images_NHWC), are_logits)


def _log(probabilities_NK: np.ndarray) -> np.ndarray:
    return np.log(np.clip(probabilities_NK, SMALLEST_PROBABILITY, 1.0))


def _log_softmax(logits_NK: np.ndarray) -> np.ndarray:
    shifted_NK = logits_NK - logits_NK.max(axis=1, keepdims=True)
    return shifted_NK - np.log(np.exp(shifted_NK).sum(axis=1, keepdims=True))
