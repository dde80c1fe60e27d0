"""Chooses the size of stored images if the config does not: reads some sources so that few images are enlarged.

The same listing and seed give the same sources to look at, so every run chooses the same size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from etl.listing.listing import CELLS_PER_BUCKET
from etl.listing.segments import read_cells
from etl.sources import SOURCES
from etl.units.units import images_of_table
from shardmill.errors import AccessDenied
from shardmill.ids import key_bytes
from shardmill.images.sandbox import DecodeSandbox
from shardmill.mix import mix64_array
from shardmill.options import DEFAULT_IMAGE_SIZE, IMAGE_SIZES
from shardmill.stores import open_store
from shardmill.values import ImageSample, SourceImage

if TYPE_CHECKING:
    from etl.config import EtlConfig, SourceConfig
    from etl.listing.listing import Listing
    from shardmill.dataset.manifest import Manifest

_NUM_SOURCES = 32
# What most networks that were trained on photographs expect.
_OF_PHOTOGRAPHS = 224


@dataclass(frozen=True, slots=True)
class ImageSize:
    """The resolved value of `etl.image_size` in one build."""

    pixels: int
    reason: str = ""
    """Empty if the config says it."""


def choose_image_size(
    listing: Listing, source: SourceConfig, config: EtlConfig, continued: Manifest | None
) -> ImageSize:
    """Return the size of the version that is continued, if there is one: rows of both must have the same size.

    Else reads up to 32 sources, none that a table names by URL.
    """
    if config.image_size:
        return ImageSize(config.image_size)
    if continued is not None:
        return ImageSize(continued.normalize.image_size, f"as in version {continued.version}")
    side = _median_short_side(listing, source, config.model_copy(update={"image_size": DEFAULT_IMAGE_SIZE}))
    if side is None:
        return ImageSize(DEFAULT_IMAGE_SIZE, "the default")
    pixels = next((each for each in IMAGE_SIZES if each <= side), IMAGE_SIZES[-1])
    if side > DEFAULT_IMAGE_SIZE:
        more = f"--set etl.image_size={min(side, _OF_PHOTOGRAPHS)} keeps more, as fine-tuning needs"
        return ImageSize(pixels, f"the default; images are larger, their median short side is {side}: {more}")
    return ImageSize(pixels, f"the median short side of the sources is {side}")


def _median_short_side(listing: Listing, source: SourceConfig, config: EtlConfig) -> int | None:
    """In pixels, of some of the sources that decode; None if there is none, or the size does not matter."""
    if config.resize_mode == "none" or not listing.num_images:
        return None
    reader = SOURCES[source.kind](source).open(config.max_source_bytes)

    def readable() -> Iterator[tuple[SourceImage, bytes]]:
        for image in _some_images(listing, config.seed):
            try:
                data = reader.read(image)
            except (FileNotFoundError, AccessDenied):  # a fact about this image, which its unit will find
                continue
            if isinstance(data, bytes):
                yield image, data

    with DecodeSandbox(config.decode_limits()) as sandbox:
        outcomes = [outcome for _, outcome in sandbox.decode(readable(), config.normalize_options())]
    sides = [min(each.source_height, each.source_width) for each in outcomes if isinstance(each, ImageSample)]
    return statistics.median_low(sides) if sides else None


def _some_images(listing: Listing, seed: int) -> list[SourceImage]:
    """Those of the first cells, by a seeded hash; in the order in which a container is read best."""
    counts_B = np.cumsum(listing.images_by_bucket)
    last_bucket = int(np.searchsorted(counts_B, min(_NUM_SOURCES, counts_B[-1])))
    last_cell = (last_bucket + 1) * CELLS_PER_BUCKET - 1
    store = open_store(str(listing.folder))
    images = [
        image
        for segment in listing.segments
        if segment.has_any_of(0, last_cell)
        for table in read_cells(store, segment.path, 0, last_cell)
        for image in images_of_table(table)
        if "http://" not in image.key and "https://" not in image.key
    ]
    places_N = mix64_array(np.array([image.sample_id for image in images], np.int64), seed).tolist()
    chosen = sorted(zip(places_N, images, strict=True), key=lambda each: (each[0], key_bytes(each[1].key)))
    some = [image for _, image in chosen[:_NUM_SOURCES]]
    return sorted(some, key=lambda image: (image.container, image.place, key_bytes(image.key)))
