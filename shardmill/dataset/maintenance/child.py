"""Builds a version with the rows of an older one: the part of its manifest that is the same in all such commits."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

from shardmill.dataset.manifest import Manifest, Operation


def child_of(latest: Manifest, operation: Operation, run_id: str, *, content: Manifest, **changes: Any) -> Manifest:
    """The draft of the version after `latest`, with the rows of `content`; `changes` are further fields of it."""
    return content.model_copy(
        update={
            "version": latest.version + 1,
            "parent_version": latest.version,
            "operation": operation,
            "restored_version": None,
            "expired_versions": latest.expired_versions,
            "commit_id": uuid.uuid4().hex,
            "run_id": run_id,
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **changes,
        }
    )
