"""Makes findings of `shardmill doctor` of errors."""

from __future__ import annotations

from shardmill.calls.results import Finding
from shardmill.errors import ShardmillError, StorageError
from shardmill.storage_errors import ACCESS_FIX


def failed(subject: str, error: ShardmillError) -> Finding:
    fix = error.fix or (ACCESS_FIX if isinstance(error, StorageError) else "")
    return Finding("fail", subject, found_by(error), fix, is_transient=error.is_worth_retrying)


def found_by(error: ShardmillError) -> str:
    return "; ".join(part for part in (error.what, error.expected) if part)
