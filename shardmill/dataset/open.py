"""Opens a dataset version by its URI, or exactly the version that a job's driver resolved."""

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
from shardmill.errors import IntegrityError, UsageError
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


def has_version(uri: str) -> bool:
    """Whether a dataset is there; at an empty URI there is none."""
    return bool(uri) and latest_version(open_store(split_version(uri)[0])) > 0


def first_alike(pin: DatasetPin) -> DatasetPin:
    """The first version that names the very files of this one, in their order: an expiry or a rollback copies nothing.

    It can be read as long as this one can: versions with the same files expire together.
    """
    store = open_store(pin.uri)
    manifest = open_pinned(pin).manifest
    while manifest.operation in ("expire", "rollback") and manifest.origin_version is not None:
        try:
            data = read_manifest_bytes(store, manifest.origin_version)
            origin = parse_manifest(data, manifest.origin_version, store.uri)
        except (IntegrityError, UsageError):
            break  # `verify` says so; this version can be read without it
        if origin.index_segments != manifest.index_segments:
            break
        pin, manifest = pin_of(store, origin.version, data), origin
    return pin


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
