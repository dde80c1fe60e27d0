"""The base of what a command finds or has done: one document for Python and `--json`, rows for people, and tables in a
notebook.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from pydantic import BaseModel, TypeAdapter

from shardmill.html import table, text
from shardmill.ids import format_sample_id
from shardmill.values import DatasetPin
from shardmill.words import printable

Rows = list[tuple[str, ...]]
_ENTRIES_SHOWN = 8
_ROWS_IN_REPR = 3
# For those who look something up in it.
_TOO_LARGE = ("document", "manifest")


@dataclass(frozen=True, slots=True)
class ShownList:
    """The entries of one list as a table."""

    name: str
    head: tuple[str, ...]
    rows: Rows
    """Of the first entries."""
    num_entries: int

    @property
    def title(self) -> str:
        shown = f", the first {len(self.rows)}" if self.num_entries > len(self.rows) else ""
        return f"{self.name}: {self.num_entries:,}{shown}"


class Result:
    """A frozen dataclass whose fields are the document of its command."""

    __slots__ = ()
    in_document: ClassVar[str] = ""
    """The one field that is the whole document: a list."""

    @classmethod
    def of(cls, document: Any) -> Self:
        """From the document that the command has printed."""
        return TypeAdapter(cls).validate_python({cls.in_document: document} if cls.in_document else document)

    def document(self) -> Any:
        """What `--json` prints."""
        return plain(self)[self.in_document] if self.in_document else plain(self)

    def table(self) -> Rows:
        """What the command prints for people."""
        return self.shown_rows()

    def raise_if_failed(self) -> None:
        """Raise the error with which the command ends although it has a result."""

    def shown_rows(self) -> Rows:
        """What it shows of itself in Python, beside its lists."""
        return [*_rows(self)]

    def shown_lists(self) -> list[ShownList]:
        """The lists that have entries."""
        return [as_list(name, value) for name, value in _fields(self) if _is_list(value)]

    def __repr__(self) -> str:
        rows = [f"{name} {value}" for name, value in self.shown_rows()] or [each.title for each in self.shown_lists()]
        return printable(f"<{type(self).__name__}: {', '.join(rows[:_ROWS_IN_REPR])}>")

    def __str__(self) -> str:
        named = [(name, printable(value)) for name, value in self.shown_rows()]
        parts = [lines_of(named)] if named else []
        for each in self.shown_lists():
            rows = [tuple(map(printable, row)) for row in (each.head, *each.rows)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            aligned = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
            parts += [each.title, *(f"  {row}" for row in aligned)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        lists = (f"<p>{text(each.title)}</p>{table(each.rows, each.head)}" for each in self.shown_lists())
        return f"<div>{table(self.shown_rows())}{''.join(lists)}</div>"


def lines_of(rows: Rows) -> str:
    """Rows as text, their names in one column."""
    width = max(len(name) for name, *_ in rows)
    return "\n".join(f"{name:<{width}}  {'  '.join(values)}" for name, *values in rows)


def plain(value: Any) -> Any:
    """A value of ours as JSON can hold it."""
    return TypeAdapter(type(value)).dump_python(value, mode="json")


def flat_rows(value: dict[str, Any], prefix: str = "") -> Rows:
    """A document as rows of dotted names."""
    rows: Rows = []
    for name, item in value.items():
        if isinstance(item, dict):
            rows += flat_rows(item, f"{prefix}{name}.")
        else:
            rows.append((f"{prefix}{name}", "" if item is None else str(item)))
    return rows


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    names = (
        value.__class__.model_fields if isinstance(value, BaseModel) else [f.name for f in dataclasses.fields(value)]
    )
    return ((name.replace("_", " "), getattr(value, name)) for name in names if name not in _TOO_LARGE)


def _is_record(value: object) -> bool:
    return dataclasses.is_dataclass(value) or isinstance(value, BaseModel)


def _is_list(value: object) -> bool:
    return isinstance(value, tuple) and bool(value) and _is_record(value[0])


def as_list(name: str, entries: Sequence[Any]) -> ShownList:
    """The first entries; a record's fields are its columns."""
    head = tuple(field for field, _ in _fields(entries[0]))
    rows = [tuple(_named_cell(*field) for field in _fields(each)) for each in entries[:_ENTRIES_SHOWN]]
    return ShownList(name, head, rows, len(entries))


def _rows(value: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, found in _fields(value):
        if isinstance(found, DatasetPin):
            yield f"{prefix}{name}", f"{found.uri}@{found.version}"
        elif _is_record(found):
            yield from _rows(found, f"{prefix}{name} ")
        elif found is not None and found != "" and not _is_list(found):
            is_amount = isinstance(found, int) and name.startswith("num ")
            yield f"{prefix}{name}", f"{found:,}" if is_amount else _cell(found) or "none"


def _named_cell(name: str, value: Any) -> str:
    return format_sample_id(value) if name == "sample id" else _cell(value)


def _cell(value: Any) -> str:
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case Mapping():
            return ", ".join(f"{name} {_cell(each)}" for name, each in value.items())
        case tuple() | list():
            shown = "; ".join(map(_cell, value[:_ENTRIES_SHOWN]))
            return f"{shown}; ..." if len(value) > _ENTRIES_SHOWN else shown
    return " ".join(filter(None, (_cell(each) for _, each in _fields(value)))) if _is_record(value) else str(value)
