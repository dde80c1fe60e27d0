"""Steps of a reader in the making: their images are decoded in parts, by any threads, and then each becomes a batch.

Shape legend: N batch, or all rows of the steps; H height, W width, C channels.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.augment.draws import Draws
from shardmill.augment.mixing import mix_batch
from shardmill.augment.pixels import change_pixels
from shardmill.augment.windows import Windows, draw_windows, fit_window
from shardmill.epoch_plan import StepRows
from shardmill.formats.encodings import decode_all, decode_stored
from shardmill.kernel import CAN_DECODE_WINDOWS, decode_windows
from shardmill.loader.annotations import boxes_of_batch, decode_masks, is_annotation
from shardmill.loader.row_source import GatheredRows, LiveRows, Origins
from shardmill.options import NormalizeOptions
from shardmill.typed_columns import BOXES, MASK, label_shape
from shardmill.values import Batch

if TYPE_CHECKING:
    from shardmill.epoch_plan import EpochPlan
    from shardmill.loader.row_source import Chunks, RowSource


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


@dataclass(frozen=True, slots=True)
class StepUses:
    """The rows of a step, and which use of its row in the epoch each one is."""

    step: int
    rows: StepRows
    occurrences_N: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """What all parts share."""

    gathered: GatheredRows
    draws: Draws
    images_NHWC: np.ndarray
    masks_NHW: np.ndarray | None
    """None without masks."""


class StepDecoder:
    """Call `wait` and `decode` for each part, in any threads, and then `batches` in one of them."""

    def __init__(
        self, source: RowSource, plan: EpochPlan, steps: Sequence[StepUses], live: LiveRows, futures: Chunks
    ) -> None:
        self._source = source
        self._plan = plan
        self._steps = steps
        self._live = live
        self._futures = futures
        rows = [each.rows for each in steps]
        self._rows = rows[0] if len(rows) == 1 else StepRows(*map(np.concatenate, zip(*rows, strict=True)))
        self._is_real_N = self._rows.weights_N > 0
        self._lock = threading.Lock()
        self._begun: _Begun | None = None

    def wait(self) -> None:
        """Return when all chunks are in memory. Raises IntegrityError and StorageError."""
        for future in self._futures.values():
            future.result()

    def decode(self, part: int) -> None:
        """Decode the images and masks of a part and change each by itself. Raises IntegrityError."""
        begun, augment, normalize = self._begin(), self._source.rows.augment, self._source.normalize
        num_rows, num_parts = len(begun.draws), self._source.num_parts
        rows = slice(part * num_rows // num_parts, (part + 1) * num_rows // num_parts)
        gathered, draws, images_NHWC = begun.gathered.part(rows), begun.draws.part(rows), begun.images_NHWC[rows]
        stored_HW = normalize.image_shape_HWC[:2]
        windows = draw_windows(draws, augment, stored_HW)
        if self._is_real_N[rows].all():
            decode_batch(gathered.images, normalize, windows, images_NHWC)
        else:
            keys = np.stack([gathered.places_N, gathered.rows_N, draws.occurrences_N], axis=1)
            decode_distinct(gathered.images, normalize, windows, images_NHWC, keys)
        change_pixels(images_NHWC, draws, augment)
        if begun.masks_NHW is not None:
            masks_NHW = begun.masks_NHW[rows]
            decode_masks(gathered, self._is_real_N[rows], stored_HW, windows, draws, augment, masks_NHW)

    def batches(self) -> Iterator[tuple[Batch, Origins]]:
        """The batch of each step, when all parts are decoded, and where its rows come from: now its rows are mixed with
        each other.
        """
        begun, num_rows = self._begin(), len(self._is_real_N) // len(self._steps)
        for place, uses in enumerate(self._steps):
            rows = slice(place * num_rows, (place + 1) * num_rows)
            is_whole = len(self._steps) == 1
            gathered = begun.gathered if is_whole else begun.gathered.part(rows)
            draws = begun.draws if is_whole else begun.draws.part(rows)
            masks_NHW = None if begun.masks_NHW is None else begun.masks_NHW[rows]
            batch = self._batch(uses, _Begun(gathered, draws, begun.images_NHWC[rows], masks_NHW))
            yield batch, Origins(uses.occurrences_N, gathered.sources)

    def _batch(self, uses: StepUses, begun: _Begun) -> Batch:
        schema, spec, augment = self._source.schema, self._plan.spec, self._source.rows.augment
        gathered, weights_N = begun.gathered, uses.rows.weights_N
        is_real_N = weights_N > 0
        labels_N, sample_ids_N, is_full = gathered.labels_N, gathered.sample_ids_N, bool(is_real_N.all())
        if not is_full:
            sample_ids_N = sample_ids_N * is_real_N
        if not is_full or labels_N.dtype == object:
            labels_N = self._labels(labels_N, is_real_N)
        labels_N = mix_batch(
            begun.images_NHWC, labels_N, is_real_N, begun.draws, augment,
            num_classes=len(schema.class_names), rows_per_stream=spec.rows_per_stream,
        )  # fmt: skip
        extra: dict[str, Any] = {}
        if schema.has_boxes:
            windows = draw_windows(begun.draws, augment, self._source.normalize.image_shape_HWC[:2])
            extra[BOXES] = boxes_of_batch(gathered, schema, is_real_N, windows, begun.draws, augment)
        if begun.masks_NHW is not None:
            extra[MASK] = begun.masks_NHW
        for column in schema.extra:
            if is_annotation(schema, column.name):
                continue
            values = zip(gathered.extra(column.name), is_real_N.tolist(), strict=True)
            extra[column.name] = [value if is_real else None for value, is_real in values]
        return Batch(begun.images_NHWC, labels_N, weights_N, sample_ids_N, self._plan.epoch, uses.step, extra)

    def _begin(self) -> _Begun:
        with self._lock:
            if self._begun is None:
                gathered = self._live.gather(self._rows, self._futures)
                spec, occurrences = self._plan.spec, [each.occurrences_N for each in self._steps]
                occurrences_N = occurrences[0] if len(occurrences) == 1 else np.concatenate(occurrences)
                draws = Draws(spec.seed, self._plan.epoch, gathered.sample_ids_N, occurrences_N)
                images_NHWC = self._source.take_batches(len(self._steps))
                masks_NHW = np.zeros(images_NHWC.shape[:3], np.uint8) if self._source.schema.has_mask else None
                self._begun = _Begun(gathered, draws, images_NHWC, masks_NHW)
            return self._begun

    def _labels(self, stored_N: np.ndarray, is_real_N: np.ndarray) -> np.ndarray:
        """The labels of a batch from those of its rows, as in `ChunkRows`; padding has none."""
        schema = self._source.schema
        if stored_N.dtype != object:
            stored_N[~is_real_N] = 0
            return stored_N
        shape = label_shape(schema.label_type, len(schema.class_names))
        labels_N = np.zeros((len(stored_N), *shape), dtype=np.float32)
        for place in np.flatnonzero(is_real_N).tolist():
            labels_N[place, stored_N[place]] = 1
        return labels_N
