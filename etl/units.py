"""From a listing to work units, by arithmetic alone: they do not depend on the size of the cluster."""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass

import numpy as np

from etl.config import EtlConfig
from etl.sources import Listing
from shardmill.mix import mix64_array
from shardmill.options import ENCODINGS, NormalizeOptions
from shardmill.values import Nonce, SourceImage

# Enough units that a cluster of the size that suits the dataset stays busy until the last of them.
_TARGET_NUM_UNITS = 64

# What may change without making other units.
_NOT_DECIDING = {"engine", "max_reject_fraction", "max_unreadable_fraction", "max_changed_fraction", "scratch_dir"}


@dataclass(frozen=True, slots=True)
class WorkUnit:
    """Sources that one task turns into shards."""

    index: int
    fingerprint: str
    """Over everything that decides what the unit produces: a finished unit of that name need not run again."""
    sources: tuple[SourceImage, ...]


@dataclass(frozen=True, slots=True)
class UnitTask:
    """What all units of a build share; it travels to the executors once."""

    source_uri: str
    dataset_uri: str
    config: EtlConfig
    class_names: tuple[str, ...]
    decoder_id: str
    probes: tuple[str, ...] = ()
    """Keys of a few listed images. If none of them is left, the source is absent, and not only one file."""
    reach: Nonce | None = None
    """Read back by every task; None for units that run in the driver's own process."""


def plan_units(listing: Listing, config: EtlConfig, config_fingerprint: str) -> list[WorkUnit]:
    """Cut the listing, in a seeded hash order, into units of about equal estimated output.

    `config_fingerprint` stands for all of the config that decides what a unit produces (see `fingerprint_config`).
    """
    images = listing.images
    # Hash order mixes classes and folders, so that chunk-level reads are well mixed already.
    ids = np.array([image.sample_id for image in images], dtype=np.int64)
    order = np.argsort(mix64_array(ids, config.seed), kind="stable")
    images_per_unit = _images_per_unit(len(images), config)
    num_units = max(1, -(-len(images) // images_per_unit))
    bounds = [unit * len(images) // num_units for unit in range(num_units + 1)]
    units = []
    for index, (start, stop) in enumerate(itertools.pairwise(bounds)):
        sources = tuple(images[place] for place in order[start:stop].tolist())
        units.append(WorkUnit(index, _fingerprint(sources, config_fingerprint), sources))
    return units


def fingerprint_config(config: EtlConfig, class_names: tuple[str, ...], normalization_fingerprint: str) -> str:
    """A digest of what decides a unit's output beside its sources. Spark, paths and thresholds are not in it.

    The limits of decoding are, although no pixel depends on them: a higher limit asks again for the images that the
    lower one refused.
    """
    deciding = config.model_dump(mode="json", exclude=_NOT_DECIDING | set(NormalizeOptions.model_fields))
    text = json.dumps([deciding, list(class_names), normalization_fingerprint], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _images_per_unit(num_images: int, config: EtlConfig) -> int:
    height, width, channels = config.image_shape_HWC
    image_bytes = max(1, int(height * width * channels * ENCODINGS[config.encoding].bytes_per_value))
    fitting = max(1, config.shard_max_bytes // image_bytes)
    return min(fitting, max(config.unit_min_images, -(-num_images // _TARGET_NUM_UNITS)))


def _fingerprint(sources: tuple[SourceImage, ...], config_fingerprint: str) -> str:
    digest = hashlib.sha256(config_fingerprint.encode())
    for source in sources:
        facts = [
            source.key,
            source.size_bytes,
            source.mtime_ns,
            source.etag,
            source.label,
            source.split,
            source.sample_id,
        ]
        digest.update(json.dumps(facts).encode())
    return digest.hexdigest()
