"""Decodes windows of the JPEGs of a batch with the native kernel, in one call that lets other threads run.

Shape legend: N images, H height, W width, C channels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shardmill.kernel import shardmill_native

_decode_jpegs = getattr(shardmill_native, "decode_jpegs", None)

CAN_DECODE_WINDOWS = _decode_jpegs is not None
"""Whether the native kernel is installed."""


def decode_windows(
    encoded: Sequence[bytes | memoryview], stored_HWC: tuple[int, int, int], boxes: np.ndarray, offsets_N: np.ndarray,
    pixels: np.ndarray,
) -> np.ndarray:  # fmt: skip
    """Decode box n of image n to the contiguous `pixels`, from `offsets_N[n]` on; bool, N: False for what it declines.

    `boxes` (int64, N x 4) has the top, left, height and width of each, inside of the images. The kernel declines files
    that libjpeg has an objection to, and those of other sizes or colours. Raises ValueError for other boxes.
    """
    assert _decode_jpegs is not None, "who calls it has looked at CAN_DECODE_WINDOWS"
    places = np.column_stack([boxes, offsets_N]).astype(np.int64)
    is_done_N = np.zeros(len(encoded), dtype=np.uint8)
    _decode_jpegs(encoded, stored_HWC, places, pixels, is_done_N)
    return is_done_N.astype(bool)
