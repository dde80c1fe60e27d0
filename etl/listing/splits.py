"""Assigns images to splits: the split that the source names, or a hash of the image's group or content."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.listed import SPLITS, ListingBatch

if TYPE_CHECKING:
    from etl.config import SplitFractions
    from etl.sources import Lists
    from shardmill.values import SourceImage

# Splits are cut from the last 64 bits of a SHA-256.
_HASH_RANGE = 1 << 64


def split_of(source: SourceImage, source_sha256: str, fractions: SplitFractions) -> str:
    """The split of one image. Stable when a dataset grows; where contents decide, equal bytes are in the same split."""
    return source.split if source.split is not None else split_of_digest(source_sha256, fractions)


def split_of_digest(sha256: str, fractions: SplitFractions) -> str:
    """The split that a SHA-256 (hex) falls into."""
    position = int(sha256[-16:], 16)
    edge = 0.0
    for split in SPLITS:
        edge += getattr(fractions, split)
        if position < round(edge * _HASH_RANGE):
            return split
    return next(split for split in reversed(SPLITS) if getattr(fractions, split) > 0)


class WithGroupSplits:
    """A source whose groups (patients, videos) have their splits: all images of one are in the same."""

    def __init__(self, source: Lists, fractions: SplitFractions) -> None:
        self.uri = source.uri
        self._source = source
        self._fractions = fractions

    def list(self) -> Iterator[ListingBatch]:
        """List like the source; an image in a group has the split of the group's hash, unless the source names one."""
        for batch in self._source.list():
            yield batch if batch.groups is None else self._with_splits(batch, batch.groups)

    def _with_splits(self, batch: ListingBatch, groups: pa.Array) -> ListingBatch:
        encoded = groups.dictionary_encode()
        names = [split_of_digest(_digest(name), self._fractions) for name in encoded.dictionary.to_pylist()]
        splits = pa.array(names, pa.string()).take(encoded.indices)
        place = batch.images.schema.get_field_index("split")
        column = pc.coalesce(batch.images.column("split"), splits)
        return replace(batch, images=batch.images.set_column(place, batch.images.field(place), column), groups=None)


def _digest(group: str) -> str:
    return hashlib.sha256(group.encode()).hexdigest()
