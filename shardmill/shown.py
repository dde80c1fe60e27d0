"""The base of values that calls return: they show their figures as rows, and the first entries of their lists."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from shardmill.html import table, text
from shardmill.jobs.summary_rows import Rows, lines_of
from shardmill.values import DatasetPin
from shardmill.words import printable

_ENTRIES_SHOWN = 8
_FIGURES_IN_REPR = 3
# For those who look something up in it.
_TOO_LARGE = ("document", "manifest")


@dataclass(frozen=True, slots=True)
class ShownList:
    """The entries of one list as a table."""

    name: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    """Of the first entries."""
    num_entries: int

    @property
    def title(self) -> str:
        shown = f", the first {len(self.rows)}" if self.num_entries > len(self.rows) else ""
        return f"{self.name}: {self.num_entries:,}{shown}"


class Shown:
    """A frozen dataclass that shows itself as tables in a notebook, and with `print`."""

    __slots__ = ()

    def shown_lists(self) -> list[ShownList]:
        """The lists that have entries."""
        return [as_list(name, value) for name, value in _fields(self) if _is_list(value)]

    def _figures(self) -> Rows:
        return [*_rows(self)]

    def __repr__(self) -> str:
        figures = [f"{name} {value}" for name, value in self._figures()] or [each.title for each in self.shown_lists()]
        return printable(f"<{type(self).__name__}: {', '.join(figures[:_FIGURES_IN_REPR])}>")

    def __str__(self) -> str:
        figures = [(name, printable(value)) for name, value in self._figures()]
        parts = [lines_of(figures)] if figures else []
        for each in self.shown_lists():
            rows = [tuple(map(printable, row)) for row in (each.head, *each.rows)]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            aligned = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
            parts += [each.title, *(f"  {row}" for row in aligned)]
        return "\n".join(parts)

    def _repr_html_(self) -> str:
        lists = (f"<p>{text(each.title)}</p>{table(each.rows, each.head)}" for each in self.shown_lists())
        return f"<div>{table(self._figures())}{''.join(lists)}</div>"


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
    rows = [tuple(_cell(value) for _, value in _fields(each)) for each in entries[:_ENTRIES_SHOWN]]
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
