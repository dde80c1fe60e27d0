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
    of_storage = "check the path, its permissions and the AWS_* environment"
    fix = error.fix or (of_storage if isinstance(error, StorageError) else "")
    return Finding("fail", subject, found_by(error), fix, is_transient=error.is_worth_retrying)


def found_by(error: ShardmillError) -> str:
    return "; ".join(part for part in (error.what, error.expected) if part)
