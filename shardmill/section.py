"""The base of every section of a config, a manifest or a stored record: frozen, and strict about its keys."""

from __future__ import annotations

import ast
import inspect
import itertools
import textwrap

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of a config or manifest; a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def field_docstrings(section: type[BaseModel]) -> dict[str, str]:
    """The docstrings behind a section's fields, by name, those of its bases included.

    pydantic would read every section's source for them as soon as it is imported, in each worker: 5 ms a section.
    """
    found: dict[str, str] = {}
    for base in reversed(section.__mro__):
        if issubclass(base, BaseModel) and base not in (BaseModel, Section):
            [definition] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
            assert isinstance(definition, ast.ClassDef)
            for field, behind in itertools.pairwise(definition.body):
                match field, behind:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = inspect.cleandoc(text)
    return found
