"""Sources: what a listing of the inputs gives; a new kind is a module with a listing function and an entry here."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.ids import add_digests, format_digest, key_bytes, key_hash
from shardmill.registry import Entry, Registry
from shardmill.values import Rejection, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig


@dataclass(frozen=True, slots=True)
class Listing:
    """All inputs of a source, as images to process or as rejections, in the order of their keys' bytes."""

    images: tuple[SourceImage, ...]
    rejections: tuple[Rejection, ...]

    @property
    def num_listed(self) -> int:
        return len(self.images) + len(self.rejections)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The label map: every class that has an image to process, sorted."""
        return tuple(sorted({image.label for image in self.images if image.label is not None}))

    @property
    def key_sum(self) -> str:
        """Additive hash of all listed keys."""
        keys = [image.key for image in self.images] + [rejection.key for rejection in self.rejections]
        return format_digest(add_digests(*map(key_hash, keys)))

    @property
    def fingerprint(self) -> str:
        """Equal listings (keys, sizes, times, labels, splits) have equal fingerprints."""
        digest = hashlib.sha256()
        for image in self.images:
            facts = f"\0{image.size_bytes}\0{image.mtime_ns}\0{image.etag}\0{image.label}\0{image.split}\n"
            digest.update(key_bytes(image.key) + facts.encode())
        for rejection in self.rejections:
            digest.update(key_bytes(rejection.key) + f"\0{rejection.reason}\0{rejection.size_bytes}\n".encode())
        return digest.hexdigest()


SOURCES: Registry[Callable[[SourceConfig, int], Listing]] = Registry(
    "source.kind",
    {
        "folders": Entry(
            "etl.sources.folders:list_folders", "one folder per class, optionally inside train/, val/, test/"
        )
    },
    takes_own=True,
)
