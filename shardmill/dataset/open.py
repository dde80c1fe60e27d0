"""Open a dataset version by its URI, or exactly the one that a job's driver has resolved."""

from __future__ import annotations

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.manifest import parse_manifest
from shardmill.dataset.versions import (
    check_not_expired,
    latest_version,
    pin_of,
    read_manifest_bytes,
    split_version,
)
from shardmill.errors import IntegrityError
from shardmill.stores import open_store
from shardmill.values import DatasetPin


def open_dataset(uri: str) -> Dataset:
    """Open `URI` at its latest version, or `URI@N` at version N.

    Raises UsageError if there is no such dataset or version, or it has expired; IntegrityError for what was not
    committed or was altered.
    """
    root, named = split_version(uri)
    store = open_store(root)
    version = (latest_version(store) or 1) if named is None else named
    data = read_manifest_bytes(store, version)
    if named is not None:
        check_not_expired(store, version)
    return Dataset(store, pin_of(store, version, data), parse_manifest(data, version, store.uri))


def open_pinned(pin: DatasetPin) -> Dataset:
    """Open exactly the version that a driver resolved. Raises IntegrityError if its manifest is another one."""
    store = open_store(pin.uri)
    data = read_manifest_bytes(store, pin.version)
    found = pin_of(store, pin.version, data)
    if found.manifest_sha256 != pin.manifest_sha256:
        raise IntegrityError(
            f"the manifest of {pin.uri}@{pin.version} has SHA-256 {found.manifest_sha256}",
            f"expected {pin.manifest_sha256}, which this job's driver resolved",
            "all ranks must see one dataset; restore the manifest",
        )
    return Dataset(store, pin, parse_manifest(data, pin.version, store.uri))
