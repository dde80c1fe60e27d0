"""Writes a dataset version as WebDataset shards: tar files of `KEY.jpg`, `KEY.cls` and `KEY.json`, for other readers.

Every row is verified when it is read, and counted; `export.json` is written last, and says that the export is whole.
"""

from __future__ import annotations

import json
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from shardmill.dataset.copy_rows import read_stored_rows
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.leases import reading
from shardmill.dataset.manifest import Manifest
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.encodings import decode_row, encode_image
from shardmill.formats.rows import StoredRow
from shardmill.ids import add_digests, format_digest, format_sample_id
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.typed_columns import LABEL, decode_values

EXPORT = "export.json"
_SUFFIXES = {"jpeg": "jpg", "png": "png", "webp": "webp"}

Members = list[tuple[str, bytes]]
"""The files of one sample: name and content."""


@dataclass(frozen=True, slots=True)
class TarShard:
    """One published tar file."""

    split: str
    path: str
    num_rows: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class TarExport:
    """What `export_tar` wrote."""

    dataset: str
    """`URI@N`."""
    target: str
    class_names: tuple[str, ...]
    shards: tuple[TarShard, ...]

    def document(self) -> dict[str, Any]:
        """The content of `export.json`, and of `export-tar --json`."""
        return {**asdict(self), "num_rows": sum(shard.num_rows for shard in self.shards)}


def export_tar(
    dataset: Dataset, target: Store, max_bytes: int,
    on_shard: Callable[[TarShard], object] = lambda shard: None,
) -> TarExport:  # fmt: skip
    """Write all splits to an empty folder, `SPLIT-000000.tar` and so on: no file is larger than `max_bytes`, unless it
    holds a single row.

    Equal versions give equal tar files. Raises UsageError for a folder that is not empty, IntegrityError for an altered
    or missing row; then there is no `export.json`.
    """
    if found := next(iter(target.list("")), None):
        raise UsageError(
            f"{target.uri} is not empty: it contains {found.path}",
            "expected an empty folder, or none",
            f"give another folder; an export without {EXPORT} was interrupted: delete it",
        )
    name = f"{dataset.pin.uri}@{dataset.pin.version}"
    shards: list[TarShard] = []
    # The lease keeps `gc` away from the version; the temporary folder holds one tar file at a time.
    with reading(dataset.store, dataset.pin.version, f"export-tar of {name}"), _temporary_folder() as folder:
        for split in dataset.manifest.splits:
            for shard in _export_split(dataset, split, target, folder, max_bytes):
                shards.append(shard)
                on_shard(shard)
    export = TarExport(name, target.uri, dataset.manifest.class_names, tuple(shards))
    target.put(EXPORT, json.dumps(export.document(), indent=1).encode() + b"\n")
    return export


def _temporary_folder() -> tempfile.TemporaryDirectory[str]:
    with as_storage_error(tempfile.gettempdir()):
        return tempfile.TemporaryDirectory(prefix="shardmill-tar-")


def _export_split(dataset: Dataset, split: str, target: Store, folder: str, max_bytes: int) -> Iterator[TarShard]:
    """The tar files of one split, each once it is published. Raises IntegrityError unless its rows are exactly those
    that the manifest counts.
    """
    manifest = dataset.manifest
    num_rows = digest_sum = num_tars = 0
    tar: _OpenTar | None = None
    for stored in dataset.shards_of(split):
        for row in read_stored_rows(dataset.store, stored, manifest.row_schema):
            num_rows, digest_sum = num_rows + 1, add_digests(digest_sum, int.from_bytes(row.digest, "big"))
            members = sample_members(row, manifest)
            if tar is not None and tar.size_with(members) > max_bytes:
                yield tar.publish(target)
                tar = None
            if tar is None:
                tar = _OpenTar(Path(folder), split, num_tars)
                num_tars += 1
            tar.add(members)
    info = manifest.splits[split]
    if (num_rows, format_digest(digest_sum)) != (info.num_rows, info.row_digest_sum):
        raise IntegrityError(
            f"the {num_rows} rows of split {split} that were read are not the {info.num_rows} of the manifest",
            "expected each of its rows once",
            "run `shardmill verify`",
        )
    if tar is not None:
        yield tar.publish(target)


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
    if row.label_id is not None:
        members.append((f"{key}.cls", str(row.label_id).encode()))
    members.append((f"{key}.json", json.dumps(about).encode()))
    return members


class _OpenTar:
    """A tar file that is written to a local disk, and published when it is full."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self._split = split
        self._file = folder / f"{split}-{number:06d}.tar"
        with as_storage_error(self._file):
            # The plain format of POSIX: our names are short, and every reader knows it.
            self._tar = tarfile.open(self._file, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115  `publish` closes it
        self._num_rows = 0

    def size_with(self, members: Members) -> int:
        """Size of the file if it were closed after these."""
        size = self._tar.offset + sum(tarfile.BLOCKSIZE + _in_blocks(len(data)) for _, data in members)
        # Two empty blocks end it, and its size is a multiple of a record.
        return -(-(size + 2 * tarfile.BLOCKSIZE) // tarfile.RECORDSIZE) * tarfile.RECORDSIZE

    def add(self, members: Members) -> None:
        for name, data in members:
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o644
            with as_storage_error(self._file, len(data)):
                self._tar.addfile(entry, BytesIO(data))
        self._num_rows += 1

    def publish(self, target: Store) -> TarShard:
        with as_storage_error(self._file):
            self._tar.close()
        shard = TarShard(self._split, self._file.name, self._num_rows, self._file.stat().st_size)
        target.put_file(shard.path, self._file)
        self._file.unlink()
        return shard


def _in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
