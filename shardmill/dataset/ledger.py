"""The rejects ledger: every rejected input with its reason, as a table that the manifest refers to. Of a running build
`RejectionLog` has the rows on disk, and their counts in memory.
"""

from __future__ import annotations

import base64
import heapq
import itertools
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.checksummed import ChecksummedFile, checksum_file
from shardmill.dataset.row_segments import put_segment, read_segment
from shardmill.errors import IntegrityError, UsageError
from shardmill.ids import DIGEST_MODULUS, format_digest, key_bytes, key_hash
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason
from shardmill.words import without_surrogates

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest


REJECTS = "rejects"
SEGMENT_ROWS = 100_000
"""Rejections in a segment of the ledger: about 70 MB in memory."""

LEDGER_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("source_base64", pa.string()),
        ("reason", pa.string()),
        ("detail", pa.string()),
        ("stage", pa.string()),
        ("source_bytes", pa.int64()),
        ("source_mtime_ns", pa.int64()),
        ("source_etag", pa.string()),
        ("source_sha256", pa.string()),
        ("source_container", pa.string()),
        ("source_place", pa.int64()),
        ("source_block", pa.int64()),
    ]
)

# Of a `Rejection`, in the order of the columns behind its key.
_FIELDS = (
    "reason", "detail", "stage", "size_bytes", "mtime_ns", "etag", "source_sha256", "container", "place", "block"
)  # fmt: skip


def write_ledger(store: Store, rejections: Iterable[Rejection]) -> tuple[ChecksummedFile, ...]:
    """Publish the rejects ledger in segments, one of which is in memory at a time; without rejections there is none."""
    left = iter(rejections)
    segments = iter(lambda: list(itertools.islice(left, SEGMENT_ROWS)), [])
    return tuple(put_segment(store, REJECTS, ledger_table(segment)) for segment in segments)


def read_rejections(store: Store, manifest: Manifest) -> Iterator[Rejection]:
    """Every rejection of a version; one segment is in memory at a time.

    Raises IntegrityError, when it is read, for a ledger that is missing or altered.
    """
    for segment in manifest.ledger_segments:
        yield from rejections_of_table(read_segment(store, segment, LEDGER_SCHEMA, manifest.counts.rejected))


def read_ledger(uri: str) -> list[Rejection]:
    """One ledger file below `DATASET/rejects/`: the inputs that a build which ended with exit 4 or 7 rejected.

    No manifest names it, so it is verified against its own name, which holds its digest.
    """
    folder, _, name = uri.rpartition("/")
    store = open_store(folder or ".")
    try:
        data = store.read(name)
    except FileNotFoundError:
        raise UsageError(f"no ledger {uri}", "expected the path that the failed run's error names") from None
    file = checksum_file(name, data)
    if name != f"{file.sha256[:32]}.parquet":
        expected = f"expected a file named {file.sha256[:32]}.parquet"
        raise IntegrityError(f"{uri} was altered, or is not a ledger", expected)
    # No manifest counted its rows; a row takes at least a byte.
    return rejections_of_table(read_segment(store, file, LEDGER_SCHEMA, max_rows=len(data)))


def ledger_digest(rejections: Iterable[Rejection]) -> str:
    """Order-free digest of which input was refused for which reason."""
    return format_digest(sum(map(ledger_term, rejections)) % DIGEST_MODULUS)


def ledger_term(rejection: Rejection) -> int:
    """Return the term that a rejection adds to the ledger's digest."""
    return key_hash(f"{rejection.key}\0{rejection.reason}")


