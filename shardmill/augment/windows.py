"""Which rectangle of each stored image becomes the image of a batch, drawn for a whole batch before it is decoded; and
its boxes and masks, which are cut, resized and mirrored as its pixels are.

So a decoder can skip the pixels that no window needs. Shape legend: N rows, K boxes of all rows, H height, W width,
C channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import cv2
import numpy as np

from shardmill.augment.draws import AREA_DRAW, ASPECT_DRAW, COLUMN_DRAW, FLIP_DRAW, ROW_DRAW, VERTICAL_FLIP_DRAW, Draws
from shardmill.augment.options import AugmentOptions

# As torchvision's RandomResizedCrop: a rectangle that does not fit is drawn again, and in the end it is the largest.
_TRIES = 10
_MAX_ASPECT = 4 / 3
# The linear filter, which takes a fifth of the time, looks at two pixels a side: up to here it leaves out less than one
# in three, and fine patterns do not turn into coarse ones.
_AVERAGED_SHRINK = 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """For each row the rectangle that becomes an image of `size_HW`: it is cut out, resized, then mirrored.

    A rectangle may reach beyond the image: there the image's edge is repeated.
    """

    top_N: np.ndarray
    """int64, as the other numbers: the first row of the rectangle; negative if it begins above the image."""
    left_N: np.ndarray
    height_N: np.ndarray
    width_N: np.ndarray
    is_flipped_N: np.ndarray
    """bool: mirrored left to right."""
    size_HW: tuple[int, int]
    are_whole: bool = False
    """Whether each is known to be the image as it is stored."""

    def __len__(self) -> int:
        return len(self.top_N)

    def take(self, places: np.ndarray) -> Windows:
        """The windows of some rows."""
        return replace(
            self,
            top_N=self.top_N[places],
            left_N=self.left_N[places],
            height_N=self.height_N[places],
            width_N=self.width_N[places],
            is_flipped_N=self.is_flipped_N[places],
        )

    def inside(self, stored_HW: tuple[int, int]) -> np.ndarray:
        """Top, left, height and width of the part of each rectangle that lies in the image; int64, N x 4.

        At least one pixel: beyond an edge, the nearest one is repeated.
        """
        height, width = stored_HW
        top_N, left_N = np.clip(self.top_N, 0, height - 1), np.clip(self.left_N, 0, width - 1)
        bottom_N = np.clip(self.top_N + self.height_N, 1, height)
        right_N = np.clip(self.left_N + self.width_N, 1, width)
        return np.stack([top_N, left_N, bottom_N - top_N, right_N - left_N], axis=1)

    def are_plain(self, inside: np.ndarray) -> np.ndarray:
        """bool, N: whether a window is a part of the image as it is stored, neither resized nor mirrored.

        `inside`: what `inside` returned for the stored size.
        """
        height, width = self.size_HW
        is_as_large_N = (self.height_N == height) & (self.width_N == width)
        return is_as_large_N & (inside[:, 2] == height) & (inside[:, 3] == width) & ~self.is_flipped_N


@lru_cache(maxsize=16)
def whole_windows(num_rows: int, stored_HW: tuple[int, int]) -> Windows:
    """Each image as it is stored. Not to be changed: nearly all batches of a loader have the same."""
    return replace(centre_windows(num_rows, stored_HW, stored_HW), are_whole=True)


def centre_windows(num_rows: int, stored_HW: tuple[int, int], size_HW: tuple[int, int]) -> Windows:
    """The centre of each image, not resized."""
    top, left = ((stored - size) // 2 for stored, size in zip(stored_HW, size_HW, strict=True))
    top_N, left_N, height_N, width_N = (np.full(num_rows, number, np.int64) for number in (top, left, *size_HW))
    return Windows(top_N, left_N, height_N, width_N, np.zeros(num_rows, bool), size_HW)


def draw_windows(draws: Draws, options: AugmentOptions, stored_HW: tuple[int, int]) -> Windows:
    """The windows of rows whose stored images have one size."""
    size_HW = options.size_of(stored_HW)
    if size_HW == stored_HW and not (options.random_resized_crop or options.random_crop_padding or options.flips):
        return whole_windows(len(draws), stored_HW)
    if options.random_resized_crop:
        heights_N, widths_N = _draw_sizes(draws, options.min_crop_area, stored_HW)
        top_N = draws.below(ROW_DRAW, stored_HW[0] - heights_N + 1)
        left_N = draws.below(COLUMN_DRAW, stored_HW[1] - widths_N + 1)
    else:
        centre = centre_windows(len(draws), stored_HW, size_HW)
        heights_N, widths_N, top_N, left_N = centre.height_N, centre.width_N, centre.top_N, centre.left_N
        if padding := options.random_crop_padding:
            top_N = draws.below(ROW_DRAW, stored_HW[0] - size_HW[0] + 2 * padding + 1) - padding
            left_N = draws.below(COLUMN_DRAW, stored_HW[1] - size_HW[1] + 2 * padding + 1) - padding
    is_flipped_N = draws.coins(FLIP_DRAW) if options.flips else np.zeros(len(draws), bool)
    return Windows(top_N, left_N, heights_N, widths_N, is_flipped_N, size_HW)


def cut_window(image_HWC: np.ndarray, windows: Windows, row: int) -> np.ndarray:
    """The window of one decoded image, as an array of its own."""
    stored_height, stored_width, _ = image_HWC.shape
    top, left, height, width = windows.inside((stored_height, stored_width))[row].tolist()
    return fit_window(image_HWC[top : top + height, left : left + width], windows, row)


def fit_window(inside_HWC: np.ndarray, windows: Windows, row: int, out_HWC: np.ndarray | None = None) -> np.ndarray:
    """Copy a window to `out_HWC`, or to an array of its own, from the pixels of the stored image inside it."""
    made_HWC = inside_HWC
    if out_HWC is None:
        out_HWC = np.empty((*windows.size_HW, inside_HWC.shape[2]), dtype=np.uint8)
    missing_rows = int(windows.height_N[row]) - inside_HWC.shape[0]
    missing_columns = int(windows.width_N[row]) - inside_HWC.shape[1]
    if missing_rows or missing_columns:
        above = min(max(0, -int(windows.top_N[row])), missing_rows)
        before = min(max(0, -int(windows.left_N[row])), missing_columns)
        made_HWC = cv2.copyMakeBorder(
            made_HWC, above, missing_rows - above, before, missing_columns - before, cv2.BORDER_REPLICATE
        )
    is_flipped, (out_height, out_width) = windows.is_flipped_N[row], windows.size_HW
    if made_HWC.shape[:2] != windows.size_HW:
        shrink = max(made_HWC.shape[0] / out_height, made_HWC.shape[1] / out_width)
        interpolation = cv2.INTER_AREA if shrink >= _AVERAGED_SHRINK else cv2.INTER_LINEAR
        # What is written last is written to where it belongs.
        target_HWC = None if is_flipped else out_HWC
        made_HWC = cv2.resize(made_HWC, (out_width, out_height), dst=target_HWC, interpolation=interpolation)
    elif not is_flipped:
        np.copyto(out_HWC, made_HWC.reshape(out_HWC.shape))
    if is_flipped:
        # OpenCV's flip takes a tenth of what NumPy takes to copy backwards.
        cv2.flip(made_HWC, 1, dst=out_HWC)
    return out_HWC


def _draw_sizes(draws: Draws, min_area: float, stored_HW: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Heights and widths of random shares of the area, with aspect ratios that are uniform in their logarithm."""
    height, width = stored_HW
    heights_N, widths_N = (np.full(len(draws), side, np.int64) for side in _largest_of_aspect(stored_HW))
    is_open_N = np.ones(len(draws), bool)
    for number in range(_TRIES):
        pixels_N = draws.uniform(AREA_DRAW + number, min_area, 1) * (height * width)
        aspect_N = draws.log_uniform(ASPECT_DRAW + number, _MAX_ASPECT)
        drawn_heights_N = np.rint(np.sqrt(pixels_N / aspect_N)).astype(np.int64)
        drawn_widths_N = np.rint(np.sqrt(pixels_N * aspect_N)).astype(np.int64)
        fits_N = is_open_N & (drawn_heights_N <= height) & (drawn_widths_N <= width)
        fits_N &= (drawn_heights_N >= 1) & (drawn_widths_N >= 1)
        heights_N[fits_N], widths_N[fits_N] = drawn_heights_N[fits_N], drawn_widths_N[fits_N]
        is_open_N &= ~fits_N
        if not is_open_N.any():
            break
    return heights_N, widths_N


def _largest_of_aspect(stored_HW: tuple[int, int]) -> tuple[int, int]:
    """The largest rectangle of an allowed aspect ratio in an image."""
    height, width = stored_HW
    return min(height, round(width * _MAX_ASPECT)), min(width, round(height * _MAX_ASPECT))


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
