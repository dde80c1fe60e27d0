"""What one check of `shardmill doctor` came to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardmill.errors import ShardmillError

Status = Literal["ok", "warn", "fail"]


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    subject: str
    found: str
    fix: str = ""


def failed(subject: str, error: ShardmillError) -> Finding:
    fix = error.fix or "check the path, its permissions and the AWS_* environment"
    return Finding("fail", subject, found_by(error), fix)


def found_by(error: ShardmillError) -> str:
    return "; ".join(part for part in (error.what, error.expected) if part)