def ledger_table(rejections: Iterable[Rejection]) -> pa.Table:
    """The rejects ledger; a key that is not UTF-8 is base64 in a column of its own."""
    records = [(*_ledger_key(rejection.key), rejection) for rejection in rejections]
    columns = [
        [text for text, _, _ in records],
        [encoded for _, encoded, _ in records],
        *([getattr(rejection, name) for _, _, rejection in records] for name in _FIELDS),
    ]
    columns[2] = [str(reason) for reason in columns[2]]
    # A detail may quote a name that is not UTF-8, such as a link's target.
    columns[3] = [without_surrogates(detail) for detail in columns[3]]
    return pa.table(
        [pa.array(column, field.type) for column, field in zip(columns, LEDGER_SCHEMA, strict=True)],
        schema=LEDGER_SCHEMA,
    )


def rejections_of_table(table: pa.Table) -> list[Rejection]:
    """The rejections of a ledger table, in its order. Raises IntegrityError for a row that is not a rejection."""
    try:
        return [
            Rejection(
                key=record["source"]
                if record["source"] is not None
                else base64.b64decode(record["source_base64"]).decode("utf-8", "surrogateescape"),
                reason=RejectReason(record["reason"]),
                detail=record["detail"],
                size_bytes=record["source_bytes"],
                mtime_ns=record["source_mtime_ns"],
                etag=record["source_etag"],
                source_sha256=record["source_sha256"],
                stage=record["stage"],
                container=record["source_container"],
                place=record["source_place"],
                block=record["source_block"],
            )
            for record in table.to_pylist()
        ]
    except (ValueError, TypeError) as error:
        raise IntegrityError(f"the rejects ledger has a row that is not a rejection: {error}") from None


def _ledger_key(key: str) -> tuple[str | None, str | None]:
    try:
        key.encode()
    except UnicodeEncodeError:
        return None, base64.b64encode(key_bytes(key)).decode()
    return key, None


# About 70 MB. A row group of each file is in memory while they are merged: 100 files of 10 million rejections as much.
MAX_WAITING, ROW_GROUP_ROWS = 100_000, 1_000


class RejectionLog:
    """A growing collection that is read in the order of the keys' bytes, in whatever order it was filled."""

    def __init__(self, folder: Path, rejections: Iterable[Rejection] = ()) -> None:
        """`folder` must exist for as long as the log is used; files in it have names of their own."""
        self.by_reason: Counter[RejectReason] = Counter()
        self.key_sum = 0
        """Additive hash of all keys."""
        self._ledger_sum = 0
        self._folder = folder
        self._waiting: list[Rejection] = []
        self._files: list[Path] = []
        self.add(rejections)

    def add(self, rejections: Iterable[Rejection]) -> None:
        """Add rejections, in any order. Raises StorageError if the disk is full."""
        for rejection in rejections:
            self.by_reason[rejection.reason] += 1
            self.key_sum = (self.key_sum + key_hash(rejection.key)) % DIGEST_MODULUS
            self._ledger_sum = (self._ledger_sum + ledger_term(rejection)) % DIGEST_MODULUS
            self._waiting.append(rejection)
            if len(self._waiting) >= MAX_WAITING:
                self._write()

    def __len__(self) -> int:
        return self.by_reason.total()

    def __iter__(self) -> Iterator[Rejection]:
        self._waiting.sort(key=_key_of)
        return heapq.merge(*map(_read, self._files), list(self._waiting), key=_key_of)

    @property
    def digest(self) -> str:
        """The `ledger_digest` of all of them."""
        return format_digest(self._ledger_sum)

    def _write(self) -> None:
        file = self._folder / f"rejections-{uuid.uuid4().hex}.parquet"
        with as_storage_error(file):
            pq.write_table(ledger_table(sorted(self._waiting, key=_key_of)), file, row_group_size=ROW_GROUP_ROWS)
        self._files.append(file)
        self._waiting = []


def _read(file: Path) -> Iterator[Rejection]:
    with pq.ParquetFile(file) as stored:
        for batch in stored.iter_batches(ROW_GROUP_ROWS, use_threads=False):
            yield from rejections_of_table(pa.Table.from_batches([batch]))


def _key_of(rejection: Rejection) -> bytes:
    return key_bytes(rejection.key)
