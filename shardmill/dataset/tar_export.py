"""Writes a dataset version as WebDataset shards: tar files of `KEY.jpg`, `KEY.cls` and `KEY.json`, for other readers.

Every row is verified when it is read, and counted; `export.json` is written last, and says that the export is whole.
What is done so
far is in a file beside the tar files: the same command continues a killed export from there. A tar file is recorded
before it is published, and counts as done if it is there with its recorded size; files are published whole. So none is
written twice, and one that was recorded alone is made again.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from io import BytesIO
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from shardmill.checksummed import verified_body, with_checksum
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.leases import reading
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.shard import read_stored_rows
from shardmill.errors import IntegrityError, UsageError
from shardmill.failpoints import failpoint
from shardmill.formats.encodings import decode_row, encode_image
from shardmill.formats.rows import StoredRow
from shardmill.ids import add_digests, format_digest, format_sample_id
from shardmill.result import Result, Rows
from shardmill.storage import Store, is_temporary
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import LABEL, decode_values
from shardmill.words import counted

if TYPE_CHECKING:
    from collections.abc import Mapping


_SUFFIXES = {"jpeg": "jpg", "png": "png", "webp": "webp"}

Members = list[tuple[str, bytes]]
"""The files of one sample: name and content."""


def export_tar(
    dataset: Dataset, target: Store, max_bytes: int,
    on_shard: Callable[[TarShard], object] = lambda shard: None,
    on_resumed: Callable[[list[TarShard]], object] = lambda shards: None,
) -> TarExport:  # fmt: skip
    """Write all splits to an empty folder, `SPLIT-000000.tar` and so on: no file is larger than `max_bytes`, unless it
    holds a single row.

    Equal versions give equal tar files. An export that was interrupted is continued: `on_resumed` gets the files that
    are there, `on_shard` each further one. Raises UsageError for a folder that holds anything else, IntegrityError for
    an altered or missing row; then there is no `export.json`.
    """
    name = f"{dataset.pin.uri}@{dataset.pin.version}"
    if (finished := finished_export(target, name, max_bytes)) is not None:
        on_resumed(list(finished.shards))
        # It may have been killed here.
        _sweep(target, finished.shards)
        return finished
    begun = Progress(dataset=name, manifest_sha256=dataset.pin.manifest_sha256, max_bytes=max_bytes)
    progress = continued_export(target, begun)
    if progress.tars:
        on_resumed([tar.shard for tar in progress.tars])
    # The lease keeps `gc` away from the version; the temporary folder holds one tar file at a time.
    with reading(dataset.store, dataset.pin.version, f"export-tar of {name}"), _temporary_folder() as folder:
        for split in dataset.manifest.splits:
            for tar in _export_split(dataset, split, progress.of_split(split), Path(folder), max_bytes):
                progress = progress.recorded(target, tar)
                failpoint("tar_record")
                target.put_file(tar.shard.path, Path(folder, tar.shard.path))
                Path(folder, tar.shard.path).unlink()
                on_shard(tar.shard)
    shards = tuple(tar.shard for tar in progress.tars)
    export = TarExport(name, target.uri, dataset.manifest.class_names, shards, max_bytes)
    target.put(EXPORT, json.dumps(export.document(), indent=1).encode() + b"\n")
    _sweep(target, shards)
    return export


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    with as_storage_error(tempfile.gettempdir()):
        return tempfile.TemporaryDirectory(prefix="shardmill-tar-")


def _sweep(target: Store, shards: Sequence[TarShard]) -> None:
    """Delete what only an unfinished export needs, and half files of killed ones."""
    target.delete(PROGRESS)
    ours = {shard.path for shard in shards}
    for file in target.list_unpublished(""):
        if is_temporary(file.path) or file.path in ours:
            target.delete_unpublished(file)


def _export_split(
    dataset: Dataset, split: str, done: Sequence[RecordedTar], folder: Path, max_bytes: int
) -> Iterator[RecordedTar]:
    """The tar files of one split that follow those that are done, each once it lies closed in `folder`.

    Raises IntegrityError unless its rows are exactly those that the manifest counts.
    """
    manifest = dataset.manifest
    num_rows = sum(each.shard.num_rows for each in done)
    digest_sum = add_digests(*(int(each.row_digest_sum, 16) for each in done))
    num_tars = len(done)
    tar: _OpenTar | None = None
    for row in _rows_from(dataset, split, num_rows):
        num_rows, digest_sum = num_rows + 1, add_digests(digest_sum, int.from_bytes(row.digest, "big"))
        members = sample_members(row, manifest)
        if tar is not None and tar.size_with(members) > max_bytes:
            yield tar.close()
            tar = None
        if tar is None:
            tar = _OpenTar(folder, split, num_tars)
            num_tars += 1
        tar.add(members, row.digest)
    info = manifest.splits[split]
    if (num_rows, format_digest(digest_sum)) != (info.num_rows, info.row_digest_sum):
        raise IntegrityError(
            f"the {num_rows} rows of split {split} that were read are not the {info.num_rows} of the manifest",
            "expected each of its rows once",
            "run `shardmill verify`",
        )
    if tar is not None:
        yield tar.close()


def _rows_from(dataset: Dataset, split: str, first: int) -> Iterator[StoredRow]:
    """The rows of a split from number `first` on; shards before it are not read."""
    for shard in dataset.shards_of(split):
        if first < shard.num_rows:
            yield from islice(read_stored_rows(dataset.store, shard, dataset.manifest.row_schema), first, None)
        first = max(0, first - shard.num_rows)


def sample_members(row: StoredRow, manifest: Manifest) -> Members:
    """The files of one row: the image as it is stored (`raw` as PNG), the class number, and JSON with all the rest.

    The key is the sample id, which is unique in all splits and versions.
    """
    key, source, sample = format_sample_id(row.source.sample_id), row.source, row.sample
    encoding, image = manifest.normalize.encoding, sample.image
    if encoding not in _SUFFIXES:
        as_png = manifest.normalize.model_copy(update={"encoding": "png"})
        encoding, image = "png", encode_image(decode_row(image, manifest.normalize), as_png)
    # `label` is among the values if it is no single class.
    values = decode_values(source.extra)
    about = {
        "class_name": source.label,
        LABEL: row.label_id,
        **values,
        "sample_id": source.sample_id,
        "source": source.key,
        "source_sha256": sample.source_sha256,
        "height": sample.height,
        "width": sample.width,
        "notes": list(sample.notes),
    }
    members = [(f"{key}.{_SUFFIXES[encoding]}", image)]
    if row.mask:
        members.append((f"{key}.mask.png", row.mask))
    if row.label_id is not None:
        members.append((f"{key}.cls", str(row.label_id).encode()))
    members.append((f"{key}.json", json.dumps(about).encode()))
    return members


class _OpenTar:
    """A tar file that is written to a local disk, until it is full."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self._split = split
        self._file = folder / f"{split}-{number:06d}.tar"
        with as_storage_error(self._file):
            # The plain format of POSIX: our names are short, and every reader knows it.
            self._tar = tarfile.open(self._file, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  `close` closes it
        self._num_rows = self._digest_sum = 0

    def size_with(self, members: Members) -> int:
        """Size of the file if it were closed after these."""
        size = self._tar.offset + sum(tarfile.BLOCKSIZE + _in_blocks(len(data)) for _, data in members)
        # Two empty blocks end it, and its size is a multiple of a record.
        return -(-(size + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE

    def add(self, members: Members, row_digest: bytes) -> None:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            with as_storage_error(self._file, len(data)):
                self._tar.addfile(entry, BytesIO(data))
        self._num_rows += 1
        self._digest_sum = add_digests(self._digest_sum, int.from_bytes(row_digest, "big"))

    def close(self) -> RecordedTar:
        """It lies in the folder, whole."""
        with as_storage_error(self._file):
            self._tar.close()
        shard = TarShard(self._split, self._file.name, self._num_rows, self._file.stat().st_size)
        return RecordedTar(shard, format_digest(self._digest_sum))


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE


EXPORT, PROGRESS = "export.json", "export.progress.json"
_OTHER = "give another folder"


@dataclass(frozen=True, slots=True)
class TarShard:
    """One published tar file."""

    split: str
    path: str
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True, repr=False)
class TarExport(Result):
    """What `shardmill.export_tar` has written."""

    dataset: str
    """`URI@N`."""
    target: str
    class_names: tuple[str, ...]
    shards: tuple[TarShard, ...]
    max_bytes: int

    def document(self) -> dict[str, Any]:
        """The content of `export.json`, and of `export-tar --json`."""
        return {**asdict(self), "num_rows": self.num_rows}

    @property
    def num_rows(self) -> int:
        return sum(shard.num_rows for shard in self.shards)

    def table(self) -> Rows:
        rows: Rows = [("target", self.target)]
        for split in dict.fromkeys(shard.split for shard in self.shards):
            mine = [shard for shard in self.shards if shard.split == split]
            size, num_rows = sum(shard.size_bytes for shard in mine), sum(shard.num_rows for shard in mine)
            rows.append((split, f"{counted(num_rows, 'row')} in {counted(len(mine), 'tar file')}, {size:,} bytes"))
        return rows


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
