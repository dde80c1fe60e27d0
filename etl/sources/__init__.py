"""Sources: the inputs, listed in batches by the driver and read one by one by tasks; a new kind is a module here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from shardmill.registry import Entry, Registry
from shardmill.values import Rejection, SourceImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from etl.config import SourceConfig

# What a source says of an image; the listing adds its sample id and its work unit's cell.
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
    ]
)
_BATCH_ROWS = 65_536


@dataclass(frozen=True, slots=True)
class ListingBatch:
    """A part of a listing, of bounded size."""

    images: pa.Table
    """Columns of `LISTED_SCHEMA`; the fields of `SourceImage` of the same names."""
    rejections: tuple[Rejection, ...] = ()
    warnings: tuple[str, ...] = ()
    """What looks wrong to the source and ends nothing: one sentence each."""
    groups: pa.Array | None = None
    """A string for each image, null for none: images of one group are not to be in different splits."""


class SourceReader(Protocol):
    """What a task reads images with; it may keep a container open from one image to the next."""

    num_parallel: int
    """How many threads may call `read` at once: 1, unless images are far away and in no container."""

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The image's bytes, or why this one is refused.

        Raises FileNotFoundError, AccessDenied if the refusal concerns this image alone, StorageError for the rest.
        """
        ...

    def is_there(self, path: str) -> bool:
        """Whether this host sees a listed file or container."""
        ...


class Lists(Protocol):
    """Something that lists images."""

    uri: str
    """Absolute: tasks have a working directory of their own."""

    def list(self) -> Iterator[ListingBatch]:
        """Every input exactly once, in any order, in bounded memory. Raises UsageError if there is no such source."""
        ...


class Source(Lists, Protocol):
    """A pile of images, made of its config: `SOURCES[config.kind](config)`."""

    def open(self, max_source_bytes: int) -> SourceReader:
        """A reader for the process that calls this. It need not hold more bytes of an image of unknown size."""
        ...


SOURCES: Registry[Callable[[SourceConfig], Source]] = Registry(
    "source.kind",
    {
        "folders": Entry(
            "etl.sources.folders:FolderSource", "one folder per class, optionally inside train/, val/, test/"
        ),
        "webdataset": Entry(
            "etl.sources.webdataset:WebDatasetSource", "tar shards, or class folders in a tar; .gz too"
        ),
        "parquet": Entry("etl.sources.parquet:ParquetSource", "Parquet with the images in a column, as Hugging Face's"),
        "idx": Entry("etl.sources.idx:IdxSource", "IDX files, the format of MNIST and its family; .gz too"),
        "tfrecord": Entry("etl.sources.tfrecord:TfrecordSource", "TFRecord files of tf.Example; .gz too"),
        "table": Entry("etl.sources.table:TableSource", "CSV, JSON lines or Parquet with a URI in each row"),
    },
    takes_own=True,
)


def batches_of(entries: Iterable[SourceImage | Rejection]) -> Iterator[ListingBatch]:
    """For a source that lists objects one by one."""
    images: list[SourceImage] = []
    rejections: list[Rejection] = []
    for entry in entries:
        if isinstance(entry, Rejection):
            rejections.append(entry)
        else:
            images.append(entry)
        if len(images) + len(rejections) == _BATCH_ROWS:
            yield ListingBatch(listed_table(images), tuple(rejections))
            images, rejections = [], []
    if images or rejections:
        yield ListingBatch(listed_table(images), tuple(rejections))


def listed_table(images: list[SourceImage]) -> pa.Table:
    """The columns of `LISTED_SCHEMA`."""
    columns = [pa.array([getattr(image, field.name) for image in images], field.type) for field in LISTED_SCHEMA]
    return pa.table(columns, schema=LISTED_SCHEMA)
