"""A listing on its way from a source to the driver: batches of bounded size, one row for each image."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import TracebackType

import numpy as np
import pyarrow as pa

from shardmill.values import Rejection, SourceImage

# What a source says of an image, and what the latest version knows of it; the listing adds its sample id and its work
# unit's cell.
LISTED_SCHEMA = pa.schema(
    [
        pa.field("key", pa.string(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("mtime_ns", pa.int64(), nullable=False),
        pa.field("etag", pa.string(), nullable=False),
        pa.field("label", pa.string()),
        pa.field("split", pa.string()),
        pa.field("container", pa.string(), nullable=False),
        pa.field("place", pa.int64(), nullable=False),
        pa.field("block", pa.int64(), nullable=False),
        pa.field("extra", pa.string(), nullable=False),
        pa.field("known_sha256", pa.string(), nullable=False),
        pa.field("known_mask_sha256", pa.string(), nullable=False),
    ]
)
SPLITS = ("train", "validation", "test")
"""The splits that there are; a source may name that of an image."""
BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ListingBatch:
    """A part of a listing, of bounded size."""

    images: pa.Table
    """Columns of `LISTED_SCHEMA`; the fields of `SourceImage` of the same names."""
    rejections: tuple[Rejection, ...] = ()
    warnings: tuple[str, ...] = ()
    """Warnings that do not end the build: one sentence each."""
    label_hints: tuple[str, ...] = ()
    """Places of labels that the source does not use: one phrase each. They end a build without labels."""
    groups: pa.Array | None = None
    """A string for each image, null for none: images of one group are not to be in different splits."""
    keys_N32: np.ndarray | None = None
    """SHA-256 of each image's key, uint8, if they were computed already; see `key_digests`."""
    ids_N: np.ndarray | None = None
    """The images' sample ids, int64, if they are unique already: those of a part of a listing."""
    extra_types: Mapping[str, str] = field(default_factory=dict)
    """The type of each extra column of the source, as far as its values have told; see `ARROW_TYPES`."""
    num_found_ahead: int = 0
    """Number of images already found that are in later batches, for progress output."""

    @classmethod
    def of_rejections(cls, *rejections: Rejection) -> ListingBatch:
        """Without an image."""
        return cls(LISTED_SCHEMA.empty_table(), rejections)


def batches_of(
    entries: Iterable[SourceImage | Rejection], extra_types: Callable[[], Mapping[str, str]] = dict
) -> Iterator[ListingBatch]:
    """Batches for a source that lists objects one by one; it is asked for the types of its extra columns with each
    batch.
    """
    images: list[SourceImage] = []
    rejections: list[Rejection] = []
    for entry in entries:
        if isinstance(entry, Rejection):
            rejections.append(entry)
        else:
            images.append(entry)
        if len(images) + len(rejections) == BATCH_ROWS:
            yield ListingBatch(listed_table(images), tuple(rejections), extra_types=extra_types())
            images, rejections = [], []
    if images or rejections:
        yield ListingBatch(listed_table(images), tuple(rejections), extra_types=extra_types())


def listed_table(images: list[SourceImage]) -> pa.Table:
    """The columns of `LISTED_SCHEMA`."""
    rows = map(attrgetter(*LISTED_SCHEMA.names), images)
    columns = list(zip(*rows, strict=True)) or [()] * len(LISTED_SCHEMA)
    arrays = [pa.array(column, field.type) for column, field in zip(columns, LISTED_SCHEMA, strict=True)]
    return pa.table(arrays, schema=LISTED_SCHEMA)


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
