"""Detects from a classifier's outputs whether they are logits or probabilities.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from shardmill.errors import UsageError
from shardmill.values import LabelKind
from train.config import TrainConfig
from train.models import MODELS

# A softmax in bfloat16 adds up to 1 within half a percent.
_SUM_TOLERANCE = 0.01
_LARGEST = 1.001
# How much is added to weights, at random. Little changes outputs that are constant at first (a head of zeros); much
# drives logits that are only small, or never negative (a ReLU at the end), out of 0 to 1.
_NOISE = (0.02, 0.1, 1.0, 1.0, 1.0)


class OutputForm(Enum):
    """The form that all examined outputs have."""

    ANY = "any numbers"
    UNIT = "each from 0 to 1"
    DISTRIBUTION = "from 0 to 1, and those of an image add up to 1"


@dataclass(frozen=True, slots=True)
class Probe:
    """A built model, as it is looked at."""

    outputs: Callable[[np.ndarray], np.ndarray]
    """uint8 images_NHWC -> outputs_NK in inference mode."""
    weights: Callable[[], Sequence[np.ndarray]]
    """Copies of those that gradients change."""
    assign: Callable[[Sequence[np.ndarray]], None]


def are_logits(
    config: TrainConfig,
    kind: LabelKind,
    image_shape_HWC: tuple[int, int, int],
    probe: Probe,
    compiled_for_logits: bool | None = None,
) -> bool:
    """Return `train.model_outputs`; for `auto` the form of the model's compiled loss, otherwise of its outputs.

    False for numbers. Raises UsageError if the outputs cannot be what is said, or are neither.
    """
    if kind not in ("class", "multi_label"):
        return False
    # Models by name give logits (train/models/).
    if config.model_outputs == "logits" or not MODELS.is_own(config.model):
        return True
    # Black, white, and noise: images that differ.
    noise = np.random.default_rng(0).integers(0, 256, (4, *image_shape_HWC), dtype=np.uint8)
    images_NHWC = np.concatenate([np.zeros_like(noise[:1]), np.full_like(noise[:1], 255), noise])
    at_first = form_of(probe.outputs(images_NHWC)) or OutputForm.ANY
    expected = (OutputForm.DISTRIBUTION,) if kind == "class" else (OutputForm.DISTRIBUTION, OutputForm.UNIT)
    if config.model_outputs == "probabilities":
        if at_first not in expected:
            raise _no_probabilities(config, kind, at_first)
        return False
    if compiled_for_logits is False:
        if at_first is OutputForm.ANY:
            raise UsageError(
                f"train.model = {config.model!r} is compiled with a loss for probabilities, but returns "
                f"{at_first.value}",
                "expected from_logits=True in its loss, or a softmax or sigmoid at its end",
                f'compile it with such a loss, or set train.loss = "{"softmax" if kind == "class" else "sigmoid"}"',
            )
        return False
    form = at_first if at_first is OutputForm.ANY else _form_under_noise(probe, images_NHWC, at_first)
    if compiled_for_logits:
        if form in expected:
            raise UsageError(
                f"train.model = {config.model!r} is compiled with from_logits=True, but returns probabilities",
                f"its outputs are {form.value}",
                'compile it with from_logits=False, or set train.model_outputs = "logits" if they are logits',
            )
        return True
    if kind == "class" and form is OutputForm.UNIT:
        raise UsageError(
            f"train.model = {config.model!r} returns numbers from 0 to 1 that do not always add up to 1",
            "expected logits, or the probabilities of a softmax: an image has one class",
            'remove a sigmoid at its end, or set train.model_outputs to "logits" or "probabilities"',
        )
    return form not in expected


def form_of(outputs_NK: np.ndarray) -> OutputForm | None:
    """Return the form of the finite rows; None if there are none."""
    rows_NK = outputs_NK[np.isfinite(outputs_NK).all(axis=1)].astype(np.float64)
    if not len(rows_NK):
        return None
    if rows_NK.min() < 0 or rows_NK.max() > _LARGEST:
        return OutputForm.ANY
    is_distribution = rows_NK.shape[1] > 1 and np.abs(rows_NK.sum(axis=1) - 1).max() <= _SUM_TOLERANCE
    return OutputForm.DISTRIBUTION if is_distribution else OutputForm.UNIT


def _form_under_noise(probe: Probe, images_NHWC: np.ndarray, at_first: OutputForm) -> OutputForm:
    """Test whether outputs are probabilities with random weights, too, and so by construction; restores the model's
    weights.
    """
    forms, rng, own = {at_first}, np.random.default_rng(0), probe.weights()
    try:
        for size in _NOISE:
            probe.assign([np.asarray(each + size * rng.standard_normal(each.shape), each.dtype) for each in own])
            forms.add(form_of(probe.outputs(images_NHWC)) or at_first)
            if OutputForm.ANY in forms:
                break
    finally:
        probe.assign(own)
    return next(form for form in OutputForm if form in forms)


def _no_probabilities(config: TrainConfig, kind: LabelKind, form: OutputForm) -> UsageError:
    of_image = ", and those of an image to add up to 1" if kind == "class" else ""
    return UsageError(
        f'train.model_outputs = "probabilities", but train.model = {config.model!r} returns numbers that are '
        f"{'each from 0 to 1, but do not add up to 1' if form is OutputForm.UNIT else 'not all from 0 to 1'}",
        f"expected outputs from 0 to 1{of_image}",
        'set train.model_outputs = "auto"',
    )
