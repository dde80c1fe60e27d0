"""The driver's view of a source: counts, sums and names of files, which do not grow with the number of images; and the
files, the segments: Parquet, images sorted by cell, written by the driver and read by work units.

An image belongs to a *cell*, an unsigned 64-bit hash: of its sample id, or of its block if it lies in a container. A
work unit is a range of cells, so that a listing that has grown leaves the old members of a unit together.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from etl.sources.containers import open_file
from etl.sources.listed import LISTED_SCHEMA
from shardmill.errors import StorageError
from shardmill.ids import DIGEST_MODULUS, add_digests, format_digest, key_hash, sample_id_of
from shardmill.mix import mix64_array
from shardmill.storage import Store, join_uri
from shardmill.values import SourceImage

if TYPE_CHECKING:
    from shardmill.dataset.ledger import RejectionLog


NUM_BUCKETS = 1 << 16
"""Finest ranges of cells that are counted: the largest number of work units."""
CELLS_PER_BUCKET = (1 << 64) // NUM_BUCKETS


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Listing:
    """The driver's view of a source: counts, sums and the segments' ranges; the images are in the segments."""

    folder: Path
    """A local folder that goes with this value."""
    segments: tuple[ListingSegment, ...]
    """Segments by ranges of cells, ascending; only the images of one cell may be in two of them."""
    rejections: RejectionLog
    """Refused by the listing alone, in the order of their keys' bytes."""
    images_by_label: Counter[tuple[str | None, str | None]]
    """(split, label) -> images to process."""
    images_by_bucket: np.ndarray
    """Images of each range of 2^48 cells; shape (NUM_BUCKETS,)."""
    facts_by_bucket: np.ndarray
    """Sums of the images' `fact_limbs`, as eight 32-bit limbs in uint64; shape (NUM_BUCKETS, 8)."""
    probes: tuple[str, ...]
    """Paths of a few files, spread over the listing; if none of them is left later, the source itself is absent."""
    key_sum: str
    """Additive hash of all listed keys, rejected ones included."""
    warnings: tuple[str, ...]
    multi_labels: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    """(split, class) -> images to process, where an image may have several classes, or none."""
    source_bytes: int = 0
    """Total size of all images that were listed with their size."""
    has_all_sizes: bool = True
    """Whether every image was listed with its size: then equal facts are hardly those of different files."""
    extra_types: Mapping[str, str] = field(default_factory=dict)
    """The source's extra columns: name -> type."""

    @property
    def num_images(self) -> int:
        return self.images_by_label.total()

    @property
    def num_listed(self) -> int:
        return self.num_images + len(self.rejections)

    @property
    def class_names(self) -> tuple[str, ...]:
        """Every class that has an image to process, sorted."""
        return tuple(sorted({label for (_, label), times in self.images_by_class.items() if label and times}))

    @property
    def images_by_class(self) -> Counter[tuple[str | None, str | None]]:
        """(split, class) -> images, whether an image has one class or several."""
        return self.multi_labels or self.images_by_label

    @property
    def has_splits(self) -> bool:
        """Whether the source names splits; hashes of the contents decide otherwise."""
        return any(split is not None for (split, _), times in self.images_by_label.items() if times)

    @property
    def has_unnamed_splits(self) -> bool:
        """Whether a hash of its content decides the split of some image."""
        return any(split is None and times for (split, _), times in self.images_by_label.items())

    @property
    def num_rejected_by_reason(self) -> dict[str, int]:
        """Reason -> refused inputs, by name of the reason."""
        return {str(reason): times for reason, times in sorted(self.rejections.by_reason.items())}

    @property
    def fingerprint(self) -> str:
        """Equal listings (keys, sizes, times, labels, splits) have equal fingerprints, in any order."""
        refused = (key_hash(f"{each.key}\0{each.reason}\0{each.size_bytes}") for each in self.rejections)
        parts = (format_digest(sum_limbs(self.facts_by_bucket)), format_digest(sum(refused) % DIGEST_MODULUS))
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def sum_limbs(limbs_N8: np.ndarray) -> int:
    """The sum modulo 2^256 of numbers that are given as eight 32-bit limbs in their last axis."""
    sums = limbs_N8.reshape(-1, 8).sum(axis=0, dtype=np.uint64)
    return add_digests(*(int(limb) << (32 * (7 - place)) for place, limb in enumerate(sums)))


def limbs(digests_N32: np.ndarray) -> np.ndarray:
    """256-bit digests (uint8, shape (N, 32)) as eight 32-bit limbs in uint64, shape (N, 8), most significant first."""
    return digests_N32.view(">u4").astype(np.uint64)


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


def images_of_table(table: pa.Table) -> Iterator[SourceImage]:
    """The rows of a segment's table."""
    # By way of NumPy: `to_pylist` alone makes an object of Arrow's for each value, and takes 20 times as long.
    columns = [table.column(each.name).to_numpy().tolist() for each in fields(SourceImage)]
    return itertools.starmap(SourceImage, zip(*columns, strict=True))


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
