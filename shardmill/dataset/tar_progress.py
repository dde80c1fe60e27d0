"""What an export to tar files has done, in a file beside them: the same command continues a killed export from there.

A tar file is recorded before it is published, and counts as done if it is there with its recorded size; files are
published whole. So none is written twice, and one that was recorded alone is made again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shardmill.checksummed import verified_body, with_checksum
from shardmill.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardmill.storage import Store

EXPORT, PROGRESS = "export.json", "export.progress.json"
_OTHER = "give another folder"


@dataclass(frozen=True, slots=True)
class TarShard:
    """One published tar file."""

    split: str
    path: str
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TarExport:
    """What `shardmill.dataset.tar_export` wrote."""

    dataset: str
    """`URI@N`."""
    target: str
    class_names: tuple[str, ...]
    shards: tuple[TarShard, ...]
    max_bytes: int

    def document(self) -> dict[str, Any]:
        """The content of `export.json`, and of `export-tar --json`."""
        return {**asdict(self), "num_rows": sum(shard.num_rows for shard in self.shards)}


@dataclass(frozen=True, slots=True)
class RecordedTar:
    """A tar file that is published, or is about to be."""

    shard: TarShard
    row_digest_sum: str
    """Of its rows, as the manifest has that of a split."""


class Progress(BaseModel):
    """The export, and its tar files so far, in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    dataset: str
    manifest_sha256: str
    max_bytes: int
    tars: tuple[RecordedTar, ...] = ()

    def of_split(self, split: str) -> list[RecordedTar]:
        """Its tar files of one split."""
        return [tar for tar in self.tars if tar.shard.split == split]

    def recorded(self, target: Store, tar: RecordedTar) -> Progress:
        """With one more tar file, which is published next."""
        more = self.model_copy(update={"tars": (*self.tars, tar)})
        target.put(PROGRESS, with_checksum(more.model_dump_json().encode()))
        return more


def finished_export(target: Store, dataset: str, max_bytes: int) -> TarExport | None:
    """The whole export of these rows that is in the folder; None if there is no `export.json`.

    Raises UsageError for another export, and for one whose files are not all there.
    """
    try:
        found = json.loads(target.read(EXPORT))
        shards = tuple(TarShard(**shard) for shard in found["shards"])
        export = TarExport(found["dataset"], target.uri, tuple(found["class_names"]), shards, found["max_bytes"])
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        raise _not_empty(target, EXPORT) from None
    _check_same(target, "an export", (export.dataset, export.max_bytes), (dataset, max_bytes))
    files = _files(target)
    if lost := next((shard for shard in shards if not _is_whole(shard, files)), None):
        raise UsageError(
            f"{target.uri} is an export that lacks {lost.path}, or has another one of that name",
            f"expected it with {lost.size_bytes} bytes, as {EXPORT} says",
            f"delete the export and run the command again, or {_OTHER}",
        )
    return export


def continued_export(target: Store, begun: Progress) -> Progress:
    """`begun` with the tar files that an earlier run has published; without any in an empty folder.

    Raises UsageError for a folder that holds anything but this export, IntegrityError for an altered record.
    """
    files = _files(target)
    if not files:
        return begun
    if PROGRESS not in files:
        raise _not_empty(target, min(files))
    where = f"{target.uri}/{PROGRESS}"
    try:
        found = Progress.model_validate_json(verified_body(target.read(PROGRESS), where))
    except ValidationError:
        raise IntegrityError(f"{where} is no record of an export", "written by another version", _OTHER) from None
    _check_same(target, "an unfinished export", (found.dataset, found.max_bytes), (begun.dataset, begun.max_bytes))
    if found.manifest_sha256 != begun.manifest_sha256:
        raise UsageError(
            f"{target.uri} contains an unfinished export of another dataset at {begun.dataset}",
            f"expected one with the manifest {begun.manifest_sha256[:12]}, found {found.manifest_sha256[:12]}",
            _OTHER,
        )
    if foreign := sorted({*files} - {PROGRESS, *(tar.shard.path for tar in found.tars)}):
        raise _not_empty(target, foreign[0])
    done = takewhile(lambda tar: _is_whole(tar.shard, files), found.tars)
    return begun.model_copy(update={"tars": tuple(done)})


def _files(target: Store) -> dict[str, int]:
    return {file.path: file.size_bytes for file in target.list("")}


def _is_whole(shard: TarShard, files: Mapping[str, int]) -> bool:
    return files.get(shard.path) == shard.size_bytes


def _check_same(target: Store, what: str, found: tuple[str, int], expected: tuple[str, int]) -> None:
    if found != expected:
        raise UsageError(
            f"{target.uri} contains {what} of {found[0]} with --max-bytes {found[1]}",
            f"expected one of {expected[0]} with --max-bytes {expected[1]}",
            _OTHER,
        )


def _not_empty(target: Store, path: str) -> UsageError:
    return UsageError(
        f"{target.uri} is not empty: it contains {path}",
        "expected an empty folder, none, or an unfinished export of the same version",
        _OTHER,
    )
