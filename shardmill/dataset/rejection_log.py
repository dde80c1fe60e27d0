"""Stores the rejections of a running build: the rows on disk, their counts in memory."""

from __future__ import annotations

import heapq
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from shardmill.dataset.ledger import ledger_table, ledger_term, rejections_of_table
from shardmill.ids import DIGEST_MODULUS, format_digest, key_bytes, key_hash
from shardmill.storage_errors import as_storage_error
from shardmill.values import Rejection, RejectReason

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
