"""The settings of section `source.boxes`: where a source has the boxes of objects, and how."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from shardmill.section import Section

_WITH_FIELDS = ("table", "parquet", "arrow", "delta", "lance", "webdataset", "tfrecord")
KINDS_WITH = {
    "boxes": _WITH_FIELDS,
    "mask_field": _WITH_FIELDS,
    "coco_images": ("coco",),
    "coco_masks": ("coco",),
}
"""For each setting of what moves with the pixels, the kinds of sources that have it."""


class BoxesConfig(Section):
    """The boxes of objects in each image, which move with its pixels (docs/boxes.md)."""

    field: str = ""
    """A column with a list of boxes in each row, four numbers each, in pixels of the upright source; empty: no boxes.
    `objects.bbox` is a field of a struct, `json.boxes` one of a tar's JSON members, and `image/object/bbox` the
    beginning of the names of four TFRecord features."""
    labels_field: str = ""
    """A column, field or feature with the class name of each box; empty: boxes without classes. An image then has the
    classes of its boxes as labels."""
    format: Literal["xyxy", "xywh"] = "xyxy"
    """The four numbers: two corners, or a corner with width and height. Stored boxes are `xyxy`, as TFRecords have
    them."""

    @model_validator(mode="after")
    def _labels_are_of_boxes(self) -> BoxesConfig:
        if self.labels_field and not self.field:
            raise ValueError("boxes.field beside boxes.labels_field: the column of the boxes")
        return self
