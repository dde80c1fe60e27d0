"""The images of a committed dataset version as a source, which `predict` takes: stored bytes, verified chunk by chunk.

They are normalized already, so nothing decodes them as a source: `StoredImages` only unpacks them.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from shardmill.dataset.chunks import ChunkFetcher, with_fetchers
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.row_segments import read_rows
from shardmill.formats.encodings import decode_row
from shardmill.images.process import channel_sums
from shardmill.options import NormalizeOptions
from shardmill.values import UNKNOWN_SIZE, ImageSample, Rejection, ShardInfo, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig


class CommittedSource:
    """Every row of `source.uri`, which is DATASET@N."""

    def __init__(self, config: SourceConfig) -> None:
        self._dataset = open_dataset(config.uri)
        self._has_labels = config.label_kind == "class" and self._dataset.manifest.row_schema.has_class
        self.uri = f"{self._dataset.pin.uri}@{self._dataset.pin.version}"

    def open(self, max_source_bytes: int) -> StoredImages:
        """Reads rows, each chunk once if they come in order."""
        return StoredImages(self._dataset)

    def list(self) -> Iterator[ListingBatch]:
        """One batch for each shard. Raises IntegrityError for a damaged record."""
        for split in self._dataset.manifest.splits:
            # Of the first format alone.
            for shard in self._dataset.shards_of(split):
                yield ListingBatch(self._listed(shard))

    def _listed(self, shard: ShardInfo) -> pa.Table:
        schema = self._dataset.manifest.row_schema
        rows = read_rows(self._dataset.store, shard, schema, ("source", "row_sha256", "label"))
        names = pa.array([*(schema.class_names if self._has_labels else ()), None], pa.string())
        # Without labels, of both the last name, which is none.
        labels = pc.fill_null(rows.column("label"), len(names) - 1) if self._has_labels else _repeated(0, rows)
        chunks_N = np.repeat(np.arange(len(shard.chunks)), [chunk.num_rows for chunk in shard.chunks])
        columns = {
            "key": rows.column("source"),
            "size_bytes": _repeated(UNKNOWN_SIZE, rows),
            "mtime_ns": _repeated(0, rows),
            # What a row holds, wherever it lies by now.
            "etag": pa.array([digest.hex() for digest in rows.column("row_sha256").to_pylist()]),
            "label": names.take(labels),
            "split": _repeated(shard.split, rows),
            "container": _repeated(shard.path, rows),
            "place": pa.array(np.arange(rows.num_rows)),
            "block": pa.array(chunks_N),
            "extra": _repeated("", rows),
            "known_sha256": _repeated("", rows),
            "known_mask_sha256": _repeated("", rows),
        }
        return pa.table([columns[field.name] for field in LISTED_SCHEMA], schema=LISTED_SCHEMA)


class StoredImages:
    """`SourceReader` of one version, and the `Decoder` of what it reads."""

    num_parallel = 1

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self._chunk: tuple[str, int] | None = None
        self._images: list[bytes] = []

    @cached_property
    def _places(self) -> dict[str, tuple[ChunkFetcher, int, list[int]]]:
        """Of each shard: who reads it, the number of its first chunk, and the first row of each of its chunks."""
        return {
            shard.path: (fetcher, first, [0, *itertools.accumulate(chunk.num_rows for chunk in shard.chunks)])
            for shard, fetcher, first in with_fetchers(self._dataset, ("auto",))
        }

    def read(self, image: SourceImage) -> bytes:
        """The stored bytes. Raises IntegrityError for an altered chunk: a dataset is whole, or not read at all."""
        fetcher, first, rows = self._places[image.container]
        if self._chunk != (image.container, image.block):
            self._images = [bytes(each) for each in fetcher.read_chunk(first + image.block).images]
            self._chunk = (image.container, image.block)
        return self._images[image.place - rows[image.block]]

    def expect(self, image: SourceImage) -> None:
        """Does nothing: a chunk is read at once."""

    def is_there(self, path: str) -> bool:
        """Whether this host sees the shard."""
        return self._dataset.store.stat(path) is not None

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image as its pixels, whatever `options` say: it has been normalized."""
        stored = self._dataset.manifest.normalize
        for image, data in images:
            pixels_HWC = decode_row(data, stored)
            sums, square_sums = channel_sums(pixels_HWC)
            height, width, channels = pixels_HWC.shape
            yield (
                image,
                ImageSample(
                    image=pixels_HWC.tobytes(),
                    height=height,
                    width=width,
                    channels=channels,
                    source_sha256=image.etag,
                    channel_sums=sums,
                    channel_square_sums=square_sums,
                    source_height=height,
                    source_width=width,
                    source_bytes=len(data),
                ),
            )


def _repeated(value: int | str, rows: pa.Table) -> pa.Array:
    return pa.repeat(value, rows.num_rows)
