"""Copies some rows of a published shard into new shards, without decoding any image, and sums them as a work unit would
have.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.config import EtlConfig
from etl.listing.listing import key_digests, limbs, sum_limbs
from etl.units.results import keep_result
from etl.units.units import CopyUnit, UnitTask
from shardmill.dataset.build import SplitSums, UnitResult
from shardmill.dataset.index import ROWS, in_all_formats
from shardmill.dataset.row_segments import SOURCE_COLUMNS, RowReader, count_pixels, put_segment, read_rows, sizes_of
from shardmill.dataset.shard import Copies, publish_rows, read_stored_rows
from shardmill.formats.rows import RowSchema, StoredRow
from shardmill.ids import format_digest
from shardmill.stores import open_store
from shardmill.values import ShardInfo

# Of a row segment, what a version adds up.
_SUMMED_COLUMNS = (
    "source", "label", "extra", "row_sha256", "notes", "channel_sums", "channel_square_sums", "height", "width",
    *SOURCE_COLUMNS,
)  # fmt: skip
# Of 128 MB, 16 MB are copied in a second.
_SHARDS_PER_MERGE = 8
# Where a row segment says what a listing says of a source's state.
_ROWS_COLUMN = {"size_bytes": "source_bytes", "mtime_ns": "source_mtime_ns", "etag": "source_etag"}


class RowCopier:
    """Copies and adds up rows of one dataset, without decoding an image."""

    def __init__(self, rows: RowReader, config: EtlConfig) -> None:
        self.rows, self.store, self._schema = rows, rows.store, rows.schema
        self._config = config

    def copy(self, copies: Copies, is_kept_N: np.ndarray, restated: pa.Table | None = None) -> tuple[Copies, ...]:
        """Shards with some rows of a shard that is there in several formats, their sources stated as in `result_of`.

        Raises IntegrityError if the shard or its row segment does not match its index.
        """
        rows = _restate(read_stored_rows(self.store, copies[0], self._schema), restated)
        kept = (row for row, is_kept in zip(rows, is_kept_N.tolist(), strict=True) if is_kept)
        return self._publish("kept", kept, copies)

    @property
    def max_merged_bytes(self) -> int:
        """The most that `merge` should copy: it runs in the driver."""
        return self._config.shard_max_bytes // _SHARDS_PER_MERGE

    def merge(self, shards: Sequence[Copies]) -> tuple[Copies, ...]:
        """Shards with all rows of these, which follow each other in one split. Raises as `copy` does."""
        rows = (row for copies in shards for row in read_stored_rows(self.store, copies[0], self._schema))
        return self._publish("merged", rows, shards[0])

    def _publish(self, name: str, rows: Iterable[StoredRow], like: Copies) -> tuple[Copies, ...]:
        config = self._config
        return publish_rows(
            self.store, name, rows, like, self._schema,
            chunk_bytes=config.chunk_bytes, shard_max_bytes=config.shard_max_bytes,
        )  # fmt: skip

    def result_of(
        self, unit_index: int, copies: Copies, is_kept_N: np.ndarray, restated: pa.Table | None = None
    ) -> UnitResult | None:
        """Return the result of a unit that would have written the kept rows of a shard; None if there are none.

        A shard of which all are kept stays as it is. `restated`: what is to be said now of the sources of some rows,
        as in `ShardRows`; row segments alone say it, so only these are written anew. Raises IntegrityError as `copy`
        does.
        """
        if not is_kept_N.any():
            return None
        if not is_kept_N.all():
            shards = self.copy(copies, is_kept_N, restated)
        else:
            shards = (copies,) if restated is None else (tuple(self._restated(copy, restated) for copy in copies),)
        rows = pa.concat_tables(self.rows.read(copies[0], _SUMMED_COLUMNS) for copies in shards)
        image_bytes = sum(chunk.image_bytes for copies in shards for chunk in copies[0].chunks)
        notes = Counter(note for text in rows.column("notes").to_pylist() for note in text.split(",") if note)
        keys = key_digests(pa.table([rows.column("source")], names=["key"]))
        return UnitResult(
            unit_index=unit_index,
            fingerprint="",
            shards=tuple(shard for copies in shards for shard in copies),
            splits=(_split_sums(shards[0][0].split, rows, image_bytes, self._schema),),
            rejections=(),
            accepted_key_sum=format_digest(sum_limbs(limbs(keys))),
            note_counts=tuple(sorted(notes.items())),
        )

    def _restated(self, shard: ShardInfo, restated: pa.Table) -> ShardInfo:
        """The same shard with a row segment of its own."""
        rows = read_rows(self.store, shard, self._schema)
        is_restated_N = np.zeros(rows.num_rows, bool)
        is_restated_N[restated.column("row").to_numpy()] = True
        for name in restated.column_names[1:]:
            place = rows.schema.get_field_index(_ROWS_COLUMN[name])
            before, now = (each.combine_chunks() for each in (rows.column(place), restated.column(name)))
            column = pc.replace_with_mask(before, pa.array(is_restated_N), now)
            rows = rows.set_column(place, rows.schema.field(place), column)
        file = put_segment(self.store, f"{ROWS}/{shard.split}", rows)
        return replace(shard, rows_path=file.path, rows_bytes=file.size_bytes, rows_sha256=file.sha256)

    def only_kept(self, result: UnitResult, is_kept: Mapping[str, np.ndarray]) -> Iterator[UnitResult]:
        """The result with only some of its rows: itself if these are all, else a part for each shard.

        `is_kept`: for each row of a shard, by the path of the shard in the first format. Raises as `copy` does.
        """
        if all(each.all() for each in is_kept.values()):
            yield result
            return
        for group in in_all_formats(result.shards):
            part = self.result_of(result.unit_index, group, is_kept[group[0].path])
            if part is not None:
                yield part


def _restate(rows: Iterator[StoredRow], restated: pa.Table | None) -> Iterator[StoredRow]:
    facts = {} if restated is None else {record.pop("row"): record for record in restated.to_pylist()}
    for place, row in enumerate(rows):
        yield replace(row, source=replace(row.source, **facts[place])) if place in facts else row


def _split_sums(split: str, rows: pa.Table, image_bytes: int, schema: RowSchema) -> SplitSums:
    label_ids = rows.column("label").to_pylist()
    texts = rows.column("extra").to_pylist() if schema.has_values else ()
    digests = np.frombuffer(b"".join(rows.column("row_sha256").to_pylist()), np.uint8).reshape(-1, 32)
    return SplitSums(
        split=split,
        num_rows=rows.num_rows,
        image_bytes=image_bytes,
        class_counts=schema.class_counts(label_ids, texts),
        row_digest_sum=format_digest(sum_limbs(limbs(digests))),
        num_pixels=count_pixels(rows, schema),
        channel_sums=_sum_lists(rows.column("channel_sums")),
        channel_square_sums=_sum_lists(rows.column("channel_square_sums")),
        sizes=sizes_of(rows, image_bytes, schema),
    )


def _sum_lists(column: pa.ChunkedArray) -> tuple[int, ...]:
    """Exact: a shard's sums of squares stay far below 2^63."""
    return tuple(pc.list_flatten(column).to_numpy().reshape(len(column), -1).sum(axis=0).tolist())


def copy_rows(unit: CopyUnit, task: UnitTask) -> UnitResult:
    """New shards with the rows that stay, and a record as `write_unit` leaves one. Safe to run twice, also at once.

    Raises IntegrityError if the shard or its row segment does not match the older version's record.
    """
    store = open_store(task.dataset_uri)
    bits = np.frombuffer(base64.b64decode(unit.kept), np.uint8)
    is_kept_N = np.unpackbits(bits, count=unit.copies[0].num_rows).astype(bool)
    restated = pa.ipc.open_stream(base64.b64decode(unit.restated)).read_all() if unit.restated else None
    copier = RowCopier(RowReader(store, task.row_schema), task.config)
    result = copier.result_of(unit.index, unit.copies, is_kept_N, restated)
    assert result is not None, "a unit has rows that stay"
    result = replace(result, fingerprint=unit.fingerprint)
    keep_result(store, unit, result)
    return result
