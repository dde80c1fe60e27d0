"""Where a source is: as a manifest names it, and with URIs that are the same in any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etl.sources import COMMITTED, HasParts, Source
from shardmill.dataset.manifest import SourceRef
from shardmill.dataset.versions import split_version

if TYPE_CHECKING:
    from etl.config import SourceConfig


def place_of(section: SourceConfig) -> SourceRef:
    """Return the location of a source, before it is listed."""
    parts = {name: part.uri for name, part in section.parts.items()}
    uri = section.uri or ", ".join(parts)
    if section.kind == COMMITTED:
        # Later versions of a dataset are one source.
        uri = split_version(uri)[0]
    return SourceRef(uri=uri, kind=section.kind, parts=parts, listing_fingerprint="", key_sum="0" * 64)


def with_absolute_uris(section: SourceConfig, source: Source) -> SourceConfig:
    if isinstance(source, HasParts):
        return section.at({f"source.parts.{name}.uri": uri for name, uri in source.part_uris.items()})
    return section.at({"source.uri": source.uri})
