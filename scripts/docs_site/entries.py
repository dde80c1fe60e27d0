"""The reference of registry entries: the choices of every extension point, with what each needs installed."""

from __future__ import annotations

from typing import Any

from pipeline.choices import registries
from pipeline.tree import PipelineTree
from scripts.docs_site.markdown import cell, table
from shardmill.registry import Registry

HEAD = """# Registry entries

The choices of every [extension point](../extending.md). The extra is what installs the packages that an entry needs;
without one, the base installation has them.
"""


def entries() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *(line for registry in registries(PipelineTree) for line in of_registry(registry))])


def of_registry(registry: Registry[Any]) -> list[str]:
    """The section of one registry."""
    known = {**registry.entries, **{f"{module}:NAME": entry for module, entry in registry.libraries.items()}}
    rows = [[f"`{name}`", cell(entry.help), f"`{entry.extra}`" if entry.extra else ""] for name, entry in known.items()]
    if registry.takes_own:
        rows.append(["`package.module:object`", "your own", ""])
    said = [cell(f"{registry.point.help[:1].upper()}{registry.point.help[1:]}."), ""] if registry.point else []
    return [f"## {registry.key}", "", *said, *table(["name", "", "extra"], rows)]
