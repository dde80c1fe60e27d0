"""Finds images that a person should look at, and classes that brightness or size alone tell apart, in a version.

Nothing is decoded: the ETL measured each image in its one pass (`RowLooks`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from shardmill.data_quality.row_looks import RowLooks


class Fault(StrEnum):
    """Why an image is suspect; docs/quality.md explains each one."""

    UNIFORM = "uniform"
    DARK = "dark"
    BLURRED = "blurred"
    ODD_SIZE = "odd_size"
    ODD_ASPECT = "odd_aspect"

    @property
    def measure(self) -> str:
        """What is measured of an image to find it."""
        return _MEASURES[self][0]

    @property
    def look(self) -> str:
        """How such an image looks, in words."""
        return _LOOKS[self]

    def words(self, value: float) -> str:
        """A measured value with its unit: `83 px`."""
        rounded = f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
        return f"{rounded}{_MEASURES[self][1]}"


_MEASURES = {
    Fault.UNIFORM: ("contrast", " of 255"),
    Fault.DARK: ("brightness", " of 255"),
    Fault.BLURRED: ("sharpness", ""),
    Fault.ODD_SIZE: ("root of the source's area", " px"),
    Fault.ODD_ASPECT: ("width to height", ""),
}

_LOOKS = {
    Fault.UNIFORM: "nearly of one colour",
    Fault.DARK: "very dark",
    Fault.BLURRED: "blurred",
    Fault.ODD_SIZE: "much larger or smaller than the others",
    Fault.ODD_ASPECT: "much wider or narrower than the others",
}


@dataclass(frozen=True, slots=True)
class QualityLimits:
    """Beyond these an image is suspect. The relative ones compare it with the dataset's median."""

    uniform_contrast: float = 4.0
    """Standard deviation of the pixels, of 255."""
    dark_brightness: float = 25.0
    """Mean of the pixels, of 255."""
    dark_share: float = 1 / 3
    """Of the median brightness: images of a dark dataset are not suspect because they are dark."""
    blurred_share: float = 1 / 10
    """Of the median sharpness."""
    odd_size_factor: float = 4.0
    """Between the square roots of the source's area and of the median area."""
    odd_aspect_factor: float = 2.5
    """Between the source's aspect ratio and the median one."""


LIMITS = QualityLimits()
# A feature that predicts this share of what the most frequent class does not is a shortcut for a model.
_TELLTALE_SHARE = 0.5
_MIN_ROWS_PER_CLASS = 20
# In the order of the feature; odd, so that half of them are on each side.
_NUM_NEIGHBOURS = 9


@dataclass(frozen=True, slots=True)
class SuspectImage:
    """One image with a fault."""

    source: str
    split: str
    row_in_split: int
    """Its number in `dataset.samples(split)`."""
    class_name: str | None
    fault: Fault
    value: float
    """What was measured: contrast, brightness, sharpness, side in pixels or aspect ratio."""
    usual: float
    """The same of the median image."""

    @property
    def words(self) -> str:
        """`contrast 0 of 255, usually 33.5 of 255`."""
        return f"{self.fault.measure} {self.fault.words(self.value)}, usually {self.fault.words(self.usual)}"


@dataclass(frozen=True, slots=True)
class Telltale:
    """A property of whole images that tells the classes apart, which a model may learn in place of their content."""

    feature: str
    accuracy: float
    """Share of every other row whose class is found by the feature alone: the most frequent one of the 9 rows with the
    nearest values, among the remaining rows.
    """
    majority: float
    """Share of the most frequent class."""

    @property
    def words(self) -> str:
        """A sentence."""
        return (
            f"{self.feature} alone tells the class of {self.accuracy:.0%} of the images (the largest class has "
            f"{self.majority:.0%}): a model may learn it in place of what the images show"
        )


@dataclass(frozen=True, slots=True)
class Quality:
    """What was found in a version."""

    num_images: int
    suspects: tuple[SuspectImage, ...]
    """By fault in the order of `Fault`, the worst of each first. An image can have several faults."""
    telltales: tuple[Telltale, ...]


def by_fault(suspects: Sequence[SuspectImage]) -> dict[Fault, list[SuspectImage]]:
    """In the order of `Fault`; an empty list for a fault that no image has."""
    return {fault: [each for each in suspects if each.fault == fault] for fault in Fault}


