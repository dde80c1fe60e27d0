"""Decodes the stored images of a step into the pixels of its batch: the part of a reader that costs most.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

<<<<<<< Updated upstream
import sys
import threading
from collections.abc import Callable, Sequence
=======
from collections.abc import Sequence
>>>>>>> Stashed changes

import numpy as np

from shardmill.augment.windows import Windows, fit_window
from shardmill.formats.encodings import decode_all, decode_stored
from shardmill.images.jpeg_windows import CAN_DECODE_WINDOWS, decode_windows
from shardmill.options import NormalizeOptions

# Images whose windows are decoded by one call before each is resized: they stay in a processor's cache until then.
_GROUP = 8
<<<<<<< Updated upstream
# Of small batches a queue holds thousands, and asking each of them would take longer than to clear new memory.
_MAX_QUESTIONS = 64


def _num_references(arrays: list[np.ndarray], place: int) -> int:
    """Those to `arrays[place]`: the list's, what others have, and as many of its own as this Python needs to ask."""
    return sys.getrefcount(arrays[place])


# Asked and not written down: Python 3.14 counts fewer references of a question, and one too many would give away memory
# of a batch that is in use.
_OWN_REFERENCES = _num_references([np.empty(0)], 0)


def pageable(shape: tuple[int, ...]) -> np.ndarray:
    """Memory of uint8 with any content, as NumPy takes it."""
    return np.empty(shape, dtype=np.uint8)


class BatchMemory:
    """Memory of batches to which nothing refers any more, for the next ones. Safe for several threads.

    The kernel clears each page of fresh memory when it is first written, which takes as long as a tenth of decoding.
    Views, tensors and arrays of other frameworks that share a batch's memory hold a reference to its array.
    """

    def __init__(
        self, shape_NHWC: tuple[int, int, int, int], max_arrays: int, allocate: Callable[..., np.ndarray] = pageable
    ) -> None:
        self._shape_NHWC = shape_NHWC
        self._max_arrays = max_arrays
        self._allocate = allocate
        self._arrays: list[np.ndarray] = []
        self._next = 0
        """Of `_arrays`: the first one to ask."""
        self._lock = threading.Lock()

    def take(self) -> np.ndarray:
        """An array of uint8 that nothing else refers to, with any content."""
        with self._lock:
            for _ in range(min(len(self._arrays), _MAX_QUESTIONS)):
                # Batches are let go of in the order in which they were read, so the next one follows the last one.
                place, self._next = self._next, (self._next + 1) % len(self._arrays)
                if _num_references(self._arrays, place) == _OWN_REFERENCES:
                    return self._arrays[place]
            array = self._allocate(self._shape_NHWC)
            # Who keeps all batches gets fresh memory for each.
            if len(self._arrays) < self._max_arrays:
                self._arrays.append(array)
            return array
=======
>>>>>>> Stashed changes


def decode_batch(
    encoded: Sequence[memoryview], normalize: NormalizeOptions, windows: Windows, images_NHWC: np.ndarray
) -> None:
    """Decode window n of image n to `images_NHWC[n]`. Raises IntegrityError as `decode_stored`."""
    stored_HWC = normalize.image_shape_HWC
    inside = windows.inside(stored_HWC[:2])
    undone: Sequence[int] = range(len(encoded))
    if normalize.encoding == "jpeg" and CAN_DECODE_WINDOWS:
        # What the kernel declines is the wheels' to judge: they decode it, or say what it is.
        undone = _decode_jpegs(encoded, stored_HWC, windows, inside, images_NHWC)
    elif windows.size_HW == stored_HWC[:2] and windows.are_plain(inside).all():
        decode_all(encoded, normalize.encoding, images_NHWC)
        return
    for place in undone:
        stored = decode_stored(encoded[place], normalize.encoding, stored_HWC)
        top, left, height, width = inside[place].tolist()
        fit_window(stored[top : top + height, left : left + width], windows, place, images_NHWC[place])


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
