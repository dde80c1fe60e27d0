"""Moves the boxes and masks of a batch as its augmentation moves the pixels: cut to the windows, resized, mirrored.

Shape legend: N rows, K boxes of all rows, H height, W width.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from shardmill.augment.draws import VERTICAL_FLIP_DRAW, Draws
from shardmill.augment.options import AugmentOptions
from shardmill.augment.windows import Windows


@dataclass(frozen=True, slots=True, eq=False)
class CutBoxes:
    """What a batch's windows leave of its boxes."""

    sides_K4: np.ndarray
    """float32: x0, y0, x1, y1 in pixels of the batch's images."""
    is_left_K: np.ndarray
    """bool: whether a part of each given box is left; `sides_K4` has only these."""


def cut_boxes(
    sides_K4: np.ndarray, rows_K: np.ndarray, windows: Windows, draws: Draws, options: AugmentOptions
) -> CutBoxes:
    """The boxes in the batch's pixels, clipped to them; `rows_K` says of which row each box is."""
    if windows.are_whole and not options.random_vertical_flip:
        return CutBoxes(sides_K4, np.ones(len(sides_K4), bool))
    height, width = windows.size_HW
    x_K2 = _cut(sides_K4[:, 0::2], windows.left_N[rows_K], windows.width_N[rows_K], width)
    y_K2 = _cut(sides_K4[:, 1::2], windows.top_N[rows_K], windows.height_N[rows_K], height)
    _mirror(x_K2, windows.is_flipped_N[rows_K], width)
    if options.random_vertical_flip:
        _mirror(y_K2, draws.coins(VERTICAL_FLIP_DRAW)[rows_K], height)
    moved_K4 = np.stack([x_K2[:, 0], y_K2[:, 0], x_K2[:, 1], y_K2[:, 1]], axis=1).astype(np.float32)
    is_left_K = (moved_K4[:, 0] < moved_K4[:, 2]) & (moved_K4[:, 1] < moved_K4[:, 3])
    return CutBoxes(moved_K4[is_left_K], is_left_K)


def upside_down(draws: Draws, options: AugmentOptions) -> np.ndarray:
    """bool, (N,): the rows that `change_pixels` turns upside down."""
    return draws.coins(VERTICAL_FLIP_DRAW) if options.random_vertical_flip else np.zeros(len(draws), bool)


def cut_mask(mask_HW: np.ndarray, windows: Windows, row: int, *, is_upside_down: bool) -> np.ndarray:
    """The window of one row: each pixel has the value of the one at its centre, beyond an edge of the nearest one."""
    height, width = windows.size_HW
    rows = _nearest_stored(int(windows.top_N[row]), int(windows.height_N[row]), height, mask_HW.shape[0])
    columns = _nearest_stored(int(windows.left_N[row]), int(windows.width_N[row]), width, mask_HW.shape[1])
    if is_upside_down:
        rows = rows[::-1]
    if windows.is_flipped_N[row]:
        columns = columns[::-1]
    return mask_HW[np.ix_(rows, columns)]


def _nearest_stored(start: int, length: int, num_pixels: int, stored_length: int) -> np.ndarray:
    places = start + (2 * np.arange(num_pixels, dtype=np.int64) + 1) * length // (2 * num_pixels)
    return np.clip(places, 0, stored_length - 1)


def _cut(places_K2: np.ndarray, starts_K: np.ndarray, lengths_K: np.ndarray, length: int) -> np.ndarray:
    """Places on one axis in a window that is resized to `length`."""
    inside_K2 = (places_K2.astype(np.float64) - starts_K[:, None]) * length / lengths_K[:, None]
    return np.clip(inside_K2, 0, length)


def _mirror(places_K2: np.ndarray, is_mirrored_K: np.ndarray, length: int) -> None:
    places_K2[is_mirrored_K] = length - places_K2[is_mirrored_K][:, ::-1]
