"""Several sources as one: each part has a name, which precedes the keys of its images."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources import SOURCES, Source, SourceReader
from etl.sources.listed import ListingBatch
from shardmill.errors import UsageError
from shardmill.values import Rejection, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig


class SeveralSources:
    """The parts of `source.parts`, one after the other. Their classes are one label map: equal names are one class."""

    def __init__(self, config: SourceConfig) -> None:
        if not config.parts:
            raise UsageError(
                "source.kind = 'several', but source.parts is empty", "expected one table for each source",
                "write [source.parts.NAME] with a uri and a kind, once for each",
            )  # fmt: skip
        self._parts: dict[str, Source] = {name: SOURCES[part.kind](part) for name, part in config.parts.items()}
        self.uri = ", ".join(self._parts)
        self.part_uris = {name: part.uri for name, part in self._parts.items()}

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError as the parts do, or if only some of them have classes."""
        labelled: dict[bool, str] = {}
        for name, part in self._parts.items():
            for batch in part.list():
                labels = batch.images.column("label")
                if len(labels):
                    labelled.setdefault(labels.null_count < len(labels), name)
                if len(labelled) == 2:
                    raise UsageError(
                        f"source.parts.{labelled[True]} has classes and source.parts.{labelled[False]} has none",
                        "expected classes in each part, or in none",
                        "set its uri to the folder above its class folders, or create a table with a label column",
                    )
                yield _named(batch, name)

    def open(self, max_source_bytes: int) -> SeveralReaders:
        """Opens a part when its first image is read."""
        return SeveralReaders(self._parts, max_source_bytes)


class SeveralReaders:
    """Hands each image to the reader of its part."""

    # Parts whose files are far away take several reads at once, archives one; what is safe for all is one.
    num_parallel = 1

    def __init__(self, parts: dict[str, Source], max_source_bytes: int) -> None:
        self._readers: dict[str, SourceReader] = {name: part.open(max_source_bytes) for name, part in parts.items()}
        if all(reader.num_parallel > 1 for reader in self._readers.values()):
            self.num_parallel = min(reader.num_parallel for reader in self._readers.values())

    def read(self, image: SourceImage) -> bytes | Rejection:
        """Read with the part's reader."""
        reader, of_part = self._in_part(image)
        data = reader.read(of_part)
        return replace(data, key=image.key) if isinstance(data, Rejection) else data

    def expect(self, image: SourceImage) -> None:
        """Announce an image to the part's reader."""
        reader, of_part = self._in_part(image)
        reader.expect(of_part)

    def _in_part(self, image: SourceImage) -> tuple[SourceReader, SourceImage]:
        name, _, key = image.key.partition("\0")
        return self._readers[name], replace(image, key=key, container=image.container.partition("\0")[2])

    def is_there(self, path: str) -> bool:
        """Whether this host sees a file of a part; for the empty path, the root of any."""
        name, _, path = path.partition("\0")
        readers = [self._readers[name]] if name else self._readers.values()
        return any(reader.is_there(path) for reader in readers)


def _named(batch: ListingBatch, name: str) -> ListingBatch:
    """The batch with the part's name before its keys and containers: equal paths in two parts are two images."""
    images = batch.images
    for column in ("key", "container"):
        texts = images.column(column)
        named = pc.binary_join_element_wise(pa.scalar(name), texts, "\0")  # pyright: ignore[reportAttributeAccessIssue]
        if column == "container":
            # An image that is a file of its own has none.
            named = pc.if_else(pc.equal(texts, ""), "", named)  # pyright: ignore[reportAttributeAccessIssue]
        place = images.schema.get_field_index(column)
        images = images.set_column(place, images.field(place), named)
    refused = tuple(replace(each, key=f"{name}\0{each.key}") for each in batch.rejections)
    warnings = tuple(f"{name}: {each}" for each in batch.warnings)
    return replace(batch, images=images, rejections=refused, warnings=warnings)
