"""Where a source is: as a manifest names it, and with URIs that are the same in any process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etl.sources import COMMITTED, DELTA, HasParts, Source
from shardmill.dataset.manifest import SourceRef
from shardmill.dataset.versions import split_version

if TYPE_CHECKING:
    from etl.config import SourceConfig


def place_of(section: SourceConfig) -> SourceRef:
    """Return the location of a source, before it is listed."""
    parts = {name: _without_version(part) for name, part in section.parts.items()}
    uri = _without_version(section) or ", ".join(parts)
    return SourceRef(uri=uri, kind=section.kind, parts=parts, listing_fingerprint="", key_sum="0" * 64)


def _without_version(section: SourceConfig) -> str:
    """All versions of a dataset, or of a table, are one source."""
    return split_version(section.uri)[0] if section.kind in (COMMITTED, DELTA) else section.uri


def with_absolute_uris(section: SourceConfig, source: Source) -> SourceConfig:
    if isinstance(source, HasParts):
        return section.at({f"source.parts.{name}.uri": uri for name, uri in source.part_uris.items()})
    return section.at({"source.uri": source.uri})
