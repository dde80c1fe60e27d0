"""Spark settings as people write them in TOML, as Spark takes them. Light: a DAG file needs it while it is parsed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def flat_settings(table: dict[str, Any]) -> dict[str, str]:
    """TOML reads `spark.executor.memory = "2g"` as nested tables; Spark wants flat names, and every value as text."""
    return dict(_flat("", table))


def _flat(prefix: str, table: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(f"{prefix}{key}.", value)
        else:
            yield f"{prefix}{key}", str(value).lower() if isinstance(value, bool) else str(value)
