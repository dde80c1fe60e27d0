"""Keeps tables in a local file until a source can interpret them, so that a listing never waits in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import TracebackType

import pyarrow as pa

from etl.sources.listed import LISTED_SCHEMA, ListingBatch


class Spool:
    """Written once, then read once. The file has no name, so it goes with this process."""

    def __enter__(self) -> Spool:
        self._file = tempfile.TemporaryFile(prefix="shardmill-listing-")
        self._writer = pa.ipc.new_stream(self._file, LISTED_SCHEMA)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def write(self, table: pa.Table) -> None:
        """Append a table of `LISTED_SCHEMA`."""
        self._writer.write_table(table)

    def read(self) -> Iterator[pa.Table]:
        """The tables, in batches of the size that they were written with."""
        self._writer.close()
        self._file.seek(0)
        for batch in pa.ipc.open_stream(self._file):
            yield pa.Table.from_batches([batch])


def in_two_passes(
    batches: Iterable[ListingBatch],
    look: Callable[[pa.Table], object],
    settle: Callable[[], Callable[[pa.Table], ListingBatch]],
) -> Iterator[ListingBatch]:
    """A listing of which all images must be seen before any of them can be judged.

    `look` is given every table of images; what `settle` returns then makes the final batch of each.
    """
    num_found_ahead = 0
    # Of all batches, because a type may be known only then.
    extra_types: dict[str, str] = {}
    with Spool() as spool:
        for batch in batches:
            look(batch.images)
            extra_types |= batch.extra_types
            spool.write(batch.images)
            num_found_ahead += batch.images.num_rows
            yield replace(batch, images=batch.images.slice(0, 0), num_found_ahead=num_found_ahead)
        judged = settle()
        for table in spool.read():
            num_found_ahead -= table.num_rows
            yield replace(judged(table), num_found_ahead=num_found_ahead, extra_types=extra_types)
