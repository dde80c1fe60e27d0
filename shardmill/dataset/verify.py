"""Check a committed version against every rule of contract 1, from its manifest down to (with `deep`) every byte."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from shardmill.dataset.commit import content_digest, layout_digest, ledger_digest
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.ids import add_digests, format_digest, key_hash, row_digest, sample_id_of
from shardmill.dataset.index import RESTORE, ROWS_SCHEMA, read_segment, read_verified
from shardmill.dataset.manifest import FileRef
from shardmill.dataset.shard import chunk_digest
from shardmill.errors import IntegrityError, UsageError
from shardmill.reader.fetch import ChunkFetcher
from shardmill.storage import join_uri
from shardmill.values import Rejection, ShardInfo


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and what was found."""

    rule: str
    detail: str
    problem: str = ""
    """Empty where the rule holds."""


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """All rules of one version."""

    uri: str
    version: int
    deep: bool
    checks: tuple[Check, ...]

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.problem)

    def raise_if_failed(self) -> None:
        """Raise IntegrityError (exit 3) for the first broken rule."""
        if self.problems:
            first = self.problems[0]
            others = len(self.problems) - 1
            raise IntegrityError(
                f"{self.uri}@{self.version}: {first.problem}",
                f"the rule: {first.rule}" + (f" ({others} more rules are broken)" if others else ""),
                RESTORE.replace("it ", "the named file ", 1),
            )


def verify_dataset(
    dataset: Dataset, *, deep: bool = False, on_shard: Callable[[int, int], None] | None = None
) -> VerifyReport:
    """Check every rule; the report says what holds and what does not. `deep` re-reads every byte of every shard.

    `on_shard` is told (shards done, all shards). The manifest's own rules were checked when `dataset` was opened.
    """
    facts = _Facts(dataset)
    rules: list[tuple[str, Callable[[], str]]] = [
        ("the manifest is whole, canonical and of a known schema", facts.manifest),
        ("index and ledger segments have their stated SHA-256", facts.segments),
        ("every shard and row segment exists with its stated size", facts.files_exist),
        ("chunks follow each other without gaps, and their rows add up", facts.chunks),
        ("all formats hold the same chunks", facts.formats_agree),
        ("row segments have their stated SHA-256 and rows", facts.row_segments),
        ("each sample id is unique and follows from its source key", facts.sample_ids),
        ("listed == accepted + rejected, by path", facts.accounting),
        ("rows, classes and splits are as counted", facts.counts),
        ("the content digest follows from the rows", facts.content),
        ("the layout digest follows from the chunks", facts.layout),
    ]
    checks = [_checked(rule, check) for rule, check in rules]
    if deep:
        rule = "every byte of every shard has its checksums, and decodes to the counted rows"
        checks.append(_checked(rule, lambda: _read_everything(dataset, on_shard)))
    return VerifyReport(dataset.pin.uri, dataset.pin.version, deep, tuple(checks))


def verify_present(dataset: Dataset) -> None:
    """The quick check before a training: segments verify, and every shard is there with its size.

    Raises IntegrityError; the bytes themselves are verified by the reader, chunk by chunk.
    """
    facts = _Facts(dataset)
    facts.segments()
    facts.files_exist()


def _checked(rule: str, check: Callable[[], str]) -> Check:
    try:
        return Check(rule, check())
    except (IntegrityError, UsageError) as error:
        return Check(rule, "", "; ".join(part for part in (error.what, error.expected) if part))


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise IntegrityError(problem)


