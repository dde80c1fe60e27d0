"""Lists the versions of a dataset. Commits are also recorded apart from the manifests, so that a lost one is noticed.

A manifest's appearance is the commit. After it, `committed/<number>.json` is written, which nothing ever deletes: a
number without a manifest was lost if it is recorded, or lies below one that exists. So nobody reads an older version by
accident, and no writer uses the number a second time. (A crash between the two files leaves the newest version
unrecorded until the next build.)
"""

from __future__ import annotations

import difflib
import hashlib
import itertools
import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from shardmill.checksummed import verified_body, with_checksum
from shardmill.dataset.manifest import MANIFESTS, Manifest, manifest_path, parse_manifest
from shardmill.errors import CannotList, IntegrityError, NoDataset, NoSuchRoot, ShardmillError, UsageError
from shardmill.storage import Store, join_uri
from shardmill.values import DatasetPin

COMMITTED = "committed"
# A manifest names segments, not shards: however large the dataset is, its manifest stays far below this.
_MAX_MANIFEST_BYTES = 64_000_000
_FOLDERS = (MANIFESTS, COMMITTED, "indexes", "shards", "rows", "rejects", "pending")
_RESTORE = "restore it from a copy; another version can be read as URI@N"


def latest_version(store: Store) -> int:
    """The highest committed version, 0 if there is none. Raises IntegrityError naming a manifest that was lost."""
    # A version is recorded after its manifest appeared. Listed in this order, a commit between the two listings is
    # seen as a manifest without a record; the other way round it would look lost.
    recorded = max(_numbers(store, COMMITTED), default=0)
    present = set(_numbers(store, MANIFESTS))
    latest = max(present, default=0)
    if len(present) < max(latest, recorded):
        lost = next(number for number in itertools.count(1) if number not in present)
        raise _lost(store, lost)
    return latest


def check_not_expired(store: Store, version: int) -> None:
    """Raise UsageError if `version` has expired: `gc` may have deleted some of its files, and may delete the others."""
    newest = max(_numbers(store, MANIFESTS), default=0)
    if version >= newest:
        return
    try:
        latest = read_manifest(store, newest)
    except IntegrityError:
        # A damaged version is no reason not to read an older one; if files of that are gone, reading says so.
        return
    if latest.has_expired(version):
        raise UsageError(
            f"{store.uri}@{version} has expired: `shardmill gc` may have deleted its files",
            f"expected a retained version, such as the latest, {newest}",
            f"`shardmill inspect {store.uri} --versions` lists them",
        )


def record_commit(store: Store, version: int, data: bytes) -> None:
    """Record that `version` was committed with the manifest bytes `data`. Writing it again changes nothing."""
    store.put(_record_path(version), _record_of(version, data))


def record_if_missing(store: Store, version: int) -> None:
    """Record a version whose commit was interrupted before `record_commit`."""
    if store.stat(_record_path(version)) is None:
        record_commit(store, version, read_manifest_bytes(store, version))


def check_recorded(store: Store, version: int) -> str:
    """Raise IntegrityError unless the manifest of `version` is the one that was committed; returns what was found."""
    latest_version(store)
    path = _record_path(version)
    try:
        data = store.read(path)
    except FileNotFoundError:
        return "not recorded: the commit was interrupted"
    where = join_uri(store.uri, path)
    verified_body(data, where, fix="restore it from a copy")
    if data != _record_of(version, read_manifest_bytes(store, version)):
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
    try:
        data = store.read_range(path, 0, _MAX_MANIFEST_BYTES + 1)
    except FileNotFoundError:
        raise _absent(store, version) from None
    if len(data) > _MAX_MANIFEST_BYTES:
        raise IntegrityError(
            f"{join_uri(store.uri, path)} is larger than {_MAX_MANIFEST_BYTES} bytes", "not a manifest"
        )
    return data


def split_version(uri: str) -> tuple[str, int | None]:
    """`URI@3` as (`URI`, 3), a URI without version as (`URI`, None)."""
    root, at, version = uri.rpartition("@")
    # ASCII digits only: `int` would also read those of other scripts, and refuse a superscript two.
    return (root, int(version)) if at and re.fullmatch("[0-9]{1,19}", version) else (uri, None)


def at_version(uri: str, version: int) -> str:
    """The URI of this version, whichever `uri` names; `uri` itself for 0."""
    return f"{split_version(uri)[0]}@{version}" if version else uri


def pin_of(store: Store, version: int, data: bytes) -> DatasetPin:
    """The pin of a version whose manifest has the bytes `data`."""
    return DatasetPin(store.uri, version, hashlib.sha256(data).hexdigest())


def _absent(store: Store, version: int) -> ShardmillError:
    try:
        known = sorted({*_numbers(store, MANIFESTS), *_numbers(store, COMMITTED)})
        has_files = bool(known) or _has_files(store)
    except NoSuchRoot as error:
        return UsageError(f"no dataset {store.uri}: {error.what}", error.expected, "check the name")
    if known and 1 <= version <= known[-1]:
        return _lost(store, version)
    if known:
        there = f"version {known[0]}, the only one" if len(known) == 1 else f"one of {known[0]} to {known[-1]}"
        return UsageError(f"{store.uri} has no version {version}", f"expected {there}")
    if has_files:
        return IntegrityError(
            f"{store.uri} is not a committed dataset",
            f"expected {manifest_path(1)}",
            "run `shardmill etl`; a folder without a manifest is never read",
        )
    near = _near_dataset(store.uri)
    return NoDataset(
        f"there is no dataset at {store.uri}",
        "expected a folder created by `shardmill etl`",
        f"did you mean {near}?" if near else "check the path",
    )


def _has_files(store: Store) -> bool:
    """Whether there is anything of what a build writes; no, if nothing can be listed."""
    with suppress(CannotList):
        return any(next(iter(store.list(folder)), None) is not None for folder in _FOLDERS)
    return False


def _lost(store: Store, version: int) -> IntegrityError:
    where = join_uri(store.uri, manifest_path(version))
    return IntegrityError(
        f"{where} is missing", f"version {version} was committed; manifests are never deleted", _RESTORE
    )


def _near_dataset(uri: str) -> str:
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
    try:
        files = list(store.list(folder))
    except CannotList:
        yield from range(1, _newest_by_name(store, folder) + 1)
        return
    for file in files:
        name = re.fullmatch(rf"{folder}/([0-9]{{8}})\.json", file.path)
        if name:
            yield int(name.group(1))


def _newest_by_name(store: Store, folder: str) -> int:
    """The highest number of a store that does not list: numbers have no gaps, so a few of them are asked for."""

    def is_there(number: int) -> bool:
        return store.stat(f"{folder}/{number:08d}.json") is not None

    absent = 1
    while is_there(absent):
        absent *= 2
    present = absent // 2
    while absent - present > 1:
        middle = (present + absent) // 2
        present, absent = (middle, absent) if is_there(middle) else (present, middle)
    return present


def _record_path(version: int) -> str:
    return f"{COMMITTED}/{version:08d}.json"


def _record_of(version: int, data: bytes) -> bytes:
    return with_checksum(json.dumps({"version": version, "manifest_sha256": hashlib.sha256(data).hexdigest()}).encode())
