"""Sample ids made unique: what a listing names twice is refused once, and two keys with one id get two."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.listed import LISTED_SCHEMA
from etl.segments import SEGMENT_SCHEMA, fact_limbs, key_digests, write_segment
from shardmill.ids import assign_sample_ids
from shardmill.values import Rejection, RejectReason

# Values in memory before they go to files; 8 bytes each.
_MAX_BUFFERED = 4_000_000
# By their highest bits, so that each file alone holds all equals of its values: 10^9 of them make 125 MB a file.
_NUM_FILES, _SHIFT = 64, np.uint64(58)


class RepeatedValues:
    """A group-by that spills: values are added in parts, and counted file by file. `folder` must exist."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._parts: list[np.ndarray] = []
        self._num_buffered = 0
        self._has_spilled = False

    def add(self, values_N: np.ndarray) -> None:
        """Add uint64 values."""
        self._parts.append(values_N)
        self._num_buffered += len(values_N)
        if self._num_buffered > _MAX_BUFFERED:
            self._spill()

    def find(self) -> np.ndarray:
        """The values that were added more than once, each once, sorted."""
        if not self._has_spilled:
            return _repeated(np.concatenate([np.empty(0, np.uint64), *self._parts]))
        self._spill()
        files = [self._file(number) for number in range(_NUM_FILES)]
        return np.concatenate([_repeated(np.fromfile(file, np.uint64)) for file in files if file.exists()])

    def _spill(self) -> None:
        values_N = np.sort(np.concatenate([np.empty(0, np.uint64), *self._parts]))
        bounds = np.searchsorted(values_N >> _SHIFT, np.arange(_NUM_FILES + 1, dtype=np.uint64))
        for number in range(_NUM_FILES):
            with open(self._file(number), "ab") as file:
                values_N[bounds[number] : bounds[number + 1]].tofile(file)
        self._parts, self._num_buffered, self._has_spilled = [], 0, True

    def _file(self, number: int) -> Path:
        return self._folder / f"values-{number:02d}"


@dataclass(frozen=True, slots=True)
class Correction:
    """An image that was counted and is refused now."""

    key: str
    cell: int
    split: str | None
    label: str | None
    fact_limbs: np.ndarray
    rejection: Rejection


def make_unique(segments: Sequence[Path], repeated_N: np.ndarray) -> Iterator[Correction]:
    """Rewrite the segments in which a sample id of `repeated_N` (uint64) occurs; they are few.

    Of two keys with one id the larger takes its next 8 bytes. A key that is listed twice is refused the second time,
    under a key of its own, because a ledger names no input twice.
    """
    tables = [_repeated_rows(segment, number, repeated_N) for number, segment in enumerate(segments)]
    rows = pa.concat_tables(tables).combine_chunks()
    # The first one stays, in an order that does not depend on how the source was listed.
    order = sorted(rows.to_pylist(), key=lambda row: (row["key"], row["place"], row["size_bytes"], row["mtime_ns"]))
    keys = list(dict.fromkeys(row["key"] for row in order))
    ids = dict(zip(keys, assign_sample_ids(keys), strict=True))
    times: Counter[str] = Counter()
    removed: dict[int, list[int]] = defaultdict(list)
    for row in order:
        times[row["key"]] += 1
        if times[row["key"]] > 1:
            removed[row["segment"]].append(row["row"])
            yield _correction(row, times[row["key"]])
    for number in sorted({row["segment"] for row in order}):
        _rewrite(segments[number], removed[number], ids)


def _repeated_rows(segment: Path, number: int, repeated_N: np.ndarray) -> pa.Table:
    """The rows with a repeated id, and where they are."""
    table = pq.read_table(segment, schema=SEGMENT_SCHEMA)
    places_N = np.flatnonzero(np.isin(table.column("sample_id").to_numpy(), repeated_N.view(np.int64)))
    found = table.take(pa.array(places_N))
    return found.append_column("segment", pa.array(np.full(len(places_N), number))).append_column(
        "row", pa.array(places_N)
    )


def _correction(row: dict[str, Any], time: int) -> Correction:
    image = pa.Table.from_pylist([{name: row[name] for name in LISTED_SCHEMA.names}], schema=LISTED_SCHEMA)
    rejection = Rejection(
        f"{row['key']}\0{time}", RejectReason.DUPLICATE_KEY, "listed before under the same key",
        row["size_bytes"], row["mtime_ns"], row["etag"], stage="list",
    )  # fmt: skip
    return Correction(
        row["key"], row["cell"], row["split"], row["label"], fact_limbs(key_digests(image), image)[0], rejection
    )


def _rewrite(segment: Path, removed: list[int], ids: dict[str, int]) -> None:
    table = pq.read_table(segment, schema=SEGMENT_SCHEMA)
    is_kept_N = np.ones(table.num_rows, bool)
    is_kept_N[removed] = False
    table = table.filter(pa.array(is_kept_N))
    keys = table.column("key").to_pylist()
    unique_ids = [ids.get(key, known) for key, known in zip(keys, table.column("sample_id").to_pylist(), strict=True)]
    place = SEGMENT_SCHEMA.get_field_index("sample_id")
    write_segment(segment, table.set_column(place, SEGMENT_SCHEMA.field(place), pa.array(unique_ids, pa.int64())))


def _repeated(values_N: np.ndarray) -> np.ndarray:
    ordered_N = np.sort(values_N)
    return np.unique(ordered_N[1:][ordered_N[1:] == ordered_N[:-1]])
