"""One step of a reader in the making: its images are decoded in parts, by any threads, and then it becomes a batch.

Shape legend: N batch, H height, W width, C channels.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.augment.draws import Draws
from shardmill.augment.mixing import mix_batch
from shardmill.augment.pixels import change_pixels
from shardmill.augment.windows import draw_windows
from shardmill.loader.annotations import boxes_of_batch, decode_masks, is_annotation
from shardmill.loader.decode import decode_batch, decode_distinct
from shardmill.loader.live_rows import GatheredRows, LiveRows, Origins
from shardmill.typed_columns import BOXES, MASK, label_shape
from shardmill.values import Batch

if TYPE_CHECKING:
    from shardmill.epoch_plan import EpochPlan, StepRows
    from shardmill.loader.row_source import Chunks, RowSource


@dataclass(frozen=True, slots=True)
class StepUses:
    """The rows of a step, and which use of its row in the epoch each one is."""

    rows: StepRows
    occurrences_N: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class _Begun:
    """What all parts of a step share."""

    gathered: GatheredRows
    draws: Draws
    images_NHWC: np.ndarray
    masks_NHW: np.ndarray | None
    """None without masks."""


class StepDecoder:
    """Call `wait` and `decode` for each part, in any threads, and then `batch` in one of them."""

    def __init__(
        self, source: RowSource, plan: EpochPlan, step: int, uses: StepUses, live: LiveRows, futures: Chunks
    ) -> None:
        self._source = source
        self._plan = plan
        self._step = step
        self._uses = uses
        self._live = live
        self._futures = futures
        self._is_real_N = uses.rows.weights_N > 0
        self._lock = threading.Lock()
        self._begun: _Begun | None = None

    def wait(self) -> None:
        """Return when the step's chunks are in memory. Raises IntegrityError and StorageError."""
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

    def batch(self) -> Batch:
        """The batch, when all parts are decoded: now its rows are mixed with each other."""
        begun, schema, spec = self._begin(), self._source.schema, self._plan.spec
        gathered, is_real_N, augment = begun.gathered, self._is_real_N, self._source.rows.augment
        labels_N, sample_ids_N, is_full = gathered.labels_N, gathered.sample_ids_N, bool(is_real_N.all())
        if not is_full:
            sample_ids_N = sample_ids_N * is_real_N
        if not is_full or labels_N.dtype == object:
            labels_N = self._labels(labels_N)
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
        weights_N = self._uses.rows.weights_N
        return Batch(begun.images_NHWC, labels_N, weights_N, sample_ids_N, self._plan.epoch, self._step, extra)

    @property
    def origins(self) -> Origins:
        """Where the rows of the batch come from."""
        return Origins(self._uses.occurrences_N, self._begin().gathered.sources)

    def _begin(self) -> _Begun:
        with self._lock:
            if self._begun is None:
                gathered = self._live.gather(self._uses.rows, self._futures)
                spec, occurrences_N = self._plan.spec, self._uses.occurrences_N
                draws = Draws(spec.seed, self._plan.epoch, gathered.sample_ids_N, occurrences_N)
                images_NHWC = self._source.take_batch()
                masks_NHW = np.zeros(images_NHWC.shape[:3], np.uint8) if self._source.schema.has_mask else None
                self._begun = _Begun(gathered, draws, images_NHWC, masks_NHW)
            return self._begun

    def _labels(self, stored_N: np.ndarray) -> np.ndarray:
        """The labels of a batch from those of its rows, as in `ChunkRows`; padding has none."""
        is_real_N, schema = self._is_real_N, self._source.schema
        if stored_N.dtype != object:
            stored_N[~is_real_N] = 0
            return stored_N
        shape = label_shape(schema.label_type, len(schema.class_names))
        labels_N = np.zeros((len(stored_N), *shape), dtype=np.float32)
        for place in np.flatnonzero(is_real_N).tolist():
            labels_N[place, stored_N[place]] = 1
        return labels_N
