"""The reference of config keys: every key of every section with its default, its meaning and its choices."""

from __future__ import annotations

import re
from typing import Any

import tomlkit
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from pipeline.choices import choices_of
from pipeline.tree import PipelineTree
from scripts.docs_site.markdown import cell, table
from shardmill.section import field_docstrings, section_of

HEAD = """# Config keys

A config file is TOML, one table for each section below. `shardmill init --all FILE` writes one that explains every key,
`shardmill config show FILE` prints what a file resolves to, and `--set SECTION.NAME=VALUE` sets a key on the command
line. [Registry entries](entries.md) describes the choices of a key that takes the names of a registry.

In `train`, changing a key without a note [starts a new run](../training/index.md#which-change-starts-a-new-run).
"""


def config_keys() -> str:
    """The page, in Markdown."""
    return "\n".join([HEAD, *_section(PipelineTree, "")])


def _section(section: type[BaseModel], path: str) -> list[str]:
    """The keys of `section` as a table, then its inner sections."""
    docstrings = field_docstrings(section)
    sections = {name: section_of(field) for name, field in section.model_fields.items()}
    inner = {name: each for name, each in sections.items() if each is not None}
    rows = [
        [
            f'<a id="{path}{name}"></a>`{name}`',
            _shown(field.get_default(call_default_factory=True)),
            _meaning(docstrings.get(name, ""), field),
        ]
        for name, field in section.model_fields.items()
        if name not in inner
    ]
    lines: list[str] = []
    if path:
        about = " ".join((section.__doc__ or "").split())
        lines += [
            f"## {path.removesuffix('.')}",
            "",
            about,
            "",
            *(table(["key", "default", "meaning"], rows) if rows else []),
        ]
    for name, each in inner.items():
        lines += _section(each, f"{path}{name}.")
    return lines


def _shown(value: Any) -> str:
    if value is PydanticUndefined or value is None:
        return "none"
    return f"`{cell(tomlkit.item(list(value) if isinstance(value, tuple) else value).as_string())}`"


def _meaning(docstring: str, field: FieldInfo) -> str:
    # A page that a docstring names becomes a link, which the build then checks.
    parts = [re.sub(r"docs/([\w/-]+\.md)", r"[\1](../\1)", cell(docstring))]
    one_of = choices_of(field.annotation, *field.metadata)
    if one_of is not None:
        parts.append("Choices: " + ", ".join(f"`{choice}`" for choice in one_of.choices) + ".")
    # What a change of this setting means for a training, or a dataset, that exists, as its field declares it.
    meanings = [cell(mark.meaning) for mark in field.metadata if hasattr(mark, "meaning")]
    parts += [f"*{meaning[0].upper()}{meaning[1:]}.*" for meaning in meanings]
    return " ".join(parts)