@dataclass
class _Facts:
    """What several rules look at, read once."""

    dataset: Dataset
    _rows: dict[str, pa.Table] = field(default_factory=dict)

    @cached_property
    def rejections(self) -> list[Rejection]:
        """The rejects ledger."""
        return self.dataset.read_rejections()

    def manifest(self) -> str:
        manifest = self.dataset.manifest
        parent = manifest.parent_version
        _require(
            parent is None or parent < manifest.version, f"the parent version {parent} is not older than the version"
        )
        return f"version {manifest.version}, schema {manifest.schema_version}, by run {manifest.run_id}"

    def segments(self) -> str:
        manifest = self.dataset.manifest
        _require(ledger_digest(self.rejections) == manifest.ledger_digest, "the ledger's digest is not the manifest's")
        return f"{len(self.dataset.shards)} shards, {len(self.rejections)} rejections"

    def files_exist(self) -> str:
        num_bytes = self.dataset.check_files()
        return f"{2 * len(self.dataset.shards)} files, {num_bytes} bytes"

    def chunks(self) -> str:
        num_chunks = 0
        for shard in self.dataset.shards:
            position = shard.chunks[0].start
            for chunk in shard.chunks:
                _require(chunk.start == position, f"{shard.path} has a gap before byte {chunk.start}")
                _require(chunk.num_rows > 0, f"{shard.path} has an empty chunk at byte {chunk.start}")
                position += chunk.num_bytes
            _require(position == shard.footer_start, f"{shard.path} has bytes that no chunk covers")
            _require(shard.footer_start + shard.footer_bytes == shard.num_bytes, f"{shard.path} has a wrong footer")
            rows = sum(chunk.num_rows for chunk in shard.chunks)
            _require(rows == shard.num_rows, f"{shard.path} has {rows} rows in chunks, {shard.num_rows} in all")
            num_chunks += len(shard.chunks)
        return f"{num_chunks} chunks"

    def formats_agree(self) -> str:
        for split in self.dataset.manifest.splits:
            seen = {
                name: [(c.num_rows, c.image_bytes, c.content_sha256) for c in self.dataset.index(split, name).chunks]
                for name in self.dataset.manifest.formats
            }
            first = next(iter(seen.values()))
            _require(all(chunks == first for chunks in seen.values()), f"split {split} differs between formats")
        return ", ".join(self.dataset.manifest.formats)

    def row_segments(self) -> str:
        num_rows = 0
        for shard in self.dataset.shards:
            table = self.rows_of(shard)
            _require(len(table) == shard.num_rows, f"{shard.rows_path} has {len(table)} rows, not {shard.num_rows}")
            digests = table.column("row_sha256").to_pylist()
            place = 0
            for number, chunk in enumerate(shard.chunks):
                actual = chunk_digest(digests[place : place + chunk.num_rows])
                _require(
                    actual == chunk.content_sha256, f"chunk {number} of {shard.path} holds other rows than counted"
                )
                place += chunk.num_rows
            num_rows += len(table)
        return f"{num_rows} rows in all formats"

    def sample_ids(self) -> str:
        ids, keys = self.column("sample_id"), self.column("source")
        _require(len(set(ids)) == len(ids), "a sample id occurs twice")
        wrong = [key for key, sample_id in zip(keys, ids, strict=True) if not _may_have_id(key, sample_id)]
        _require(not wrong, f"{len(wrong)} sample ids do not follow from their keys, {wrong[:1]} first")
        return f"{len(ids)} ids"

    def accounting(self) -> str:
        counts, source = self.dataset.manifest.counts, self.dataset.manifest.source
        accepted = Counter(self.column("source"))
        rejected = Counter(rejection.key for rejection in self.rejections)
        both = accepted + rejected
        twice = [key for key, times in both.items() if times > 1]
        _require(not twice, f"{len(twice)} inputs are counted more than once, {twice[:1]} first")
        _require(
            counts.listed == accepted.total() + rejected.total(),
            f"{counts.listed} listed, but {accepted.total()} accepted and {rejected.total()} rejected",
        )
        _require(
            format_digest(add_digests(*map(key_hash, both))) == source.key_sum,
            "the accepted and rejected paths are not the listed ones",
        )
        return f"{counts.listed} listed == {accepted.total()} accepted + {rejected.total()} rejected"

    def counts(self) -> str:
        manifest = self.dataset.manifest
        by_reason = Counter(str(rejection.reason) for rejection in self.rejections)
        _require(dict(by_reason) == manifest.counts.by_reason, "rejections by reason are not as counted")
        for split, info in manifest.splits.items():
            labels = self.column("label", split)
            _require(len(labels) == info.num_rows, f"split {split} has {len(labels)} rows, counted {info.num_rows}")
            _require(manifest.counts.by_split[split] == info.num_rows, f"split {split} is counted in two ways")
            found = Counter(labels)
            expected = {number: count for number, count in enumerate(info.class_counts) if count}
            _require(
                not manifest.class_names or dict(found) == expected, f"classes of split {split} are not as counted"
            )
        return ", ".join(f"{split} {info.num_rows}" for split, info in manifest.splits.items())

    def content(self) -> str:
        manifest = self.dataset.manifest
        for split, info in manifest.splits.items():
            total = add_digests(*(int.from_bytes(digest, "big") for digest in self.column("row_sha256", split)))
            _require(format_digest(total) == info.row_digest_sum, f"the rows of split {split} are not the counted ones")
        actual = content_digest(
            manifest.columns, manifest.class_names, manifest.normalization_fingerprint, manifest.splits
        )
        _require(actual == manifest.content_digest, f"content digest {actual}, manifest says {manifest.content_digest}")
        return actual[:16]

    def layout(self) -> str:
        manifest = self.dataset.manifest
        shards = [shard for shard in self.dataset.shards if shard.format == manifest.formats[0]]
        actual = layout_digest(manifest.content_digest, shards)
        _require(actual == manifest.layout_digest, f"layout digest {actual}, manifest says {manifest.layout_digest}")
        return actual[:16]

    def column(self, name: str, split: str | None = None) -> list:
        """One column of all rows, of the first format."""
        first = self.dataset.manifest.formats[0]
        shards = [s for s in self.dataset.shards if s.format == first and split in (None, s.split)]
        return [value for shard in shards for value in self.rows_of(shard).column(name).to_pylist()]

    def rows_of(self, shard: ShardInfo) -> pa.Table:
        """A shard's verified row segment."""
        if shard.rows_path not in self._rows:
            file = FileRef(path=shard.rows_path, num_bytes=shard.rows_bytes, sha256=shard.rows_sha256)
            self._rows[shard.rows_path] = read_segment(self.dataset.store, file, ROWS_SCHEMA)
        return self._rows[shard.rows_path]


