"""What kind of source a URI names, by looking: `shardmill run SOURCE` needs no `source.kind`."""

from __future__ import annotations

from etl.sources.table_rows import TABLE_SUFFIXES


def recognise(uri: str) -> str:
    """The `source.kind` of a file or pattern, by its suffix; a folder is one of class folders."""
    return "table" if uri.lower().endswith(TABLE_SUFFIXES) else "folders"
