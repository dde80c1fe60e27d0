"""Orders a listing's segments by ranges of cells, so that a work unit reads only its own images."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from etl.listing.grouping import Group, GroupBy, Segment
from etl.listing.segments import SEGMENT_ROWS, SEGMENT_SCHEMA, ListingSegment, write_segment
from shardmill.checksummed import checksum_file

# A group-by divides its rows by the first column: into ranges, so that each of its parts is a segment.
_BY_CELL = pa.schema([SEGMENT_SCHEMA.field("cell"), *(field for field in SEGMENT_SCHEMA if field.name != "cell")])


def by_cells(folder: Path, runs: Sequence[ListingSegment], group: Group) -> tuple[ListingSegment, ...]:
    """Segments in `folder` of which each holds a range of cells, in the order of the ranges.

    `runs` are sorted, each by itself. Those of a listing that came in the order of its cells stay as they are: so does
    one alone, and what has changed since an earlier version. Others are brought together by the engine's group-by.
    """
    if all(run.last_cell <= following.first_cell for run, following in itertools.pairwise(runs)):
        return tuple(runs)
    files = tuple(Segment(checksum_file(run.path, (folder / run.path).read_bytes()), run.num_rows) for run in runs)
    asked = GroupBy(
        str(folder), files, _BY_CELL, _as_they_are, _BY_CELL, _in_order, _BY_CELL, rows_per_part=SEGMENT_ROWS
    )
    segments = [
        write_segment(folder, f"cells-{number:05d}.parquet", rows.select(SEGMENT_SCHEMA.names))
        for number, rows in enumerate(group(asked))
        if rows.num_rows
    ]
    for run in runs:
        (folder / run.path).unlink()
    return tuple(segments)


def _as_they_are(rows: pa.Table, place: int) -> pa.Table:
    return rows


def _in_order(rows: pa.Table) -> pa.Table:
    return rows.take(pa.array(np.argsort(rows.column("cell").to_numpy(), kind="stable")))
