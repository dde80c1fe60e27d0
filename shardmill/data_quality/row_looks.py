"""What each row of a version looks like, a value for each, from tables of its row segments.

Shape legend: N rows of all splits, C channels.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.row_segments import LOOK_COLUMNS, pixels_of_rows, read_rows

LOOKED_AT = (
    "source", "label", "channel_sums", "channel_square_sums", "height", "width", "source_height", "source_width",
    *LOOK_COLUMNS,
)  # fmt: skip
"""The columns of a row segment that `looks_of_rows` needs."""


@dataclass(frozen=True)
class RowLooks:
    """Every row of a version, split by split in stored order."""

    split_names: tuple[str, ...]
    num_rows_of_splits: tuple[int, ...]
    class_names: tuple[str, ...]
    rows: pa.Table
    """`source`, `label` (null without one) and the hash (`difference_hash`, null for a plain image)."""
    brightness_N: np.ndarray
    """Mean of the normalized pixels over all channels, 0 to 255."""
    contrast_N: np.ndarray
    """Standard deviation of the normalized pixels, root mean square of the channels', 0 to 127.5."""
    sharpness_N: np.ndarray
    """Variance of the luma's Laplacian, as a multiple of the squared contrast; 0 for a plain image."""
    source_sides_N2: np.ndarray
    """Height and width of the upright source; 0 if unknown."""

    @cached_property
    def sources(self) -> list[str]:
        return self.rows.column("source").to_pylist()

    @cached_property
    def labels_N(self) -> np.ndarray:
        """Class numbers, -1 without a class."""
        return pc.fill_null(self.rows.column("label"), -1).to_numpy()

    def class_name(self, row: int) -> str | None:
        label = int(self.labels_N[row])
        return self.class_names[label] if 0 <= label < len(self.class_names) else None

    @cached_property
    def _ends(self) -> np.ndarray:
        return np.cumsum(self.num_rows_of_splits)

    def split(self, row: int) -> str:
        return self.split_names[self._split_index(row)]

    def row_in_split(self, row: int) -> int:
        """Its number in `dataset.samples(split)`."""
        place = self._split_index(row)
        return row - int(self._ends[place] - self.num_rows_of_splits[place])

    def _split_index(self, row: int) -> int:
        return int(np.searchsorted(self._ends, row, side="right"))


def looks_of_rows(manifest: Manifest, parts: Sequence[pa.Table]) -> RowLooks:
    """From the rows of each split, in the order of the manifest. The columns of looks have no null."""
    table = pa.concat_tables(parts)
    pixels_N = pixels_of_rows(table, manifest.row_schema)
    means_NC, squares_NC = (_per_pixel(table, name, pixels_N) for name in ("channel_sums", "channel_square_sums"))
    # Of constant channels the difference may be a little below 0.
    variances_N = np.maximum(squares_NC - means_NC**2, 0).mean(axis=1)
    laplacian_N = table.column("laplacian_square_sum").to_numpy() / pixels_N
    return RowLooks(
        split_names=tuple(manifest.splits),
        class_names=manifest.class_names,
        num_rows_of_splits=tuple(part.num_rows for part in parts),
        rows=table.select(["source", "label", "difference_hash"]),
        brightness_N=means_NC.mean(axis=1),
        contrast_N=np.sqrt(variances_N),
        sharpness_N=np.divide(laplacian_N, variances_N, out=np.zeros_like(laplacian_N), where=variances_N > 0),
        source_sides_N2=np.stack([table.column(f"source_{side}").to_numpy() for side in ("height", "width")], axis=1),
    )


def _per_pixel(table: pa.Table, name: str, pixels_N: np.ndarray) -> np.ndarray:
    sums = table.column(name)
    return pc.list_flatten(sums).to_numpy().reshape(len(sums), -1) / pixels_N[:, np.newaxis]


def read_looks(dataset: Dataset) -> RowLooks:
    """Read all row segments, about 100 bytes a row in memory. Raises IntegrityError for an altered segment."""
    manifest = dataset.manifest

    def rows_of(split: str) -> pa.Table:
        index = dataset.index(split)
        shards = map(index.shard, range(index.num_shards))
        return pa.concat_tables([read_rows(dataset.store, each, manifest.row_schema, LOOKED_AT) for each in shards])

    return looks_of_rows(manifest, [rows_of(split) for split in manifest.splits])
