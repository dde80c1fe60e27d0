"""What a task runs, the same on every engine: one work unit in, published shards and a `UnitResult` out."""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Protocol

from etl.config import EtlConfig
from etl.pending import keep_result
from etl.read_ahead import read_ahead
from etl.read_source import check_source, in_reading_order, places_of, read_source
from etl.sources import SOURCES, SourceReader
from etl.splits import split_of
from etl.units import UnitTask, WorkUnit, read_unit
from shardmill.dataset.shard import publish_shard
from shardmill.dataset.statistics import ImageSizes, count_sizes
from shardmill.dataset.unit_result import SplitSums, UnitResult, encode_sample_ids
from shardmill.errors import IntegrityError, UsageError
from shardmill.failpoints import failpoint, is_failpoint_set
from shardmill.formats.rows import RowSchema, StoredRow, cut_chunks, cut_shards
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.images.decoder_id import decoder_id
from shardmill.images.sandbox import DecodeSandbox
from shardmill.jobs.reach import check_nonce
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.stores.retries import num_retried
from shardmill.values import ImageSample, Rejection, ShardInfo, SourceImage


class Decoder(Protocol):
    """Decodes the images of a unit; see `DecodeSandbox`."""

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image and its outcome, in order. Some of `images` are taken, and so read, before earlier ones end."""
        ...


def write_unit(
    unit: WorkUnit, task: UnitTask, decoder: Decoder | None = None, when_decoded: Callable[[], None] = lambda: None
) -> UnitResult:
    """Read, normalize and store every source of a unit. Safe to run twice, also at once: each attempt has own names.

    Images are decoded by `decoder`; without one in a child process, so that none of them can end this one. What follows
    `when_decoded` is mostly waiting for disks.

    Raises UsageError if this executor would make other pixels than the driver or does not share its dataset folder,
    StorageError if storage fails.
    """
    reader = SOURCES[task.source.kind](task.source).open(task.config.max_source_bytes)
    dataset, retried_before = open_store(task.dataset_uri), num_retried()
    _check_host(task, reader)
    sources = read_unit(task.listing, unit, task.config.seed)

    # Read and normalize: each source ends as one row or one rejection.
    rows_by_split, rejections, unchanged = _outcomes(sources, task, reader, decoder or sandbox_of_process(task.config))
    _check_multiset(unit, sources, rows_by_split, [*rejections, *unchanged])
    _sort_like(sources, rows_by_split)
    when_decoded()

    # Store: the same chunks in every format, published whole.
    shards = [] if task.is_check else _store(dataset, unit, rows_by_split, task)

    # Record: after a crash, a run that plans the same unit finds this and does not repeat it.
    result = UnitResult(
        unit_index=unit.index,
        fingerprint=unit.fingerprint,
        shards=tuple(shards),
        splits=tuple(_split_sums(split, rows, task.row_schema) for split, rows in sorted(rows_by_split.items())),
        rejections=tuple(rejections),
        accepted_key_sum=_key_sum(row.source.key for rows in rows_by_split.values() for row in rows),
        note_counts=tuple(sorted(_count_notes(rows_by_split).items())),
        unchanged_ids=encode_sample_ids(image.sample_id for image in unchanged),
        retried_requests=num_retried() - retried_before,
    )
    if not task.is_check:
        keep_result(dataset, unit, result)
    failpoint("task_report")
    return result


def _check_host(task: UnitTask, reader: SourceReader) -> None:
    """This executor makes the driver's pixels, and sees the driver's source and dataset."""
    here = decoder_id(task.config.normalize_options())
    if task.decoder_id != here:
        raise UsageError(
            f"an executor decodes with {here}",
            f"the driver with {task.decoder_id}",
            "install the same simplejpeg, opencv-python-headless, pillow and shardmill-native (without the last: "
            "etl.kernel = wheels); other versions make other pixels",
        )
    if task.reach is not None:
        check_nonce(task.reach)
    check_source(reader, places_of(task), task.probes)


def _outcomes(
    sources: Sequence[SourceImage], task: UnitTask, reader: SourceReader, decoder: Decoder
) -> tuple[dict[str, list[StoredRow]], list[Rejection], list[SourceImage]]:
    """The rows of each split, the rejections, and the sources whose bytes were known."""
    rows_by_split: dict[str, list[StoredRow]] = defaultdict(list)
    rejections: list[Rejection] = []
    unchanged: list[SourceImage] = []
    label_ids = {name: number for number, name in enumerate(task.row_schema.class_names)}

    def readable() -> Iterator[tuple[SourceImage, bytes]]:
        read, has_failpoint = partial(read_source, reader, task=task), is_failpoint_set()
        for image, data in read_ahead(read, reader.expect, in_reading_order(sources), reader.num_parallel):
            if isinstance(data, Rejection):
                rejections.append(data)
            elif image.known_sha256 and hashlib.sha256(data).hexdigest() == image.known_sha256:
                unchanged.append(image)
            else:
                if has_failpoint:
                    failpoint("decode")
                yield image, data

    for image, outcome in decoder.decode(readable(), task.config.normalize_options()):
        if isinstance(outcome, Rejection):
            rejections.append(outcome)
        else:
            split = split_of(image, outcome.source_sha256, task.config.split_fractions)
            label_id = None if image.label is None else label_ids[image.label]
            rows_by_split[split].append(StoredRow.of(image, label_id, outcome))
    return rows_by_split, rejections, unchanged


def sandbox_of_process(config: EtlConfig) -> DecodeSandbox:
    """One for all units of this process; its child ends with us."""
    return _warm_sandbox(os.getpid(), config.decode_timeout_seconds, config.decode_memory_bytes)


@cache
def _warm_sandbox(process_id: int, timeout_seconds: float, memory_bytes: int) -> DecodeSandbox:
    """A fork must not talk to its parent's child, so the process is part of the key."""
    limits = DecodeLimits(decode_timeout_seconds=timeout_seconds, decode_memory_bytes=memory_bytes)
    return DecodeSandbox(limits, config_section="etl")


