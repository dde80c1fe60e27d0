"""The difference of two versions of a dataset, row by row, by source key."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.row_segments import ROWS_SCHEMA, read_segment, rows_file
from shardmill.values import ShardInfo


class ChangeKind(StrEnum):
    """The kind of change of a row."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True)
class RowLocation:
    """Position of an image in a version."""

    split: str
    class_name: str | None


@dataclass(frozen=True, slots=True)
class RowChange:
    """One source image that two versions do not hold alike."""

    source: str
    before: RowLocation | None
    """Place in the older version; None for an added row."""
    after: RowLocation | None
    """Place in the newer version; None for a removed row."""

    @property
    def kind(self) -> ChangeKind:
        if self.before is None:
            return ChangeKind.ADDED
        return ChangeKind.REMOVED if self.after is None else ChangeKind.CHANGED

    @property
    def place(self) -> RowLocation:
        """The position at which the row is counted: its current one, or the last one of a removed row."""
        place = self.after or self.before
        assert place is not None
        return place


@dataclass(frozen=True, slots=True)
class _Row:
    place: RowLocation
    digest: bytes


def diff_versions(older: Dataset, newer: Dataset) -> list[RowChange]:
    """Every row added, removed or changed (in its stored image, class or split) from `older` to `newer`, by source key.

    Reads the row segments of shards that only one of the two names: the cost follows what changed. A rewritten shard
    whose rows are equal makes no change. Raises IntegrityError for a row segment that is missing or altered.
    """
    shards_before, shards_after = _shards_of_one_format(older), _shards_of_one_format(newer)
    shared = shards_before.keys() & shards_after.keys()
    before = _rows(older, [shard for path, shard in shards_before.items() if path not in shared])
    after = _rows(newer, [shard for path, shard in shards_after.items() if path not in shared])
    return [
        RowChange(key, _place(before.get(key)), _place(after.get(key)))
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]


def count_changes(changes: list[RowChange]) -> Counter[tuple[ChangeKind, RowLocation]]:
    """Count the added, removed and changed rows of each split and class."""
    return Counter((change.kind, change.place) for change in changes)


def _shards_of_one_format(dataset: Dataset) -> dict[str, ShardInfo]:
    return {shard.rows_path: shard for shard in dataset.shards if shard.format == dataset.manifest.formats[0]}


def _rows(dataset: Dataset, shards: list[ShardInfo]) -> dict[str, _Row]:
    names = dataset.manifest.class_names
    rows: dict[str, _Row] = {}
    for shard in shards:
        table = read_segment(dataset.store, rows_file(shard), ROWS_SCHEMA, shard.num_rows)
        columns = (table.column(name).to_pylist() for name in ("source", "label", "row_sha256"))
        for key, label, digest in zip(*columns, strict=True):
            rows[key] = _Row(RowLocation(shard.split, None if label is None else names[label]), digest)
    return rows


def _place(row: _Row | None) -> RowLocation | None:
    return None if row is None else row.place
