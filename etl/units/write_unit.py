"""Runs one work unit, the same on every engine: publishes its shards and returns a `UnitResult`."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any, Protocol

from etl.config import EtlConfig
from etl.listing.splits import split_of
from etl.sources import SOURCES, SourceReader, Unpacks
from etl.units.after_decoding import MaskReader, map_rows, with_annotations
from etl.units.read_source import (
    check_decoders,
    check_source,
    decoders_here,
    in_reading_order,
    is_reading_order,
    places_of,
    read_ahead,
    read_source,
)
from etl.units.results import keep_result
from etl.units.unit_shards import UnitShards, in_unit_order
from etl.units.units import UnitTask, WorkUnit, read_unit
from shardmill.dataset.build import UnitResult, encode_sample_ids
from shardmill.errors import IntegrityError
from shardmill.failpoints import failpoint, is_failpoint_set
from shardmill.formats.rows import StoredRow
from shardmill.ids import format_digest
from shardmill.images.annotations import MAKE_MASK
from shardmill.images.sandbox import PROCESS_IMAGE, DecodeSandbox
from shardmill.jobs.reach import check_nonce
from shardmill.options import DecodeLimits, NormalizeOptions
from shardmill.stores import open_store
from shardmill.stores.retries import num_retried
from shardmill.values import ImageSample, Rejection, SourceImage


class Decoder(Protocol):
    """Decodes the images of a unit; see `DecodeSandbox`."""

    def decode(
        self, images: Iterable[tuple[SourceImage, bytes]], options: NormalizeOptions
    ) -> Iterator[tuple[SourceImage, ImageSample | Rejection]]:
        """Each image and its outcome, in order. Some of `images` are taken, and so read, before earlier ones end."""
        ...


@dataclass(frozen=True, slots=True)
class Decoders:
    """Of the images of a unit, and of their masks, whose entry is `MAKE_MASK`."""

    images: Decoder
    masks: Decoder


def write_unit(
    unit: WorkUnit, task: UnitTask, decoders: Decoders | None = None, when_decoded: Callable[[], None] = lambda: None
) -> UnitResult:
    """Read, normalize and store every source of a unit. Safe to run twice, also at once: each attempt has own names.

    Images are decoded and masks made by `decoders`; without these in child processes, so that none ends this one. What
    follows `when_decoded` is mostly waiting for disks. Beside its sources' facts and the images under way, a unit of
    any size takes `etl.shard_max_bytes` of memory twice: see `UnitShards`.

    Raises UsageError if this executor would make other pixels than the driver or does not share its dataset folder,
    StorageError if storage fails.
    """
    reader = SOURCES[task.source.kind](task.source).open(task.config.max_source_bytes)
    dataset, retried_before = open_store(task.dataset_uri), num_retried()
    _check_host(task, reader)
    sources = read_unit(task.listing, unit, task.config.seed)

    # Read and normalize: each source ends as one row or one rejection. Rows are stored as they come, whole shards at a
    # time: the same chunks in every format.
    ended = _Ended()
    decoders = decoders or sandboxes_of_process(task.config)
    rows = _rows(sources, task, reader, decoders, ended)
    shards = UnitShards(dataset, unit.index, task)
    for split, row in _in_order(rows, sources, task, when_decoded):
        ended.accepted.append(row.source.key)
        shards.add(split, row)
    shards.finish()
    _check_multiset(unit, sources, ended)

    # Record: after a crash, a run that plans the same unit finds this and does not repeat it.
    result = UnitResult(
        unit_index=unit.index,
        fingerprint=unit.fingerprint,
        shards=shards.shards,
        splits=shards.splits,
        rejections=tuple(ended.rejections),
        accepted_key_sum=format_digest(shards.accepted_key_sum),
        note_counts=tuple(sorted(shards.note_counts.items())),
        unchanged_ids=encode_sample_ids(image.sample_id for image in ended.unchanged),
        retried_requests=num_retried() - retried_before,
    )
    if not task.is_check:
        keep_result(dataset, unit, result)
    failpoint("task_report")
    return result


def _check_host(task: UnitTask, reader: SourceReader) -> None:
    """This executor makes the driver's pixels, and sees the driver's source and dataset."""
    check_decoders(task.decoder_id, dict(decoders_here(task.config)))
    if task.reach is not None:
        check_nonce(task.reach)
    check_source(reader, places_of(task), task.probes)


@dataclass(slots=True)
class _Ended:
    """The outcomes of a unit's sources, in addition to its rows."""

    accepted: list[str] = field(default_factory=list)
    """Keys of the rows."""
    rejections: list[Rejection] = field(default_factory=list)
    unchanged: list[SourceImage] = field(default_factory=list)
    """Sources whose bytes were known, and the masks made of them."""


