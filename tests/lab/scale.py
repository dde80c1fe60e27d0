"""How much a test tries: what fits into ten minutes, or with SHARDMILL_FULL=1 the whole product (`make test-all`)."""

from __future__ import annotations

import os
from typing import TypeVar

import pytest

T = TypeVar("T")

IS_FULL = os.environ.get("SHARDMILL_FULL") == "1"


def usually(usual: T, full: T) -> T:
    """`usual`, or in `make test-all` `full`."""
    return full if IS_FULL else usual


def in_drills(*values: object) -> list[object]:
    """Values of one parameter that only `make drill` and `make test-all` run."""
    return [pytest.param(value, marks=pytest.mark.drill) for value in values]


def exhaustive(*values: object, id: str | None = None) -> object:
    """A row of `parametrize` that only `make test-all` runs."""
    return pytest.param(*values, id=id, marks=pytest.mark.exhaustive)
