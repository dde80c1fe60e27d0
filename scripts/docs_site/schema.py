"""The reference of `summary.json`, from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from scripts.docs_site.code_map import ROOT
from scripts.docs_site.markdown import cell, table


def summary() -> str:
    """The page, in Markdown."""
    schema = json.loads((ROOT / "docs" / "summary.schema.json").read_text(encoding="utf-8"))
    lines = ["# summary.json", "", f"{cell(schema['description'])} The JSON schema is `docs/summary.schema.json`.", ""]
    lines += table(["field", "type", ""], [list(row) for row in _fields(schema, "", schema.get("$defs", {}))])
    return "\n".join(lines)


def _fields(schema: dict[str, Any], path: str, defs: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Every field below an object, with its type and description."""
    for name, given in schema.get("properties", {}).items():
        field = {**defs[given["$ref"].rpartition("/")[2]], **given} if "$ref" in given else given
        yield f"`{path}{name}`", _type(field), cell(field.get("description", ""))
        yield from _fields(field, f"{path}{name}.", defs)
        yield from _fields(field.get("items", {}), f"{path}{name}[].", defs)
        if isinstance(of_any := field.get("additionalProperties"), dict):
            yield from _fields(of_any, f"{path}{name}.NAME.", defs)


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{each}`" for each in field["enum"])
    kinds = field.get("type", "any")
    return " or ".join(kinds) if isinstance(kinds, list) else str(kinds)
