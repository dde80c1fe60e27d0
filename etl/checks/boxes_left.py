"""Refuses a version that has lost all boxes of its source: those of another format lie outside of every image."""

from __future__ import annotations

from shardmill.dataset.manifest import Manifest
from shardmill.errors import UsageError
from shardmill.images.annotations import DROPPED_NOTE
from shardmill.typed_columns import BOX_LABELS


def check_boxes_left(draft: Manifest) -> None:
    """Raise UsageError if boxes were dropped, and no image has one left. Only classes of boxes tell what is left."""
    dropped = [note for note in draft.counts.by_note if note.startswith(DROPPED_NOTE)]
    if BOX_LABELS not in draft.columns or not dropped or any(sum(each.class_counts) for each in draft.splits.values()):
        return
    raise UsageError(
        "all boxes of the source lie outside of what is kept of their images",
        "expected boxes in pixels of the upright source",
        "check source.boxes.format, and set etl.resize_mode to pad or stretch, which keep all of an image",
    )
