"""Which versions a dataset has. What was committed is remembered apart, so that a lost manifest is noticed.

A manifest's appearance is the commit. Behind it, `committed/<number>.json` is written, which nothing ever deletes: a
number that is remembered, or that lies below one that is there, and has no manifest was lost. Nobody then reads an
older version by accident, and no writer gives the number away a second time. (A crash between the two files leaves the
newest version unremembered until the next build.)
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from pathlib import Path

from shardmill.dataset.manifest import MANIFESTS, Manifest, manifest_path, parse_manifest
from shardmill.errors import IntegrityError, ShardmillError, UsageError
from shardmill.sealed import seal, unseal
from shardmill.storage import NoSuchRoot, Store, join_uri
from shardmill.values import DatasetPin

COMMITTED = "committed"
# A manifest names segments, not shards: whatever the dataset's size, more than this is no manifest of ours.
_MAX_MANIFEST_BYTES = 64_000_000
_FOLDERS = (MANIFESTS, COMMITTED, "indexes", "shards", "rows", "rejects", "pending")
_RESTORE = "restore it from a copy; another version can be read as URI@N"


def latest_version(store: Store) -> int:
    """The highest committed version, 0 if there is none. Raises IntegrityError naming a manifest that was lost."""
    # A version is remembered after its manifest appeared, so whoever looks in this order misses none.
    remembered = max(_numbers(store, COMMITTED), default=0)
    present = set(_numbers(store, MANIFESTS))
    latest = max(present, default=0)
    if len(present) < max(latest, remembered):
        lost = next(number for number in itertools.count(1) if number not in present)
        raise _lost(store, lost)
    return latest


def remember_commit(store: Store, version: int, data: bytes) -> None:
    """Note that `version` was committed with the manifest bytes `data`. Whoever comes later notes the same."""
    store.put(_remembered_path(version), _remembered(version, data))


def remember_if_forgotten(store: Store, version: int) -> None:
    """Note a version whose commit was interrupted before `remember_commit`."""
    if store.stat(_remembered_path(version)) is None:
        remember_commit(store, version, read_manifest_bytes(store, version))


def check_remembered(store: Store, version: int) -> str:
    """Raise IntegrityError unless the manifest of `version` is the one that was committed; say what was found."""
    latest_version(store)
    path = _remembered_path(version)
    try:
        data = store.read(path)
    except FileNotFoundError:
        return "not remembered: the commit was interrupted, or made by an older shardmill"
    where = join_uri(store.uri, path)
    unseal(data, where)
    if data != _remembered(version, read_manifest_bytes(store, version)):
        raise IntegrityError(
            f"{join_uri(store.uri, manifest_path(version))} is not the manifest that was committed",
            f"expected the SHA-256 in {where}",
            "restore it from a copy",
        )
    return f"as {path} says"


def read_manifest(store: Store, version: int) -> Manifest:
    """The manifest of one version. Raises IntegrityError if it is missing, altered, or of an unknown schema."""
    return parse_manifest(read_manifest_bytes(store, version), version, store.uri)


def read_manifest_bytes(store: Store, version: int) -> bytes:
    """The bytes of one version's manifest, unchecked but for their number.

    Raises UsageError if there is no such dataset or version, IntegrityError if it was lost.
    """
    path = manifest_path(version)
    found = store.stat(path)
    if found is None:
        raise _absent(store, version)
    if found.size_bytes > _MAX_MANIFEST_BYTES:
        raise IntegrityError(f"{join_uri(store.uri, path)} has {found.size_bytes} bytes", "too many for a manifest")
    return store.read(path)


def pin_of(store: Store, version: int, data: bytes) -> DatasetPin:
    """The pin of a version whose manifest has the bytes `data`."""
    return DatasetPin(store.uri, version, hashlib.sha256(data).hexdigest())


def _absent(store: Store, version: int) -> ShardmillError:
    try:
        known = sorted({*_numbers(store, MANIFESTS), *_numbers(store, COMMITTED)})
        remains = known or any(next(iter(store.list(folder)), None) is not None for folder in _FOLDERS)
    except NoSuchRoot as error:
        return UsageError(f"no dataset {store.uri}: {error.what}", error.expected, "check the name")
    if known and 1 <= version <= known[-1]:
        return _lost(store, version)
    if known:
        return UsageError(f"{store.uri} has no version {version}", f"expected one of {known[0]} to {known[-1]}")
    if remains:
        return IntegrityError(
            f"{store.uri} is not a committed dataset",
            f"expected {manifest_path(1)}",
            "run `shardmill etl`; a folder without a manifest is never read",
        )
    near = _nearest(store.uri)
    return UsageError(
        f"there is no dataset at {store.uri}",
        "expected a folder that `shardmill etl` made",
        f"did you mean {near}?" if near else "check the path",
    )


def _lost(store: Store, version: int) -> IntegrityError:
    where = join_uri(store.uri, manifest_path(version))
    return IntegrityError(
        f"{where} is missing", f"version {version} was committed; manifests are never deleted", _RESTORE
    )


def _nearest(uri: str) -> str:
    """A dataset inside the folder `uri`, or beside it under a name like it; empty if there is none, or on S3."""
    if "://" in uri:
        return ""
    wanted = Path(uri)
    try:
        inside = [path.parent for path in wanted.glob(f"*/{MANIFESTS}")]
        beside = {path.parent.name: path.parent for path in wanted.parent.glob(f"*/{MANIFESTS}")}
    except OSError:
        return ""
    near = difflib.get_close_matches(wanted.name, beside, n=1, cutoff=0.5)
    return str(inside[0]) if inside else str(beside[near[0]]) if near else ""


def _numbers(store: Store, folder: str) -> Iterator[int]:
    for file in store.list(folder):
        name = re.fullmatch(rf"{folder}/([0-9]{{8}})\.json", file.path)
        if name:
            yield int(name.group(1))


def _remembered_path(version: int) -> str:
    return f"{COMMITTED}/{version:08d}.json"


def _remembered(version: int, data: bytes) -> bytes:
    return seal(json.dumps({"version": version, "manifest_sha256": hashlib.sha256(data).hexdigest()}).encode())