def _rows(
    sources: Sequence[SourceImage], task: UnitTask, reader: SourceReader, decoders: Decoders, ended: _Ended
) -> Iterator[tuple[str, StoredRow]]:
    """The rows, each with its split, as their sources are read; adds the other sources to `ended`."""
    label_ids = {name: number for number, name in enumerate(task.row_schema.class_names)}
    masks = MaskReader(partial(read_source, reader, task=task), task)

    def readable() -> Iterator[tuple[SourceImage, bytes]]:
        has_failpoint = is_failpoint_set()
        for image, data in read_ahead(masks.read, reader.expect, in_reading_order(sources), reader.num_parallel):
            if isinstance(data, Rejection):
                ended.rejections.append(data)
            elif not masks.has_file(image) and _has_known_bytes(image, data):
                ended.unchanged.append(image)
            else:
                if has_failpoint:
                    failpoint("decode")
                yield image, data

    # What a dataset stores needs no decoder that an image may end.
    decoder = reader if isinstance(reader, Unpacks) else decoders.images
    outcomes = decoder.decode(readable(), task.decode_options)
    outcomes = outcomes if task.mapping is None else map_rows(outcomes, task.mapping)
    for found in with_annotations(outcomes, masks, task, partial(decoders.masks.decode, options=task.decode_options)):
        if isinstance(found, Rejection):
            ended.rejections.append(found)
        elif found.is_known:
            ended.unchanged.append(found.image)
        else:
            image = found.image
            label_id = None if image.label is None else label_ids[image.label]
            split = split_of(image, found.sample.source_sha256, task.config.split_fractions)
            yield split, StoredRow.of(image, label_id, found.sample, found.listed_extra, found.mask)


def _has_known_bytes(image: SourceImage, data: bytes) -> bool:
    return image.known_sha256 != "" and hashlib.sha256(data).hexdigest() == image.known_sha256


def _in_order(
    rows: Iterator[tuple[str, StoredRow]],
    sources: Sequence[SourceImage],
    task: UnitTask,
    when_decoded: Callable[[], None],
) -> Iterator[tuple[str, StoredRow]]:
    """The rows in the unit's order; images of containers come as they lie there."""

    def decoded() -> Iterator[tuple[str, StoredRow]]:
        yield from rows
        when_decoded()

    # A check stores nothing, and its sums do not depend on the order.
    if task.is_check or is_reading_order(sources):
        return decoded()
    keys = (image.key for image in sources)
    return in_unit_order(decoded(), keys, task.config.shard_max_bytes, task.config.scratch_dir)


def sandboxes_of_process(config: EtlConfig) -> Decoders:
    """The same for all units of this process; their children end with us, and start when there is work."""
    limits: Any = config.decode_limits()  # frozen, so it has a hash, which Pyright does not see
    return Decoders(_warm_sandbox(os.getpid(), PROCESS_IMAGE, limits), _warm_sandbox(os.getpid(), MAKE_MASK, limits))


@cache
def _warm_sandbox(process_id: int, entry: str, limits: DecodeLimits) -> DecodeSandbox:
    """A fork must not talk to its parent's child, so the process is part of the key."""
    return DecodeSandbox(limits, entry, config_section="etl")


def _check_multiset(unit: WorkUnit, sources: Sequence[SourceImage], ended: _Ended) -> None:
    found = Counter(ended.accepted)
    found.update(each.key for each in (*ended.rejections, *ended.unchanged))
    if found != Counter(source.key for source in sources):
        raise IntegrityError(f"work unit {unit.index} lost or duplicated an input", "this is a bug in shardmill")
