"""The base of every section of a config, a manifest or a stored record: frozen, and strict about its keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo


class Section(BaseModel):
    """A frozen section of a config or manifest; a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


@dataclass(frozen=True, slots=True)
class SettingKind:
    """In the metadata of a field: what changing the setting means for what was made with another value."""

    meaning: str


class LaterSection(ABC):
    """Metadata of a field that holds a section: its class, which is imported later than the field's section."""

    @property
    @abstractmethod
    def kind(self) -> type[Section]: ...


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The class of the section that a field holds; None if it holds a value."""
    kind = next((each.kind for each in field.metadata if isinstance(each, LaterSection)), field.annotation)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings behind a section's fields, by name, those of its bases included.

    pydantic would read every section's source for them as soon as it is imported, in each worker: 5 ms a section.
    """
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base not in (BaseModel, Section):
            try:
                source = inspect.getsource(base)
            except OSError:
                # Built of registries' entries (shardmill/entry_options.py): sections, whose classes have docstrings.
                continue
            [definition] = ast.parse(textwrap.dedent(source)).body
            assert isinstance(definition, ast.ClassDef)
            for field, behind in itertools.pairwise(definition.body):
                match field, behind:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found
