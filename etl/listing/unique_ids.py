"""Makes sample ids unique: a key that is listed twice is rejected once, and two keys with one id get two ids.

Both are asked of an engine's group-by. The driver reads the segments again only if some id occurs twice, and rewrites
those that it occurs in; what it holds is 8 bytes for each such id.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.listing.grouping import Group, GroupBy, Segment, with_equals
from etl.listing.segments import SEGMENT_SCHEMA, fact_limbs, find_sorted, key_digests, write_rows
from etl.listing.spill import SpilledRows
from shardmill.checksummed import checksum_file
from shardmill.errors import UsageError
from shardmill.ids import next_sample_id
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import BOXES
from shardmill.values import Rejection, RejectReason
from shardmill.words import printable

_IDS = pa.schema([SEGMENT_SCHEMA.field("sample_id")])
# What tells the rows of one id apart, in the order in which they are asked; and where each row is.
_ORDER = ("key", "place", "size_bytes", "mtime_ns")
_PLACED = pa.schema(
    [*_IDS, *(SEGMENT_SCHEMA.field(name) for name in _ORDER), ("segment", pa.int64()), ("row", pa.int64())]
)
# `time` counts how often the row's key was listed before and with it; `new_id` is the id of a key that stays.
_CHANGED = pa.schema([("segment", pa.int64()), ("row", pa.int64()), ("time", pa.int64()), ("new_id", pa.int64())])
_STAYS = 1


@dataclass(frozen=True, slots=True)
class Correction:
    """An image that was counted, and is refused now or has another sample id."""

    image: dict[str, Any]
    """The image's row of the segment."""
    limbs_before: np.ndarray
    """Its `fact_limbs` as counted before."""
    limbs_after: np.ndarray
    """Its `fact_limbs` now; zeros for a rejected image."""
    rejection: Rejection | None


def make_unique(folder: Path, segments: Sequence[str], group: Group) -> Iterator[Correction]:
    """Rewrite those of the segments in `folder` in which a sample id occurs that another image has.

    Of the keys with one id the smallest keeps it, and the others take their next 8 bytes, until all ids differ: so they
    follow from the set of keys alone. A key that is listed twice is refused the second time, under a key of its own,
    because a ledger names no input twice.
    """
    while len(repeated_N := _repeated_ids(folder, segments, group)):
        has_moved = False
        for correction in _resolve(folder, segments, repeated_N, group):
            has_moved |= correction.rejection is None
            yield correction
        if not has_moved:
            return


def _repeated_ids(folder: Path, segments: Sequence[str], group: Group) -> np.ndarray:
    """The ids that occur more than once, int64, ascending."""
    parts = [np.empty(0, np.int64)]
    with _Files(folder) as files:
        for segment in segments:
            files.add(pq.read_table(folder / segment, columns=_IDS.names, use_threads=False))
        asked = GroupBy(str(folder), tuple(files.segments), _IDS, _as_they_are, _IDS, _repeated, _IDS)
        parts += [found.column("sample_id").to_numpy() for found in group(asked)]
    return np.sort(np.concatenate(parts))


def _resolve(folder: Path, segments: Sequence[str], repeated_N: np.ndarray, group: Group) -> Iterator[Correction]:
    """Resolve the rows with the ids of `repeated_N`; rewrites one segment after the other."""
    with _Files(folder) as files:
        for number, segment in enumerate(segments):
            files.add(_placed_rows(folder / segment, number, repeated_N))
        asked = GroupBy(str(folder), tuple(files.segments), _PLACED, _as_they_are, _PLACED, _changed, _CHANGED)
        changed = SpilledRows(files.folder, _CHANGED)
        for found in group(asked):
            changed.add(found, found.column("segment").to_numpy())
        for number, segment in enumerate(segments):
            rows = changed.read(number)
            if rows.num_rows:
                yield from _rewrite(folder / segment, rows.sort_by("row"))


class _Files:
    """Tables that a group-by reads, in a folder of their own; it goes at the end."""

    def __init__(self, folder: Path) -> None:
        self._root = folder
        self.folder = folder / "grouped"
        self.segments: list[Segment] = []

    def __enter__(self) -> _Files:
        with as_storage_error(self.folder):
            self.folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for file in self.folder.iterdir():
            file.unlink()
        self.folder.rmdir()

    def add(self, table: pa.Table) -> None:
        if not table.num_rows:
            return
        file = self.folder / f"rows-{len(self.segments):05d}.parquet"
        # Plain: thousands of rows with one id would shrink to less than a byte for each, which readers refuse.
        out = io.BytesIO()
        pq.write_table(table, out, compression="none", use_dictionary=False)
        data = out.getvalue()
        with as_storage_error(file, len(data)):
            file.write_bytes(data)
        self.segments.append(Segment(checksum_file(str(file.relative_to(self._root)), data), table.num_rows))


