"""The result of one check of `shardmill doctor`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmill.errors import ShardmillError, StorageError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    subject: str
    found: str
    fix: str = ""
    is_transient: bool = False
    """A store, a host or a port fails, not the config: the next try may succeed."""


def failed(subject: str, error: ShardmillError) -> Finding:
    is_of_place = isinstance(error, StorageError)
    fix = error.fix or ("check the path, its permissions and the AWS_* environment" if is_of_place else "")
    return Finding("fail", subject, found_by(error), fix, is_transient=is_of_place)


def found_by(error: ShardmillError) -> str:
    return "; ".join(part for part in (error.what, error.expected) if part)
