"""Tables that wait in a local file until a source knows what to make of them: a listing never waits in memory."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from types import TracebackType

import pyarrow as pa

from etl.listed import LISTED_SCHEMA


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