def _placed_rows(file: Path, number: int, repeated_N: np.ndarray) -> pa.Table:
    """The rows of a segment that have one of these ids, and where they are."""
    table = pq.read_table(file, columns=[*_IDS.names, *_ORDER], use_threads=False)
    _, is_repeated_N = find_sorted(repeated_N, table.column("sample_id").to_numpy())
    places_N = np.flatnonzero(is_repeated_N)
    found = table.take(pa.array(places_N))
    return pa.table([*found.columns, np.full(len(places_N), number), places_N], schema=_PLACED)


def _as_they_are(rows: pa.Table, place: int) -> pa.Table:
    return rows


def _repeated(rows: pa.Table) -> pa.Table:
    return pa.table([np.unique(with_equals(rows).column("sample_id").to_numpy())], schema=_IDS)


def _changed(rows: pa.Table) -> pa.Table:
    """Of all rows with the same ids, those that do not stay as they are."""
    # The first one stays, in an order that does not depend on how the source was listed.
    rows = rows.sort_by([(name, "ascending") for name in ("sample_id", *_ORDER, "segment", "row")])
    ids_N = rows.column("sample_id").to_numpy()
    keys = rows.column("key").combine_chunks().dictionary_encode().indices.to_numpy()
    is_first_of_id_N = np.diff(ids_N, prepend=ids_N[:1] - 1) != 0
    is_first_of_key_N = is_first_of_id_N | (np.diff(keys, prepend=-1) != 0)
    places_N = np.arange(len(ids_N))
    times_N = places_N - np.maximum.accumulate(np.where(is_first_of_key_N, places_N, 0)) + 1
    new_ids_N = ids_N.copy()
    # These are as rare as colliding hashes of 64 bits.
    for place in np.flatnonzero(is_first_of_key_N & ~is_first_of_id_N).tolist():
        new_ids_N[place] = next_sample_id(rows.column("key")[place].as_py(), int(ids_N[place]))
    is_changed = pa.array((times_N > _STAYS) | (new_ids_N != ids_N))
    columns = [rows.column("segment"), rows.column("row"), times_N, new_ids_N]
    return pa.table(columns, schema=_CHANGED).filter(is_changed)


def _rewrite(file: Path, changed: pa.Table) -> Iterator[Correction]:
    """Write a segment anew, and tell what became of the rows of `changed`, which are in row order."""
    table = pq.read_table(file, schema=SEGMENT_SCHEMA)
    rows_N, times_N = (changed.column(name).to_numpy() for name in ("row", "time"))
    place = SEGMENT_SCHEMA.get_field_index("sample_id")
    new_ids_N = table.column(place).to_numpy().copy()
    new_ids_N[rows_N] = changed.column("new_id").to_numpy()
    renewed = table.set_column(place, SEGMENT_SCHEMA.field(place), pa.array(new_ids_N))
    is_kept_N = np.ones(table.num_rows, bool)
    is_kept_N[rows_N] = times_N == _STAYS
    write_rows(file, renewed.filter(pa.array(is_kept_N)))  # still sorted, and in the same range
    before, after = (each.take(pa.array(rows_N)) for each in (table, renewed))
    before_N8, after_N8 = (fact_limbs(key_digests(each), each) for each in (before, after))
    for number, (image, time) in enumerate(zip(before.to_pylist(), times_N.tolist(), strict=True)):
        is_refused = time > _STAYS
        yield Correction(
            image,
            before_N8[number],
            np.zeros_like(after_N8[number]) if is_refused else after_N8[number],
            _rejection(image, time) if is_refused else None,
        )


def _rejection(image: dict[str, Any], time: int) -> Rejection:
    """Raises UsageError if it would lose boxes, as of a table with a row for each of them."""
    if f'"{BOXES}":' in image["extra"]:
        raise UsageError(
            f"{printable(image['key'])} is listed {time} times or more, with boxes each time",
            "expected one row, or one annotation file, with all boxes of an image",
            "join its boxes, or select the files with a pattern in source.uri",
        )
    return Rejection(
        f"{image['key']}\0{time}", RejectReason.DUPLICATE_KEY, "listed before under the same key",
        image["size_bytes"], image["mtime_ns"], image["etag"], stage="list",
    )  # fmt: skip
