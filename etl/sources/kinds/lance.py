"""A Lance table as a source: the rows of one version, read by the table's own library.

A fragment is known by its newest file, because each change of its columns adds one. Deleted rows keep their numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa

from etl.sources.containers import FoundFiles, VersionFiles, files_of_version
from etl.sources.kinds.table import TableSource, source_of_rows
from etl.sources.row_file import BATCH_ROWS, RowFormat, RowImage, blocks_of
from etl.sources.rows import ImageRows
from shardmill.dataset.versions import split_version
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.storage import StoredFile

if TYPE_CHECKING:
    from lance import LanceDataset, LanceFragment

    from etl.config import SourceConfig


_ADDRESS = "_rowaddr"
# What the images that are read at once may become in memory, by their mean size.
_MAX_DECODED_BYTES, _MAX_READ_ROWS = 64_000_000, 64


def lance_source(config: SourceConfig) -> ImageRows | TableSource:
    """The rows of a Lance table, `TABLE` or `TABLE@VERSION`; the latest version is decided when this is called."""
    files = LanceFiles(config.uri)
    return source_of_rows(config, files, RowFormat("Lance", (), files.open_fragment), files.schema)


class LanceFiles(VersionFiles["LanceDataset"]):
    """The fragments of one version of a table."""

    def __init__(self, uri: str) -> None:
        super().__init__(*split_version(uri), (), _opened)
        self.uri = f"{self.store.uri}@{self._table.version}"

    @property
    def schema(self) -> pa.Schema:
        """The table's columns, those of blobs as the bytes that they hold."""
        own = self._table.schema
        are_blobs = [getattr(field.type, "extension_name", "").startswith("lance.blob") for field in own]
        fields = [
            pa.field(field.name, pa.large_binary()) if blob else field
            for field, blob in zip(own, are_blobs, strict=True)
        ]
        return pa.schema(fields, own.metadata)

    def are_there(self) -> bool:
        """Whether this host sees a fragment of it."""
        first = next(iter(self._fragments), None)
        return first is not None and self.store.stat(first) is not None

    @cached_property
    def _fragments(self) -> dict[str, LanceFragment]:
        """By the path of the newest file of each."""
        return {f"data/{each.data_files()[-1].path}": each for each in self._table.get_fragments()}

    def find(self) -> FoundFiles:
        """The version's fragments, sorted by path; other files of the folder are those of other versions."""
        return FoundFiles(files_of_version(self.store, "data", self._fragments, self.uri, "cleanup_old_versions"), ())

    def open_fragment(self, stream: BinaryIO, file: StoredFile) -> FragmentRows:
        """The rows of a fragment, for which its library opens its files itself."""
        return FragmentRows(self._fragments[file.path], self.schema, file)


class FragmentRows:
    """One fragment, in blocks; a row is found by its place among those that are not deleted."""

    def __init__(self, fragment: LanceFragment, schema: pa.Schema, file: StoredFile) -> None:
        self._fragment, self.schema = fragment, schema
        sizes = [each.file_size_bytes for each in fragment.data_files()]
        self._num_bytes = sum(size for size in sizes if size) or file.size_bytes
        self.num_rows = 0

    def batches(self, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Raises IntegrityError if rows would become too large."""
        num_rows = self._fragment.physical_rows
        columns, rows_at_once = list(names), min(BATCH_ROWS, max(1, num_rows))
        for batch in self._fragment.to_batches(
            columns=columns, batch_size=rows_at_once, with_row_address=True, batch_readahead=1
        ):
            rows = pa.Table.from_batches([batch])
            numbers_N = _numbers(rows)
            rows = rows.select(columns) if columns else pa.table({"": pa.nulls(rows.num_rows)})
            yield rows.replace_schema_metadata(self.schema.metadata), numbers_N, blocks_of(numbers_N, (0, num_rows), 0)

    def images(self, leaf: str) -> Callable[[int], RowImage]:
        """Takes some rows at a time."""
        name = leaf if leaf in self.schema.names else leaf.removesuffix(".bytes")
        mean_bytes = self._num_bytes // max(1, self._fragment.physical_rows)
        rows_at_once = min(_MAX_READ_ROWS, max(1, _MAX_DECODED_BYTES // max(1, mean_bytes)))
        start, values = 0, pa.chunked_array([], pa.binary())

        def read(number: int) -> RowImage:
            nonlocal start, values
            place = int(np.searchsorted(self._numbers_N, number))
            if place >= len(self._numbers_N) or self._numbers_N[place] != number:
                raise IntegrityError(f"its fragment has no row {number}")
            if not start <= place < start + len(values):
                start = place
                batches = self._fragment.to_batches(
                    columns=[name],
                    offset=place,
                    limit=rows_at_once,
                    batch_size=rows_at_once,
                    blob_handling="all_binary",
                )
                values = pa.Table.from_batches(batches).column(0)
            return values[place - start].as_py()

        return read

    @cached_property
    def _numbers_N(self) -> np.ndarray:
        """Those of all rows that are not deleted, in ascending order."""
        return _numbers(self._fragment.to_table(columns=[], with_row_address=True))


def _numbers(rows: pa.Table) -> np.ndarray:
    """Of rows in their fragment, int64; an address has the fragment's own number above them."""
    return (rows.column(_ADDRESS).to_numpy() & 0xFFFFFFFF).astype(np.int64)


def _opened(uri: str, version: int | None) -> LanceDataset:
    import lance

    try:
        return lance.dataset(uri, version)
    except (ValueError, OSError) as error:
        text = str(error).splitlines()[0]
        if "was not found" not in text:
            raise StorageError(
                f"the Lance table {uri} cannot be opened: {text}", "expected a readable manifest",
                "check that version, and the variables by which Lance reaches its store (docs/sources.md#lance)",
            ) from error  # fmt: skip
        if version is not None:
            raise UsageError(
                f"the Lance table {uri} has no version {version}", "expected one that no clean-up has deleted",
                "correct source.uri",
            ) from error  # fmt: skip
        raise UsageError(
            f"there is no Lance table at {uri}", "expected a folder with _versions", "check source.uri"
        ) from error