def _may_have_id(key: str, sample_id: int) -> bool:
    # A collision, once in a lifetime, moved one key to a later block of its hash.
    return any(sample_id_of(key, block) == sample_id for block in range(4))


def _read_everything(dataset: Dataset, on_shard: Callable[[int, int], None] | None) -> str:
    """Whole-file SHA-256, every CRC, and every row's digest recomputed from the stored image."""
    num_bytes = num_rows = 0
    for number, (shard, fetcher, first_chunk) in enumerate(_with_fetchers(dataset)):
        where = join_uri(dataset.store.uri, shard.path)
        # First chunk by chunk, so that damage is named where it lies; then the file whole, for what no chunk covers.
        for chunk in range(len(shard.chunks)):
            rows = fetcher.read_chunk(first_chunk + chunk)
            labels = [dataset.manifest.class_names[label] if label >= 0 else None for label in rows.labels_N.tolist()]
            digests = [
                row_digest(sample_id, label, bytes(image))
                for sample_id, label, image in zip(rows.sample_ids_N.tolist(), labels, rows.images, strict=True)
            ]
            same = chunk_digest(digests) == shard.chunks[chunk].content_sha256
            _require(same, f"chunk {chunk} of shard {where} holds other rows than were committed")
            num_rows += len(digests)
        file = FileRef(path=shard.path, num_bytes=shard.num_bytes, sha256=shard.sha256)
        num_bytes += len(read_verified(dataset.store, file))
        if on_shard is not None:
            on_shard(number + 1, len(dataset.shards))
    return f"{num_bytes} bytes, {num_rows} rows"


def _with_fetchers(dataset: Dataset) -> Iterator[tuple[ShardInfo, ChunkFetcher, int]]:
    for split in dataset.manifest.splits:
        for format_name in dataset.manifest.formats:
            index = dataset.index(split, format_name)
            fetcher = ChunkFetcher(dataset.store, index)
            for shard, first_chunk in zip(index.shards, np.asarray(index.first_chunk_of_shard).tolist(), strict=True):
                yield shard, fetcher, first_chunk
