"""Divides a listing into work units by arithmetic alone; they do not depend on the size of the cluster. To other
processes they go as JSON.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cache

import numpy as np
from pydantic import TypeAdapter

from etl.config import REBUILDS_NOTHING, EtlConfig, SourceConfig, etl_settings_of
from etl.listing.listing import (
    CELLS_PER_BUCKET,
    NUM_BUCKETS,
    Listing,
    ListingSegment,
    fact_limbs,
    images_of_table,
    key_digests,
    read_cells,
    sum_limbs,
)
from shardmill.errors import IntegrityError
from shardmill.formats.rows import RowSchema
from shardmill.ids import add_digests, format_digest, key_bytes
from shardmill.mix import mix64_array
from shardmill.options import ENCODINGS, NormalizeOptions
from shardmill.row_mapping import RowMapping
from shardmill.stores import open_store
from shardmill.values import Nonce, ShardInfo, SourceImage

# Enough units that a cluster of the size that suits the dataset stays busy until the last of them.
_TARGET_NUM_UNITS = 64
_MIN_UNIT_SOURCE_BYTES = 64_000_000


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """A range of cells whose images one task turns into shards."""

    index: int
    """Position among all ranges, including those without images: the order of its shards in the version."""
    fingerprint: str
    """Over everything that decides what the unit produces: a finished unit of that name need not run again."""
    first_cell: int
    last_cell: int
    """Both ends belong to the unit."""
    num_images: int
    facts_sum: str
    """Sum of its images' facts, which verifies that the unit reads the planned images."""


@dataclass(frozen=True, slots=True)
class CopyUnit:
    """A shard of an older version, of which a task copies some rows or states sources anew; it decodes no image."""

    index: int
    """Negative: what is carried comes first in the layout, and ranges of cells count from 0."""
    fingerprint: str
    """Fingerprint, as in a `WorkUnit`."""
    copies: tuple[ShardInfo, ...]
    """The shard in all formats."""
    kept: str
    """A bit for each row, in base64."""
    restated: str
    """Restated rows, as in `ShardRows`: an Arrow stream in base64, empty for none."""
    num_images: int
    """Rows that stay."""


@dataclass(frozen=True, slots=True)
class ListingLocation:
    """Location of the listing's segments, for tasks."""

    uri: str
    segments: tuple[ListingSegment, ...]


@dataclass(frozen=True, slots=True)
class UnitTask:
    """The values that all units of a build share; sent to the executors once."""

    source: SourceConfig
    dataset_uri: str
    config: EtlConfig
    row_schema: RowSchema
    decoder_id: str
    listing: ListingLocation
    probes: tuple[str, ...] = ()
    """Paths of a few listed files. If none of them is left, the source is absent, and not only one file."""
    reach: Nonce | None = None
    """Read back by every task; None for units that run on the driver's host."""
    is_check: bool = False
    """Read and decode only: nothing is stored, and results have no shards."""
    mapping: RowMapping | None = None
    """What is stored of each image in place of its pixels; None to store these."""

    @property
    def decode_options(self) -> NormalizeOptions:
        """Options of the images that the task decodes."""
        return self.config.normalize_options() if self.mapping is None else self.mapping.decode_options


