"""Decodes the stored images of a step into the pixels of its batch: the part of a reader that costs most.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardmill.augment.windows import Windows, fit_window
from shardmill.formats.encodings import decode_all, decode_stored
from shardmill.images.jpeg_windows import CAN_DECODE_WINDOWS, decode_windows
from shardmill.options import NormalizeOptions

# Images whose windows are decoded by one call before each is resized: they stay in a processor's cache until then.
_GROUP = 8


def decode_batch(
    encoded: Sequence[memoryview], normalize: NormalizeOptions, windows: Windows, images_NHWC: np.ndarray
) -> None:
    """Decode window n of image n to `images_NHWC[n]`. Raises IntegrityError as `decode_stored`."""
    stored_HWC = normalize.image_shape_HWC
    if windows.are_whole and normalize.encoding != "jpeg":
        decode_all(encoded, normalize.encoding, images_NHWC)
        return
    encoded, inside = list(encoded), windows.inside(stored_HWC[:2])
    undone: Sequence[int] = range(len(encoded))
    if normalize.encoding == "jpeg" and CAN_DECODE_WINDOWS:
        # What the kernel declines is the wheels' to judge: they decode it, or say what it is.
        undone = _decode_jpegs(encoded, stored_HWC, windows, inside, images_NHWC)
    elif windows.size_HW == stored_HWC[:2] and windows.are_plain(inside).all():
        decode_all(encoded, normalize.encoding, images_NHWC)
        return
    # One memory for all: it stays in a processor's cache.
    whole_HWC = np.empty(stored_HWC, dtype=np.uint8) if normalize.encoding == "jpeg" else None
    for place in undone:
        stored = decode_stored(encoded[place], normalize.encoding, stored_HWC, whole_HWC)
        top, left, height, width = inside[place].tolist()
        fit_window(stored[top : top + height, left : left + width], windows, place, images_NHWC[place])


def decode_distinct(
    encoded: Sequence[memoryview], normalize: NormalizeOptions, windows: Windows, images_NHWC: np.ndarray,
    keys: np.ndarray,
) -> None:  # fmt: skip
    """As `decode_batch`, for a batch whose padding repeats rows: those with equal rows of `keys` are decoded once."""
    _, first, which = np.unique(keys, axis=0, return_index=True, return_inverse=True)
    pixels = np.empty((len(first), *images_NHWC.shape[1:]), dtype=np.uint8)
    decode_batch([encoded[place] for place in first.tolist()], normalize, windows.take(first), pixels)
    # The default mode would copy twice.
    np.take(pixels, which.reshape(-1), axis=0, out=images_NHWC, mode="clip")


def _decode_jpegs(
    encoded: Sequence[memoryview], stored_HWC: tuple[int, int, int], windows: Windows, inside: np.ndarray,
    images_NHWC: np.ndarray,
) -> list[int]:  # fmt: skip
    """With the native kernel, which decodes to the pixels that the wheels decode to, but only those of the windows.

    Returns the places of the images that it declines.
    """
    is_plain_N = windows.are_plain(inside)
    plain, others = np.flatnonzero(is_plain_N), np.flatnonzero(~is_plain_N)
    is_done_N = np.zeros(len(encoded), dtype=bool)
    if len(plain):
        images = [encoded[place] for place in plain.tolist()]
        offsets = plain * images_NHWC[0].size
        is_done_N[plain] = decode_windows(images, stored_HWC, inside[plain], offsets, images_NHWC)
    for first in range(0, len(others), _GROUP):
        group = others[first : first + _GROUP]
        images = [encoded[place] for place in group.tolist()]
        num_bytes = inside[group, 2] * inside[group, 3] * stored_HWC[2]
        offsets = np.cumsum(num_bytes) - num_bytes
        pixels = np.empty(int(num_bytes.sum()), dtype=np.uint8)
        is_done_N[group] = decode_windows(images, stored_HWC, inside[group], offsets, pixels)
        for place, begin, size in zip(group.tolist(), offsets.tolist(), num_bytes.tolist(), strict=True):
            if is_done_N[place]:
                inside_HWC = pixels[begin : begin + size].reshape(*inside[place, 2:], stored_HWC[2])
                fit_window(inside_HWC, windows, place, images_NHWC[place])
    return np.flatnonzero(~is_done_N).tolist()
