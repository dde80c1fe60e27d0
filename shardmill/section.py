"""The base of every section of a config, a manifest or a stored record: frozen, and strict about its keys."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section of a config or manifest; a key that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)