def _store(store: Store, unit: WorkUnit, rows_by_split: dict[str, list[StoredRow]], task: UnitTask) -> list[ShardInfo]:
    """The splits at once, because what takes time here is a disk that syncs, or a distant store. One shard of each at a
    time: their bytes are in memory.
    """
    splits = sorted(rows_by_split)
    with ThreadPoolExecutor(max(1, len(splits)), "shardmill-publish") as pool:
        published = pool.map(lambda split: _publish(store, unit, split, rows_by_split[split], task), splits)
        return list(itertools.chain.from_iterable(published))


def _publish(store: Store, unit: WorkUnit, split: str, rows: Sequence[StoredRow], task: UnitTask) -> list[ShardInfo]:
    config = task.config
    attempt = uuid.uuid4().hex[:12]
    return [
        publish_shard(
            store, split, f"{unit.index:06d}-{number:03d}-{attempt}", format_name, chunks, schema=task.row_schema
        )
        for number, chunks in enumerate(cut_shards(cut_chunks(rows, config.chunk_bytes), config.shard_max_bytes))
        for format_name in config.formats
    ]


def _sort_like(sources: Sequence[SourceImage], rows_by_split: dict[str, list[StoredRow]]) -> None:
    """Into the unit's hash order: images of containers were read as they lie there."""
    places = {image.key: place for place, image in enumerate(sources)}
    for rows in rows_by_split.values():
        rows.sort(key=lambda row: places[row.source.key])


def _check_multiset(
    unit: WorkUnit,
    sources: Sequence[SourceImage],
    rows: dict[str, list[StoredRow]],
    others: Sequence[Rejection | SourceImage],
) -> None:
    """`others` were refused, or are known already."""
    ended = Counter(row.source.key for split_rows in rows.values() for row in split_rows)
    ended.update(each.key for each in others)
    if ended != Counter(source.key for source in sources):
        raise IntegrityError(f"work unit {unit.index} lost or doubled an input", "this is a fault in shardmill")


def _split_sums(split: str, rows: Sequence[StoredRow], schema: RowSchema) -> SplitSums:
    return SplitSums(
        split=split,
        num_rows=len(rows),
        image_bytes=sum(row.image_bytes for row in rows),
        class_counts=schema.class_counts((row.label_id for row in rows), (row.source.extra for row in rows)),
        row_digest_sum=format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows))),
        num_pixels=sum(row.sample.height * row.sample.width for row in rows),
        channel_sums=_sum_columns(row.sample.channel_sums for row in rows),
        channel_square_sums=_sum_columns(row.sample.channel_square_sums for row in rows),
        sizes=_sizes([row.sample for row in rows]),
    )


def _sizes(samples: Sequence[ImageSample]) -> ImageSizes:
    heights, widths = [each.source_height for each in samples], [each.source_width for each in samples]
    return ImageSizes(
        source=count_sizes(heights, widths, sum(each.source_bytes for each in samples)),
        stored=count_sizes(
            [each.height for each in samples],
            [each.width for each in samples],
            sum(len(each.image) for each in samples),
        ),
    )


def _sum_columns(rows: Iterator[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sum(column) for column in zip(*rows, strict=True))


def _key_sum(keys: Iterator[str]) -> str:
    return format_digest(add_digests(*map(key_hash, keys)))


def _count_notes(rows: dict[str, list[StoredRow]]) -> Counter[str]:
    return Counter(note for split_rows in rows.values() for row in split_rows for note in row.sample.notes)
