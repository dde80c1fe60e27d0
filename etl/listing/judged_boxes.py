"""Judges the boxes of a whole listing: what no row shows alone, such as shares in place of pixels."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources import Lists
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from shardmill.errors import UsageError
from shardmill.typed_columns import BOXES
from shardmill.values import NO_BLOCK, RejectReason
from shardmill.words import counted

# Of the texts of `encode_values`: four floats for each box.
_SIDES = rf'"{BOXES}":\[(?P<sides>[^\]]*)\]'
# Rounded shares exceed 1, and a corner with width and height ends at 2 at the most.
_IS_OF_PIXELS, _HAS_FRACTION = r"(^|,)-?([2-9](\.\d+)?(,|$)|\d\d)", r"\.\d*[1-9]|e-"
# A few boxes may really be that small; a file of them, or of parts of a pixel each tenth image, is a mistake.
_MIN_ROWS, _MAX_FRACTION = 8, 0.1


class WithJudgedBoxes:
    """A source whose boxes are refused if they cannot be meant."""

    def __init__(self, source: Lists) -> None:
        self.uri = source.uri
        self._source = source
        self._num_rows = self._num_tiny = self._num_refused = 0

    def list(self) -> Iterator[ListingBatch]:
        """List like the source. Raises UsageError if boxes are shares of 1, or none of them can be read."""
        has_boxes = False
        for batch in self._source.list():
            if BOXES in batch.extra_types:
                has_boxes = True
                self._look(batch.images)
            self._num_refused += sum(each.reason is RejectReason.BAD_ROW for each in batch.rejections)
            yield batch
        if has_boxes and not self._num_rows and self._num_refused:
            raise UsageError(
                f"no image of {self.uri} has a box, and {counted(self._num_refused, 'row')} were refused",
                "expected boxes that can be read in one row at least",
                "`shardmill check-source` shows what is wrong with them (docs/boxes.md)",
            )
        if self._num_tiny > _MAX_FRACTION * self._num_rows:
            self._refuse(self._num_tiny, self._num_rows)
        if self._num_tiny:
            warning = f"the boxes of {counted(self._num_tiny, 'image')} lie in the first pixel: are they shares of 1?"
            yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=(warning,))

    def _look(self, images: pa.Table) -> None:
        sides = pc.struct_field(pc.extract_regex(images.column("extra"), _SIDES), "sides")
        is_file = pc.equal(images.column("block"), NO_BLOCK)
        rows = pa.table({"file": pc.if_else(is_file, "", images.column("container")), "sides": sides})
        rows = rows.filter(pc.match_substring_regex(rows.column("sides"), "[1-9]"))
        is_tiny = pc.invert(pc.match_substring_regex(rows.column("sides"), _IS_OF_PIXELS))
        self._num_rows += rows.num_rows
        is_part = pc.and_(is_tiny, pc.match_substring_regex(rows.column("sides"), _HAS_FRACTION))
        self._num_tiny += pc.sum(is_part, min_count=0).as_py()
        files = rows.append_column("is_tiny", is_tiny).group_by("file")
        for each in files.aggregate([("is_tiny", "min"), ("is_tiny", "count")]).to_pylist():
            if each["is_tiny_min"] and each["is_tiny_count"] >= _MIN_ROWS:
                self._refuse(each["is_tiny_count"], each["is_tiny_count"], each["file"])

    def _refuse(self, num_tiny: int, num_rows: int, file: str = "") -> None:
        raise UsageError(
            f"the boxes of {num_tiny} of {num_rows} images of {file or self.uri} lie in the first pixel",
            "expected pixels, not shares of width and height",
            "multiply x by the width of the image and y by its height",
        )