def plan_units(listing: Listing, config: EtlConfig, config_fingerprint: str) -> list[WorkUnit]:
    """Cut the cells into equal ranges, a power of two of them, with about equal estimated output.

    A grown listing has the same ranges until it needs twice as many. `config_fingerprint` identifies all of the config
    that decides what a unit produces (see `fingerprint_config`).
    """
    num_units = _num_units(listing, config)
    images_by_unit = listing.images_by_bucket.reshape(num_units, -1).sum(axis=1)
    facts_by_unit = listing.facts_by_bucket.reshape(num_units, -1, 8)
    num_cells = CELLS_PER_BUCKET * (NUM_BUCKETS // num_units)
    units = []
    for place in np.flatnonzero(images_by_unit).tolist():
        facts_sum = format_digest(sum_limbs(facts_by_unit[place]))
        fingerprint = hashlib.sha256(f"{config_fingerprint}\0{images_by_unit[place]}\0{facts_sum}".encode()).hexdigest()
        first = place * num_cells
        units.append(WorkUnit(place, fingerprint, first, first + num_cells - 1, int(images_by_unit[place]), facts_sum))
    return units


def read_unit(listing: ListingLocation, unit: WorkUnit, seed: int) -> tuple[SourceImage, ...]:
    """The unit's images in a seeded hash order: it mixes classes and folders, so chunk-level reads are mixed already.

    Raises IntegrityError if the segments do not hold what was planned.
    """
    store = open_store(listing.uri)
    images: list[SourceImage] = []
    facts_sum = 0
    for segment in listing.segments:
        if not segment.has_any_of(unit.first_cell, unit.last_cell):
            continue
        for table in read_cells(store, segment.path, unit.first_cell, unit.last_cell):
            facts_sum += sum_limbs(fact_limbs(key_digests(table), table))
            images += images_of_table(table)
    if len(images) != unit.num_images or format_digest(add_digests(facts_sum)) != unit.facts_sum:
        raise IntegrityError(
            f"the listing of work unit {unit.index} in {listing.uri} has {len(images)} images",
            f"expected {unit.num_images}, as planned",
            "run it again; if this repeats, the storage alters files",
        )
    ids_N = np.array([image.sample_id for image in images], np.int64)
    places_N = mix64_array(ids_N, seed).tolist()
    order = sorted(range(len(images)), key=lambda number: (places_N[number], key_bytes(images[number].key)))
    return tuple(images[number] for number in order)


def fingerprint_config(
    config: EtlConfig, schema: RowSchema, normalization_fingerprint: str, image_field: str = ""
) -> str:
    """A digest of what decides a unit's output beside its sources. Spark, paths and thresholds are not in it.

    `image_field` (of the section `source`) is, because the listing does not say which of a row's images is read.
    The limits of decoding are, although no pixel depends on them: a higher limit asks again for the images that the
    lower one refused.
    """
    # Of splits and the label map, what follows decides: facts of the listing, and the class names below. So a map that
    # only grew rebuilds nothing.
    elsewhere = {*etl_settings_of(REBUILDS_NOTHING), *NormalizeOptions.model_fields}
    deciding = config.model_dump(mode="json", exclude=elsewhere)
    parts = [deciding, list(schema.class_names), normalization_fingerprint, *([image_field] if image_field else [])]
    # Their values are facts of the listing, and the same values may be of another type.
    parts += [[column.name, column.type] for column in schema.extra]
    parts += [] if schema.has_class else [schema.label_type]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def stored_image_bytes(listing: Listing, config: EtlConfig) -> int:
    """Estimate the average size of a stored image in one format; it balances work units and limits nothing."""
    num_values = config.image_size**2 * config.num_channels
    of_size = max(1, int(num_values * ENCODINGS[config.encoding].bytes_per_value))
    listed = listing.source_bytes // max(1, listing.num_images)
    if config.one_shape_HWC is not None or not listed:
        return of_size
    # An image that is not resized takes about what its file takes; one that is only shrunk, not more.
    if config.resize_mode == "none":
        return listed
    return of_size if config.enlarges else min(of_size, listed)


def _num_units(listing: Listing, config: EtlConfig) -> int:
    """The smallest power of two with which a unit's images fit into one shard, as far as their size can be told."""
    num_images = listing.num_images
    # 256 photos of 12 megapixels are minutes of one task: few of them would all be in one unit.
    mean_bytes = max(1, listing.source_bytes // max(1, num_images))
    least_images = min(config.unit_min_images, max(1, _MIN_UNIT_SOURCE_BYTES // mean_bytes))
    fitting = max(1, config.shard_max_bytes // stored_image_bytes(listing, config))
    images_per_unit = min(fitting, max(least_images, -(-num_images // _TARGET_NUM_UNITS)))
    return min(NUM_BUCKETS, 1 << max(0, -(-num_images // images_per_unit) - 1).bit_length())


def encode_task(task: UnitTask) -> bytes:
    """A task as JSON."""
    return _tasks().dump_json(task)


def decode_task(data: bytes) -> UnitTask:
    """The task that `encode_task` wrote."""
    return _tasks().validate_json(data)


def encode_unit(unit: WorkUnit | CopyUnit) -> bytes:
    """A work unit as JSON."""
    return _units().dump_json(unit)


def decode_unit(data: bytes) -> WorkUnit | CopyUnit:
    """The work unit that `encode_unit` wrote."""
    return _units().validate_json(data)


# Made once: making one takes longer than sending ten units.
@cache
def _tasks() -> TypeAdapter[UnitTask]:
    return TypeAdapter(UnitTask)


@cache
def _units() -> TypeAdapter[WorkUnit | CopyUnit]:
    return TypeAdapter(WorkUnit | CopyUnit)
