"""Checks a committed version against every rule of contract 1: those that its records prove, of manifest, index, row
segments and ledger against each other, and (with `deep`) those that need every byte, decoded image and sum.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from shardmill.checksummed import RESTORE, require, verify_file
from shardmill.dataset.chunks import with_fetchers
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.duplicates import DuplicateCounts, count_duplicates
from shardmill.dataset.index import Layout, shard_file
from shardmill.dataset.ledger import ledger_digest, read_rejections
from shardmill.dataset.manifest import Manifest, content_digest
from shardmill.dataset.row_segments import ROWS_SCHEMA, count_pixels, read_rows, sizes_of
from shardmill.dataset.shard import chunk_digest
from shardmill.dataset.statistics import ChannelSums, ImageSizes, add_sizes
from shardmill.dataset.versions import check_recorded, read_manifest
from shardmill.errors import IntegrityError, SecurityRefusal, ShardmillError, StorageError
from shardmill.formats.encodings import decode_row, decode_stored_mask
from shardmill.formats.rows import ChunkRows
from shardmill.ids import add_digests, format_digest, key_hash, row_digest, sample_id_of
from shardmill.images.look import difference_hash, laplacian_square_sum, luma
from shardmill.options import ENCODINGS
from shardmill.result import Result, Rows
from shardmill.storage import join_uri
from shardmill.typed_columns import MASK, stored_labels
from shardmill.values import DatasetPin, Rejection, ShardInfo, Value


@dataclass(frozen=True, slots=True)
class Check:
    """One rule, and what was found."""

    rule: str
    detail: str
    problem: str = ""
    """Empty if the rule holds."""


@dataclass(frozen=True, slots=True, repr=False)
class VerifyReport(Result):
    """All rules of one version."""

    pin: DatasetPin
    manifest: Manifest
    deep: bool
    checks: tuple[Check, ...]

    @property
    def uri(self) -> str:
        return self.pin.uri

    @property
    def version(self) -> int:
        return self.pin.version

    @property
    def problems(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if check.problem)

    @property
    def ok(self) -> bool:
        """Whether every rule holds."""
        return not self.problems

    def shown_rows(self) -> Rows:
        head = ("ok" if self.ok else "FAILED", f"{self.uri}@{self.version}")
        broken = ("broken rules", f"{len(self.problems)} of {len(self.checks)}")
        return [head, broken, ("deep", "yes" if self.deep else "no")]

    def document(self) -> dict[str, Any]:
        checks = [
            {"rule": each.rule, "ok": not each.problem, "detail": each.detail, "problem": each.problem}
            for each in self.checks
        ]
        return {
            "uri": self.uri, "version": self.version, "deep": self.deep, "ok": self.ok, "checks": checks
        }  # fmt: skip

    def table(self) -> Rows:
        """One row for each rule: whether it holds, and what was found."""
        rows = [("FAILED" if each.problem else "ok", each.rule, each.problem or each.detail) for each in self.checks]
        return rows if self.deep else [*rows, ("-", "the bytes of the shards", "not read; --deep reads them")]

    def raise_if_failed(self) -> None:
        """Raise IntegrityError (exit 3) for the first broken rule."""
        if self.problems:
            first = self.problems[0]
            others = len(self.problems) - 1
            raise IntegrityError(
                f"{self.uri}@{self.version}: {first.problem}",
                f"the rule: {first.rule}" + (f" ({others} more rules are broken)" if others else ""),
                f"repair the named file: {RESTORE}",
            )


def verify_dataset(
    dataset: Dataset | str | os.PathLike[str],
    *,
    deep: bool = False,
    on_shard: Callable[[int, int], None] | None = None,
) -> VerifyReport:
    """Check every rule of an opened dataset, or of `URI` or `URI@N`, and report each. `deep` re-reads every byte.

    `on_shard` is called with (shards done, all shards). Opening the dataset has checked the manifest's own rules.
    """
    if not isinstance(dataset, Dataset):
        dataset = open_dataset(os.fspath(dataset))
    rules = RecordRules(dataset)
    checks: list[tuple[str, Callable[[], str]]] = [
        ("the manifest is whole, canonical and of a known schema", rules.manifest),
        ("no committed version is missing, and this manifest is the committed one", rules.recorded),
        ("index and ledger segments have their stated SHA-256", rules.segments),
        ("every shard and row segment exists with its stated size", rules.files_exist),
        ("chunks follow each other without gaps, and their rows add up", rules.chunks),
        ("all formats hold the same chunks", rules.formats_agree),
        ("row segments have their stated SHA-256 and rows", rules.row_segments),
        ("each sample id is unique and follows from its source key", rules.sample_ids),
        ("listed == accepted + rejected, by path", rules.accounting),
        ("rows, classes and splits are as counted", rules.counts),
        ("notes and duplicates are as counted", rules.notes),
        ("channel sums follow from the rows", rules.sums),
        ("the content digest follows from the rows", rules.content),
        ("the layout digest follows from the chunks", rules.layout),
    ]
    if deep:
        rule = "every byte has its checksums, and every row decodes to what was counted"
        checks.append((rule, lambda: read_everything(dataset, rules.rows_of, on_shard)))
    found = tuple(_checked(rule, check) for rule, check in checks)
    return VerifyReport(dataset.pin, dataset.manifest, deep, found)


def _checked(rule: str, check: Callable[[], str]) -> Check:
    try:
        return Check(rule, check())
    except (StorageError, SecurityRefusal):
        # A store that fails proves nothing about the dataset, and a hostile record must not be read any further.
        raise
    except ShardmillError as error:
        return Check(rule, "", "; ".join(part for part in (error.what, error.expected) if part))
    except Exception as error:  # a parser's error on a damaged record is a finding; the other rules are still checked
        return Check(rule, "", f"cannot be checked: {type(error).__name__}: {error}".splitlines()[0])


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
        # A collision, once in a lifetime, moved one key to a later block of its hash.
        pairs = zip(keys, ids, strict=True)
        wrong = [key for key, own in pairs if all(sample_id_of(key, block) != own for block in range(4))]
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


def verify_present(dataset: Dataset) -> None:
    """The quick check before a training: segments verify, and every shard is there with its size.

    Raises IntegrityError; the bytes themselves are verified by the reader, chunk by chunk.
    """
    rules = RecordRules(dataset)
    rules.segments()
    rules.files_exist()


def read_everything(
    dataset: Dataset, rows_of: Callable[[ShardInfo], pa.Table], on_shard: Callable[[int, int], None] | None
) -> str:
    """Every byte of every shard against its checksums, and every row against its row segment, which `rows_of` reads."""
    num_bytes = num_rows = 0
    for number, (shard, fetcher, first_chunk) in enumerate(with_fetchers(dataset, dataset.manifest.formats)):
        where = join_uri(dataset.store.uri, shard.path)
        known = rows_of(shard).to_pylist()
        place = 0
        # First chunk by chunk, so that an error names the damaged chunk; then the whole file, for what no chunk covers.
        for chunk, info in enumerate(shard.chunks):
            rows = fetcher.read_chunk(first_chunk + chunk)
            recorded = known[place : place + info.num_rows]
            digests = _row_digests(dataset, rows, recorded, where)
            same = chunk_digest(digests) == info.content_sha256
            require(same, f"chunk {chunk} of shard {where} does not hold the committed rows")
            image_bytes = sum(len(image) for image in rows.images)
            require(image_bytes == info.image_bytes, f"chunk {chunk} of shard {where} holds {image_bytes} image bytes")
            _check_rows(dataset, rows, recorded, f"chunk {chunk} of shard {where}")
            place += info.num_rows
        verify_file(dataset.store, shard_file(shard), fix=RESTORE)
        num_bytes, num_rows = num_bytes + shard.size_bytes, num_rows + place
        if on_shard is not None:
            on_shard(number + 1, len(dataset.shards))
    return f"{num_bytes} bytes, {num_rows} rows"


def _row_digests(dataset: Dataset, rows: ChunkRows, known: list[dict], where: str) -> list[bytes]:
    """Of the rows as stored, but for their extra columns: their text is the row segment's, which `_check_rows` holds
    against the values.
    """
    names = dataset.manifest.class_names
    is_class = dataset.manifest.row_schema.has_class
    # Labels that are no classes are among the rows' values, and in the digest with them.
    labels = rows.labels_N.tolist() if is_class else [-1] * len(known)
    require(all(-1 <= label < len(names) for label in labels), f"shard {where} has a label without a class")
    return [
        row_digest(sample_id, names[label] if label >= 0 else None, bytes(image), row.get("extra", ""))
        for sample_id, label, image, row in zip(rows.sample_ids_N.tolist(), labels, rows.images, known, strict=True)
    ]


def _check_rows(dataset: Dataset, rows: ChunkRows, known: list[dict], where: str) -> None:
    """Each row is the one in the row segment, and decodes; a lossless one to the pixels that were summed."""
    options, schema = dataset.manifest.normalize, dataset.manifest.row_schema
    for place, row in enumerate(known):
        label = int(rows.labels_N[place]) if schema.has_class else -1
        stored = (int(rows.sample_ids_N[place]), None if label < 0 else label, rows.sources[place])
        expected = (row["sample_id"], row["label"], row["source"])
        require(stored == expected, f"{where} holds the row {stored}, its row segment {expected}")
        if not schema.has_class:
            [expected] = stored_labels([row["extra"]], schema.label_type, schema.class_names)
            found = rows.labels_N[place]
            same = _is_same(found.tolist() if isinstance(found, np.ndarray | np.generic) else found, expected)
            require(same, f"{where}: {row['source']!r} has the label {found}, its row segment {expected}")
        [values] = schema.values_of([row.get("extra", "")])
        for name, column in rows.extra.items():
            stored: Any = column[place]
            if schema.has_mask and name == MASK:
                stored = hashlib.sha256(stored).hexdigest()
            same = _is_same(stored, values.get(name))
            require(same, (f"{where}: {row['source']!r} has {name} = {stored!r}, its row segment a different value"))
        if not schema.has_images:
            continue
        image_HWC = decode_row(rows.images[place], options)
        if schema.has_mask:
            height, width, _ = image_HWC.shape
            masks: Sequence[Any] = rows.extra[MASK]
            decode_stored_mask(masks[place], (height, width))
        if options.one_shape_HWC is None:
            size = {"height": image_HWC.shape[0], "width": image_HWC.shape[1]}
            require(
                size == {name: row[name] for name in size}, (f"{where}: {row['source']!r} has a different size: {size}")
            )
        # The sums are of the pixels before encoding; what a JPEG decodes to is close to them, and never the same.
        if ENCODINGS[options.encoding].is_lossless:
            pixels = image_HWC.astype(np.int64)
            sums = (pixels.sum(axis=(0, 1)).tolist(), (pixels**2).sum(axis=(0, 1)).tolist())
            same = sums == (row["channel_sums"], row["channel_square_sums"])
            require(same, f"{where}: the pixels of {row['source']!r} do not match the channel sums")
            luma_HW = luma(image_HWC)
            look = (laplacian_square_sum(luma_HW), difference_hash(luma_HW))
            same = look == (row["laplacian_square_sum"], row["difference_hash"])
            require(same, f"{where}: the pixels of {row['source']!r} do not match their sharpness and hash")


def _is_same(stored: Value, expected: Value) -> bool:
    """Whether a format holds a value as well as it can: floats of TFRecord have 32 bits."""
    if isinstance(expected, list) and isinstance(stored, list):
        return len(stored) == len(expected) and all(map(_is_same, stored, expected))
    if isinstance(expected, float) and isinstance(stored, float):
        return bool(np.isclose(stored, expected, rtol=1e-6, equal_nan=True)) or stored == np.float32(expected)
    return stored == expected
