"""Sources: the inputs, listed in batches by the driver and read one by one by tasks; a new kind is a module here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from etl.sources.listed import ListingBatch
from etl.sources.names import (
    ARROW_SUFFIXES,
    CIFAR_SUFFIXES,
    ICEBERG_SUFFIXES,
    IDX_SUFFIXES,
    PARQUET_SUFFIXES,
    TAR_SUFFIXES,
    TFRECORD_SUFFIXES,
    ZIP_SUFFIXES,
)
from shardmill.registry import Entry, ExtensionPoint, Registry
from shardmill.values import Rejection, SourceImage

if TYPE_CHECKING:
    from collections.abc import Callable

    from etl.config import SourceConfig
    from shardmill.options import NormalizeOptions
    from shardmill.values import ImageSample


class SourceReader(Protocol):
    """Reads images in a task; may keep a container open between images."""

    num_parallel: int
    """Number of threads that may call `read` at once: 1, unless images are remote and not in a container."""

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The image's bytes, or why this one is refused.

        Raises FileNotFoundError, AccessDenied if the refusal concerns this image alone, StorageError for the rest.
        """
        ...

    def expect(self, image: SourceImage) -> None:
        """Announce an image that will be read soon by the only thread, so that a disk can start reading it.

        Raises nothing.
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
    """A collection of images, created from its config: `SOURCES[config.kind](config)`."""

    def open(self, max_source_bytes: int) -> SourceReader:
        """A reader for the process that calls this. It need not hold more bytes of an image of unknown size."""
        ...


@runtime_checkable
class HasParts(Protocol):
    """A source made of several."""

    part_uris: dict[str, str]
    """Name -> absolute URI."""


@runtime_checkable
class Unpacks(Protocol):
    """A reader of images that are normalized already: it decodes what it reads, in place of the unit's decoder."""

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image as its pixels, in order."""
        ...


COMMITTED = "etl.sources.kinds.committed:CommittedSource"
"""The `source.kind` of a dataset version, which `predict` takes as DATASET[@N]."""

SOURCES: Registry[Callable[[SourceConfig], Source]] = Registry(
    "source.kind",
    {
        "folders": Entry(
            "etl.sources.kinds.folders:FolderSource", "one folder per class, optionally inside train/, val/, test/"
        ),
        "webdataset": Entry(
            "etl.sources.kinds.webdataset:WebDatasetSource",
            "tar shards, or class folders in a tar; .gz too",
            suffixes=TAR_SUFFIXES,
        ),
        "parquet": Entry(
            "etl.sources.kinds.parquet:ParquetSource",
            "Parquet with the images in a column, such as Hugging Face datasets",
            suffixes=PARQUET_SUFFIXES,
            claims="etl.sources.kinds.parquet:claims",
        ),
        "arrow": Entry(
            "etl.sources.kinds.arrow:ArrowSource",
            "Arrow and Feather files with the images in a column, such as Hugging Face's save_to_disk writes",
            suffixes=ARROW_SUFFIXES,
            claims="etl.sources.kinds.arrow:claims",
        ),
        "idx": Entry(
            "etl.sources.kinds.raw_pixels:IdxSource",
            ("IDX files, the format of MNIST and similar datasets; .gz too"),
            suffixes=IDX_SUFFIXES,
        ),
        "cifar": Entry(
            "etl.sources.kinds.raw_pixels:CifarSource",
            "the batches of CIFAR-10 and CIFAR-100, for Python or binary",
            suffixes=CIFAR_SUFFIXES,
            claims="etl.sources.kinds.raw_pixels:holds_batch",
        ),
        "tfrecord": Entry(
            "etl.sources.kinds.tfrecord:TfrecordSource",
            "TFRecord files of tf.Example; .gz too",
            suffixes=TFRECORD_SUFFIXES,
        ),
        "zip": Entry(
            "etl.sources.kinds.zip:ZipSource", "ZIP archives with one folder for each class", suffixes=ZIP_SUFFIXES
        ),
        "delta": Entry(
            "etl.sources.kinds.delta:delta_source",
            "a Delta table whose rows hold images, or name them: TABLE or TABLE@VERSION",
            extra="delta",
            packages=("deltalake",),
            version_log="_delta_log",
        ),
        "lance": Entry(
            "etl.sources.kinds.lance:lance_source",
            "a Lance table whose rows hold images, or name them: TABLE or TABLE@VERSION",
            extra="lance",
            packages=("lance",),
            version_log="_versions",
        ),
        "iceberg": Entry(
            "etl.sources.kinds.iceberg:iceberg_source",
            "an Iceberg table whose rows hold images, or name them: a folder, a metadata file or a name in a catalog",
            extra="iceberg",
            packages=("pyiceberg",),
            suffixes=ICEBERG_SUFFIXES,
            claims="etl.sources.kinds.iceberg:claims",
            version_log="metadata/*.metadata.json",
        ),
        "table": Entry(
            "etl.sources.kinds.table:TableSource", "CSV, JSON lines, Parquet or Arrow with a URI in each row"
        ),
        "coco": Entry("etl.sources.kinds.coco:CocoSource", "images with boxes, in annotation files of COCO's format"),
        "several": Entry(
            "etl.sources.kinds.several:SeveralSources", "several of these, each in a table source.parts.NAME"
        ),
    },
    takes_own=True,
    point=ExtensionPoint("how images are listed and read", "etl.sources:Source"),
)
