"""Segments of a listing: Parquet files of images sorted by cell, written by the driver and read by work units."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.sources.containers import open_file
from etl.sources.listed import LISTED_SCHEMA
from shardmill.errors import StorageError
from shardmill.ids import sample_id_of
from shardmill.mix import mix64_array
from shardmill.storage import Store, join_uri

SEGMENT_SCHEMA = pa.schema([*LISTED_SCHEMA, pa.field("sample_id", pa.int64()), pa.field("cell", pa.uint64())])
SEGMENT_ROWS = 1_000_000
"""Number of rows in memory at a time, at about 300 bytes each while they are sorted."""
_ROW_GROUP_ROWS = 8_192


@dataclass(frozen=True, slots=True)
class ListingSegment:
    """One file of a listing, and the cells that its images belong to."""

    path: str
    num_rows: int
    first_cell: int
    last_cell: int
    """Both ends are of images."""

    def has_any_of(self, first_cell: int, last_cell: int) -> bool:
        """Whether images of a range of cells, both ends included, may be in it."""
        return self.first_cell <= last_cell and first_cell <= self.last_cell


def write_segment(folder: Path, path: str, table: pa.Table) -> ListingSegment:
    """Write rows, at least one, that are sorted by cell."""
    write_rows(folder / path, table)
    cells_N = table.column("cell").to_numpy()
    return ListingSegment(path, len(cells_N), int(cells_N[0]), int(cells_N[-1]))


def write_rows(file: Path, table: pa.Table) -> None:
    """The file of a segment; the statistics of its row groups say which cells they hold."""
    # Keys differ in every row: a dictionary of them would only cost time.
    strings = [field.name for field in table.schema if pa.types.is_string(field.type)]
    texts = [name for name in strings if name != "key"]
    pq.write_table(
        table,
        file,
        row_group_size=_ROW_GROUP_ROWS,
        compression="zstd",
        compression_level=1,
        use_dictionary=texts,  # pyright: ignore[reportArgumentType]  its stub knows bool alone
        write_statistics=["cell"],  # pyright: ignore[reportArgumentType]  the same
    )


def segment_table(images: pa.Table, ids_N: np.ndarray, cells_N: np.ndarray) -> pa.Table:
    """Listed images with their sample ids and cells."""
    return pa.table([*images.columns, pa.array(ids_N), pa.array(cells_N)], schema=SEGMENT_SCHEMA)


def read_cells(store: Store, path: str, first_cell: int, last_cell: int) -> Iterator[pa.Table]:
    """The images of a range of cells, both ends included; of other row groups only the footer's statistics are read.

    Raises StorageError if the segment is gone, or its store fails.
    """
    found = store.stat(path)
    if found is None:
        raise StorageError(
            f"the listing's segment {join_uri(store.uri, path)} is missing",
            "expected it to exist until all units have run",
            "run the same command again; finished units are kept",
        )
    with open_file(store, found) as stream:
        yield from _row_groups(pq.ParquetFile(stream, pre_buffer=False), first_cell, last_cell)


def _row_groups(file: pq.ParquetFile, first_cell: int, last_cell: int) -> Iterator[pa.Table]:
    place = SEGMENT_SCHEMA.get_field_index("cell")
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        cells = group.column(place).statistics
        if not group.num_rows or cells.max < first_cell or cells.min > last_cell:
            continue
        rows = file.read_row_group(number, use_threads=False)
        cells_N = rows.column("cell").to_numpy()
        yield rows.filter(pa.array((cells_N >= np.uint64(first_cell)) & (cells_N <= np.uint64(last_cell))))


FACTS = tuple(name for name in LISTED_SCHEMA.names if name != "key")
"""Everything that a listing says of an image but its key."""
_LATER_FACTS = ("extra", "known_sha256", "known_mask_sha256")


def fact_limbs(keys_N32: np.ndarray, images: pa.Table, names: Sequence[str] = FACTS) -> np.ndarray:
    """256 bits over key and facts of each image, as `limbs`; sums of them tell listings apart.

    `keys_N32` holds the SHA-256 of the keys, uint8, shape (N, 32). The other facts are mixed into it, which is quick:
    it need not resist an adversary, who could as well keep a file's size and time. If `images` have sample ids, those
    that do not follow from the keys alone are facts as well.
    """
    lanes_N4 = keys_N32.view("<u8").astype(np.uint64)
    for name in names:
        # Only where there are any: without them an image has the digest that it had before there were such facts.
        has_any_N = None
        if name in _LATER_FACTS:
            has_any_N = pc.not_equal(images.column(name), "").to_numpy(zero_copy_only=False)
        if has_any_N is None:
            _mix(lanes_N4, _as_numbers(images.column(name)))
        elif has_any_N.any():
            mixed_N4 = lanes_N4[has_any_N]
            _mix(mixed_N4, _as_numbers(images.column(name).filter(pa.array(has_any_N))))
            lanes_N4[has_any_N] = mixed_N4
    if "sample_id" in images.column_names:
        ids_N = images.column("sample_id").to_numpy()
        has_moved_N = ids_N != sample_ids(keys_N32)
        if has_moved_N.any():
            moved_N4 = lanes_N4[has_moved_N]
            _mix(moved_N4, ids_N[has_moved_N].view(np.uint64))
            lanes_N4[has_moved_N] = moved_N4
    return np.ascontiguousarray(lanes_N4).view("<u4").astype(np.uint64)


def _mix(lanes_N4: np.ndarray, values_N: np.ndarray) -> None:
    for lane in range(4):
        lanes_N4[:, lane] = mix64_array(lanes_N4[:, lane] ^ values_N, lane)


def _as_numbers(column: pa.ChunkedArray) -> np.ndarray:
    """Integers as they are; texts as 8 bytes of their SHA-256, and none as 0."""
    if pa.types.is_integer(column.type):
        return column.to_numpy().astype(np.int64).view(np.uint64)
    encoded = pc.dictionary_encode(column.combine_chunks())
    texts = encoded.dictionary.to_pylist()
    numbers = np.array([sample_id_of(text) for text in texts] + [0], np.int64).view(np.uint64)
    return numbers[pc.fill_null(encoded.indices, len(texts)).to_numpy()]


def find_sorted(values_M: np.ndarray, wanted_N: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the position of each wanted value among ascending ones, and whether it exists; otherwise the position has no
    meaning.
    """
    if not len(values_M):
        return np.zeros(len(wanted_N), np.int64), np.zeros(len(wanted_N), bool)
    places_N = np.searchsorted(values_M, wanted_N).clip(max=len(values_M) - 1)
    return places_N, values_M[places_N] == wanted_N


def sample_ids(keys_N32: np.ndarray) -> np.ndarray:
    """int64, shape (N,): the first 8 bytes of each key's SHA-256, as `sample_id_of` takes them."""
    return np.ascontiguousarray(keys_N32[:, :8]).view(">i8").ravel().astype(np.int64)


def key_digests(images: pa.Table) -> np.ndarray:
    """SHA-256 of each key: uint8, shape (N, 32)."""
    sha256 = hashlib.sha256
    keys = images.column("key").cast(pa.binary()).to_numpy()
    return np.frombuffer(b"".join([sha256(key).digest() for key in keys]), np.uint8).reshape(-1, 32)