def find_faults(looks: RowLooks) -> Quality:
    """Suspect images and telltales; sizes count only for rows whose source size is known."""
    suspects = [
        SuspectImage(
            source=looks.sources[row],
            split=looks.split(row),
            row_in_split=looks.row_in_split(row),
            class_name=looks.class_name(row),
            fault=fault,
            value=float(values_N[row]),
            usual=usual,
        )
        for fault, values_N, usual, is_suspect_N, badness_N in _measured(looks)
        for row in _worst_first(is_suspect_N, badness_N)
    ]
    return Quality(looks.rows.num_rows, tuple(suspects), tuple(_telltales(looks)))


Measured = tuple[Fault, np.ndarray, float, np.ndarray, np.ndarray]


def _measured(looks: RowLooks) -> Iterator[Measured]:
    """For each fault: values, their median, which rows are suspect, and how bad each row is."""
    is_uniform_N = looks.contrast_N < LIMITS.uniform_contrast
    yield Fault.UNIFORM, looks.contrast_N, _median(looks.contrast_N), is_uniform_N, -looks.contrast_N

    usual = _median(looks.brightness_N)
    is_dark_N = looks.brightness_N < min(LIMITS.dark_brightness, LIMITS.dark_share * usual)
    yield Fault.DARK, looks.brightness_N, usual, is_dark_N, -looks.brightness_N

    # A uniform image is neither sharp nor blurred.
    usual = _median(looks.sharpness_N[~is_uniform_N])
    is_blurred_N = (looks.sharpness_N < LIMITS.blurred_share * usual) & ~is_uniform_N
    yield Fault.BLURRED, looks.sharpness_N, usual, is_blurred_N, -looks.sharpness_N

    sides_N2 = looks.source_sides_N2.astype(np.float64)
    is_known_N = (sides_N2 > 0).all(axis=1)
    side_N = np.sqrt(sides_N2.prod(axis=1))
    aspect_N = np.divide(sides_N2[:, 1], sides_N2[:, 0], out=np.ones(len(sides_N2)), where=is_known_N)
    for fault, values_N, factor in (
        (Fault.ODD_SIZE, side_N, LIMITS.odd_size_factor),
        (Fault.ODD_ASPECT, aspect_N, LIMITS.odd_aspect_factor),
    ):
        usual = _median(values_N[is_known_N])
        distance_N = np.abs(np.log(np.where(is_known_N, values_N, usual) / usual))
        yield fault, values_N, usual, distance_N > np.log(factor), distance_N


def _median(values: np.ndarray) -> float:
    """1 for no values, so that it can be divided by."""
    return float(np.median(values)) if len(values) else 1.0


def _worst_first(is_suspect_N: np.ndarray, badness_N: np.ndarray) -> list[int]:
    rows = np.flatnonzero(is_suspect_N)
    return rows[np.argsort(-badness_N[rows], kind="stable")].tolist()


def _telltales(looks: RowLooks) -> Iterator[Telltale]:
    sides_N2 = looks.source_sides_N2
    features = {
        "brightness": looks.brightness_N,
        "source size": sides_N2.astype(np.float64).prod(axis=1),
        "aspect ratio": sides_N2[:, 1] / np.maximum(sides_N2[:, 0], 1),
    }
    has_class_N = looks.labels_N >= 0
    labels_N = looks.labels_N[has_class_N]
    num_classes = len(np.unique(labels_N))
    if num_classes < 2 or len(labels_N) < _MIN_ROWS_PER_CLASS * num_classes:
        return
    majority = float(np.bincount(labels_N).max() / len(labels_N))
    for name, values_N in features.items():
        accuracy = _accuracy_of_neighbours(values_N[has_class_N], labels_N)
        if accuracy - majority >= _TELLTALE_SHARE * (1 - majority):
            yield Telltale(name, accuracy, majority)


def _accuracy_of_neighbours(values_N: np.ndarray, labels_N: np.ndarray) -> float:
    fitted_F = np.argsort(values_N[::2], kind="stable")
    fitted_values_F, fitted_labels_F = values_N[::2][fitted_F], labels_N[::2][fitted_F]
    first_T = np.searchsorted(fitted_values_F, values_N[1::2]) - _NUM_NEIGHBOURS // 2
    first_T = np.clip(first_T, 0, len(fitted_F) - _NUM_NEIGHBOURS)
    near_TK = np.sort(fitted_labels_F[first_T[:, np.newaxis] + np.arange(_NUM_NEIGHBOURS)], axis=1)
    votes_TK = (near_TK[:, :, np.newaxis] == near_TK[:, np.newaxis, :]).sum(axis=2)
    predicted_T = near_TK[np.arange(len(near_TK)), votes_TK.argmax(axis=1)]
    return float((predicted_T == labels_N[1::2]).mean())
