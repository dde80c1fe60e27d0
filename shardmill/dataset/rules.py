"""Verifies the rules of a version that its records prove: manifest, index, row segments and ledger against
each other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property

import pyarrow as pa

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.duplicates import DuplicateCounts, count_duplicates
from shardmill.dataset.layout import Layout
from shardmill.dataset.ledger import ledger_digest, read_rejections
from shardmill.dataset.manifest import content_digest
from shardmill.dataset.row_segments import ROWS_SCHEMA, count_pixels, read_rows, sizes_of
from shardmill.dataset.segment import require
from shardmill.dataset.shard import chunk_digest
from shardmill.dataset.statistics import ChannelSums, ImageSizes, add_sizes
from shardmill.dataset.versions import check_recorded, read_manifest
from shardmill.ids import add_digests, format_digest, key_hash, sample_id_of
from shardmill.values import Rejection, ShardInfo


@dataclass
class RecordRules:
    """The rules, and what several of them need, read once. A rule returns what it found, or raises IntegrityError."""

    dataset: Dataset
    _rows: dict[str, pa.Table] = field(default_factory=dict)

    @cached_property
    def rejections(self) -> list[Rejection]:
        """The rejects ledger."""
        return list(read_rejections(self.dataset.store, self.dataset.manifest))

    def manifest(self) -> str:
        manifest = self.dataset.manifest
        parent = manifest.parent_version
        require(
            parent is None or parent < manifest.version, f"the parent version {parent} is not older than the version"
        )
        origin = manifest.origin_version
        if origin is not None:
            held = read_manifest(self.dataset.store, origin).content_digest
            require(held == manifest.content_digest, f"a {manifest.operation} of version {origin} has different rows")
        return f"version {manifest.version}, {manifest.operation}, by run {manifest.run_id}"

    def recorded(self) -> str:
        return check_recorded(self.dataset.store, self.dataset.pin.version)

    def segments(self) -> str:
        manifest = self.dataset.manifest
        require(ledger_digest(self.rejections) == manifest.ledger_digest, "the ledger's digest is not the manifest's")
        return f"{len(self.dataset.shards)} shards, {len(self.rejections)} rejections"

    def files_exist(self) -> str:
        num_bytes = self.dataset.check_files()
        return f"{2 * len(self.dataset.shards)} files, {num_bytes} bytes"

    def chunks(self) -> str:
        # `shards_of_table` has checked this rule before anything was read.
        return f"{sum(len(shard.chunks) for shard in self.dataset.shards)} chunks"

    def formats_agree(self) -> str:
        for split in self.dataset.manifest.splits:
            seen = {
                name: [
                    (c.num_rows, c.image_bytes, c.content_sha256)
                    for shard in self.dataset.shards_of(split, name)
                    for c in shard.chunks
                ]
                for name in self.dataset.manifest.formats
            }
            first = next(iter(seen.values()))
            require(all(chunks == first for chunks in seen.values()), f"split {split} differs between formats")
        return ", ".join(self.dataset.manifest.formats)

    def row_segments(self) -> str:
        num_rows = 0
        for shard in self.dataset.shards:
            table = self.rows_of(shard)
            require(len(table) == shard.num_rows, f"{shard.rows_path} has {len(table)} rows, not {shard.num_rows}")
            digests = table.column("row_sha256").to_pylist()
            place = 0
            for number, chunk in enumerate(shard.chunks):
                actual = chunk_digest(digests[place : place + chunk.num_rows])
                require(
                    actual == chunk.content_sha256, (f"chunk {number} of {shard.path} does not hold the counted rows")
                )
                place += chunk.num_rows
            num_rows += len(table)
        return f"{num_rows} rows in all formats"

    def sample_ids(self) -> str:
        ids, keys = self.column("sample_id"), self.column("source")
        require(len(set(ids)) == len(ids), "a sample id occurs twice")
        wrong = [key for key, sample_id in zip(keys, ids, strict=True) if not _may_have_id(key, sample_id)]
        require(not wrong, f"{len(wrong)} sample ids do not match their keys, first {wrong[:1]}")
        return f"{len(ids)} ids"

    def accounting(self) -> str:
        counts, source = self.dataset.manifest.counts, self.dataset.manifest.source
        accepted = Counter(self.column("source"))
        rejected = Counter(rejection.key for rejection in self.rejections)
        both = accepted + rejected
        twice = [key for key, times in both.items() if times > 1]
        require(not twice, f"{len(twice)} inputs are counted more than once, first {twice[:1]}")
        require(
            counts.listed == accepted.total() + rejected.total(),
            f"{counts.listed} listed, but {accepted.total()} accepted and {rejected.total()} rejected",
        )
        require(
            format_digest(add_digests(*map(key_hash, both))) == source.key_sum,
            "the accepted and rejected paths are not the listed ones",
        )
        return f"{counts.listed} listed == {accepted.total()} accepted + {rejected.total()} rejected"

    def counts(self) -> str:
        manifest = self.dataset.manifest
        counts, schema = manifest.counts, manifest.row_schema
        by_reason = Counter(str(rejection.reason) for rejection in self.rejections)
        require(dict(by_reason) == counts.by_reason, "rejections by reason do not match the counts")
        by_split = {split: info.num_rows for split, info in manifest.splits.items()}
        require(counts.by_split == by_split, f"splits are counted as {counts.by_split} and {by_split}")
        totals = (sum(by_split.values()), len(self.rejections))
        require(totals == (counts.accepted, counts.rejected), f"{totals} accepted and rejected, counted otherwise")
        for split, info in manifest.splits.items():
            labels = self.column("label", split)
            require(len(labels) == info.num_rows, f"split {split} has {len(labels)} rows, counted {info.num_rows}")
            texts = self.column("extra", split) if schema.has_values else ()
            found = schema.class_counts(labels, texts)
            require(found == info.class_counts, f"classes of split {split} do not match the counts")
            odd = schema.has_class and manifest.class_names and sum(found) != len(labels)
            require(not odd, f"split {split} has rows without a class")
        return ", ".join(f"{split} {num_rows}" for split, num_rows in by_split.items())

    def notes(self) -> str:
        counts = self.dataset.manifest.counts
        by_note = Counter(note for notes in self.column("notes") for note in notes.split(",") if note)
        require(dict(by_note) == counts.by_note, f"notes are {dict(by_note)}, counted {counts.by_note}")
        found = count_duplicates(self._contents())
        counted = DuplicateCounts(counts.duplicate_content, counts.conflicting_label, counts.leaked_content)
        require(found == counted, f"{found}, counted {counted}")
        return f"{by_note.total()} notes, {found.duplicates} duplicates"

    def _contents(self) -> pa.Table:
        """Return the columns for `count_duplicates`."""
        columns = {name: self.column(name) for name in ("source_sha256", "label")}
        types = [*(ROWS_SCHEMA.field(name) for name in columns), pa.field("split", pa.string())]
        splits = [shard.split for shard in self._shards_of(None) for _ in range(shard.num_rows)]
        return pa.table({**columns, "split": splits}, schema=pa.schema(types))

    def sums(self) -> str:
        manifest = self.dataset.manifest
        names = ("channel_sums", "channel_square_sums")
        rows = [self.column(name, "train") for name in names]
        sums, square_sums = (tuple(sum(channel) for channel in zip(*each, strict=True)) for each in rows)
        num_pixels = sum(count_pixels(self.rows_of(shard), manifest.row_schema) for shard in self._shards_of("train"))
        found = ChannelSums(num_pixels=num_pixels, sums=sums, square_sums=square_sums)
        require(found == manifest.channel_sums, f"channels add up to {found}, counted {manifest.channel_sums}")
        sizes = add_sizes(self._sizes_of(shard) for shard in self._shards_of(None))
        require(sizes == manifest.sizes, f"sizes of images are {sizes}, counted {manifest.sizes}")
        return f"{found.num_pixels} pixels of train"

    def _sizes_of(self, shard: ShardInfo) -> ImageSizes:
        image_bytes = sum(chunk.image_bytes for chunk in shard.chunks)
        return sizes_of(self.rows_of(shard), image_bytes, self.dataset.manifest.row_schema)

    def content(self) -> str:
        manifest = self.dataset.manifest
        for split, info in manifest.splits.items():
            total = add_digests(*(int.from_bytes(digest, "big") for digest in self.column("row_sha256", split)))
            require(format_digest(total) == info.row_digest_sum, f"the rows of split {split} are not the counted ones")
        actual = content_digest(
            manifest.columns, manifest.digested_classes, manifest.normalization_fingerprint, manifest.splits
        )
        require(actual == manifest.content_digest, f"content digest {actual}, manifest says {manifest.content_digest}")
        return actual[:16]

    def layout(self) -> str:
        manifest = self.dataset.manifest
        shards = (shard for shard in self.dataset.shards if shard.format == manifest.formats[0])
        actual = Layout(shards).digest(manifest.content_digest, manifest.class_names, manifest.digested_classes)
        require(actual == manifest.layout_digest, f"layout digest {actual}, manifest says {manifest.layout_digest}")
        return actual[:16]

    def column(self, name: str, split: str | None = None) -> list:
        """One column of all rows, of the first format."""
        return [value for shard in self._shards_of(split) for value in self.rows_of(shard).column(name).to_pylist()]

    def _shards_of(self, split: str | None) -> list[ShardInfo]:
        first = self.dataset.manifest.formats[0]
        return [shard for shard in self.dataset.shards if shard.format == first and split in (None, shard.split)]

    def rows_of(self, shard: ShardInfo) -> pa.Table:
        """A shard's verified row segment."""
        if shard.rows_path not in self._rows:
            self._rows[shard.rows_path] = read_rows(self.dataset.store, shard, self.dataset.manifest.row_schema)
        return self._rows[shard.rows_path]


def _may_have_id(key: str, sample_id: int) -> bool:
    # A collision, once in a lifetime, moved one key to a later block of its hash.
    return any(sample_id_of(key, block) == sample_id for block in range(4))


def verify_present(dataset: Dataset) -> None:
    """The quick check before a training: segments verify, and every shard is there with its size.

    Raises IntegrityError; the bytes themselves are verified by the reader, chunk by chunk.
    """
    rules = RecordRules(dataset)
    rules.segments()
    rules.files_exist()
