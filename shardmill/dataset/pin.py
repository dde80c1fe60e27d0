"""A dataset version, resolved once by a job's driver and passed to every rank, so that all read the same one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DatasetPin:
    """Root, number and digest of one committed version."""

    uri: str
    version: int
    manifest_sha256: str
    """Of the manifest file's bytes."""
