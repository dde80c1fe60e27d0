"""Shards of an older version, carried into a new one: named again, or copied without the rows that have changed.

Each becomes the result of a work unit that did not have to run, so that the commit adds up all units alike.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.changes import Changes, ShardRows
from etl.config import EtlConfig
from etl.listing import limbs, sum_limbs
from etl.segments import key_digests
from shardmill.dataset.copy_rows import read_stored_rows
from shardmill.dataset.index import rows_file
from shardmill.dataset.row_segments import ROWS_SCHEMA, count_pixels, rows_schema
from shardmill.dataset.segment import read_segment
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.unit_result import SplitSums, UnitResult, encode_prefixes
from shardmill.formats.rows import RowSchema, cut_chunks, cut_shards
from shardmill.ids import DIGEST_MODULUS, add_digests, format_digest, key_hash
from shardmill.storage import Store
from shardmill.values import ShardInfo


def refused_before(changes: Changes) -> UnitResult:
    """The old rejections that still hold, as the result of a unit that did not have to run."""
    return UnitResult(
        unit_index=-1 - len(changes.shards),
        fingerprint="",
        shards=(),
        splits=(),
        rejections=changes.rejections,
        accepted_key_sum=format_digest(0),
        rejected_key_sum=format_digest(add_digests(*(key_hash(each.key) for each in changes.rejections))),
        note_counts=(),
    )


def carry(store: Store, changes: Changes, config: EtlConfig, schema: RowSchema) -> Iterator[UnitResult]:
    """One result for each shard of which a row is left, in layout order.

    Raises IntegrityError if a shard that must be copied, or a row segment, is not what the older version vouches for.
    """
    with TemporaryDirectory(prefix="shardmill-carry-", dir=config.scratch_dir or None) as scratch:
        # Negative, because the ranges of cells count from 0: what is carried comes first in the layout.
        for index, shard in enumerate(changes.shards, start=-len(changes.shards)):
            if shard.is_gone:
                continue
            copies = (shard.copies,) if shard.is_whole else copies_without(store, shard, config, schema, Path(scratch))
            yield result_of(store, index, tuple(copies), schema)


def changes_nothing(store: Store, changes: Changes, results: Sequence[UnitResult]) -> bool:
    """Whether the new rows of `results` are the very rows that were removed, as those of touched files are."""
    balance: Counter[str] = Counter()
    for shard in changes.shards:
        if not shard.is_whole:
            rows = read_segment(store, rows_file(shard.copies[0]), ROWS_SCHEMA, shard.copies[0].num_rows)
            removed = rows.filter(pa.array(~shard.is_kept_N)).column("row_sha256").to_pylist()
            balance[shard.copies[0].split] -= sum(int.from_bytes(digest, "big") for digest in removed)
    for part in (part for result in results for part in result.splits):
        balance[part.split] += int(part.row_digest_sum, 16)
    return not any(total % DIGEST_MODULUS for total in balance.values())


def copies_without(
    store: Store, shard: ShardRows, config: EtlConfig, schema: RowSchema, scratch: Path
) -> Iterator[tuple[ShardInfo, ...]]:
    """The rows that are left, under new names: the encoded images are copied, none is decoded."""
    attempt = uuid.uuid4().hex[:12]
    rows = read_stored_rows(store, shard.copies[0], schema)
    left = (row for row, is_kept in zip(rows, shard.is_kept_N.tolist(), strict=True) if is_kept)
    for number, chunks in enumerate(cut_shards(cut_chunks(left, config.chunk_bytes), config.shard_max_bytes)):
        name = f"kept-{number:03d}-{attempt}"
        yield tuple(
            publish_shard(store, shard.copies[0].split, name, copy.format, chunks, schema=schema, scratch=scratch)
            for copy in shard.copies
        )


def result_of(store: Store, index: int, shards: tuple[tuple[ShardInfo, ...], ...], schema: RowSchema) -> UnitResult:
    """What a unit that had written these rows, of one split, would have returned."""
    columns = rows_schema(schema)
    tables = [read_segment(store, rows_file(copies[0]), columns, copies[0].num_rows) for copies in shards]
    rows = pa.concat_tables(tables)
    image_bytes = sum(chunk.image_bytes for copies in shards for chunk in copies[0].chunks)
    notes = Counter(note for text in rows.column("notes").to_pylist() for note in text.split(",") if note)
    keys = key_digests(pa.table([rows.column("source")], names=["key"]))
    return UnitResult(
        unit_index=index,
        fingerprint="",
        shards=tuple(shard for copies in shards for shard in copies),
        splits=(_split_sums(shards[0][0].split, rows, image_bytes, schema),),
        rejections=(),
        accepted_key_sum=format_digest(sum_limbs(limbs(keys))),
        rejected_key_sum=format_digest(0),
        note_counts=tuple(sorted(notes.items())),
    )


def _split_sums(split: str, rows: pa.Table, image_bytes: int, schema: RowSchema) -> SplitSums:
    labels_N = rows.column("label").drop_null().to_numpy()
    digests = np.frombuffer(b"".join(rows.column("row_sha256").to_pylist()), np.uint8).reshape(-1, 32)
    return SplitSums(
        split=split,
        num_rows=rows.num_rows,
        image_bytes=image_bytes,
        class_counts=tuple(np.bincount(labels_N, minlength=len(schema.class_names)).tolist()),
        row_digest_sum=format_digest(sum_limbs(limbs(digests))),
        num_pixels=count_pixels(rows, schema),
        channel_sums=_sum_lists(rows.column("channel_sums")),
        channel_square_sums=_sum_lists(rows.column("channel_square_sums")),
        source_prefixes=encode_prefixes(rows.column("source_sha256").to_pylist()),
    )


def _sum_lists(column: pa.ChunkedArray) -> tuple[int, ...]:
    """Exact: a shard's sums of squares stay far below 2^63."""
    return tuple(pc.list_flatten(column).to_numpy().reshape(len(column), -1).sum(axis=0).tolist())
