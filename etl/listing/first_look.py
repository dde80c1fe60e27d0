"""Looks at a few listed images before any work: for the size of stored ones, and for masks that would be a class.

The same listing and seed give the same sources to look at, so every run chooses the same size.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.listing.listing import CELLS_PER_BUCKET, images_of_table, read_cells
from etl.sources import SOURCES
from shardmill.errors import AccessDenied, UsageError
from shardmill.ids import key_bytes
from shardmill.images.sandbox import DecodeSandbox
from shardmill.mix import mix64_array
from shardmill.options import DEFAULT_IMAGE_SIZE, IMAGE_SIZES
from shardmill.stores import open_store
from shardmill.values import ImageSample, SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import EtlConfig, SourceConfig
    from etl.listing.listing import Listing
    from etl.sources import Source
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


_FOLDER_KINDS = frozenset({"folders", "zip", "webdataset", "several"})
_MAX_CLASSES, _MAX_IMAGES = 8, 100_000
# Numbered files have equal names in any two classes: so a mask is known by what it holds.
_MIN_PAIRS, _NUM_READ = 4, 4
# What names of masks and of their pictures end with: 1_mask.png, 1_gtFine_labelIds.png, 1_leftImg8bit.png.
_ROLE = re.compile(
    r"([-_. ](masks?|seg\w*|labels?\w*|gt\w*|anno\w*|leftimg8bit|colou?r|instance\w*|img|image))+$", re.I
)
_PNG = b"\x89PNG\r\n\x1a\n"
# Of areas of few values PNG keeps a fraction of a byte for each pixel; of photographs one at least.
_HEAD_BYTES, _MAX_BYTES_PER_PIXEL = 200, 0.25


def check_no_masks(listing: Listing, config: SourceConfig, source: Source, max_source_bytes: int) -> None:
    """Raise UsageError if of two classes that are folders one holds masks of the other's pictures.

    Up to 8 files are read. A level of classes that is given is not doubted.
    """
    names = listing.class_names
    is_told = any(part.label_level or part.label_field for part in (config, *config.parts.values()))
    if config.kind not in _FOLDER_KINDS or is_told or not 2 <= len(names) <= _MAX_CLASSES:
        return
    of_class: dict[str, dict[str, SourceImage]] = {name: {} for name in names}
    files = (pq.ParquetFile(listing.folder / segment.path) for segment in listing.segments)
    batches = (batch for file in files for batch in file.iter_batches())
    images = (image for batch in batches for image in images_of_table(pa.Table.from_batches([batch])))
    for image in itertools.islice(images, _MAX_IMAGES):
        if image.label is not None:
            of_class[image.label].setdefault(_stem(image.key), image)
    for pictures, masks in itertools.permutations(names, 2):
        common = sorted(of_class[pictures].keys() & of_class[masks].keys())
        is_all_listed = listing.num_images <= _MAX_IMAGES
        if len(common) < max(_MIN_PAIRS, len(of_class[masks]) // 2 if is_all_listed else 0):
            continue
        pairs = [(of_class[pictures][stem], of_class[masks][stem]) for stem in common[:: len(common) // _NUM_READ]]
        reader = source.open(max_source_bytes)
        try:
            read = [[reader.read(image) for image in pair] for pair in pairs[:_NUM_READ]]
        except (FileNotFoundError, AccessDenied):
            continue
        if all(_is_mask(mask) and not _is_mask(picture) for picture, mask in read):
            raise UsageError(
                f"the folders {printable(pictures)} and {printable(masks)} would be classes, and the second one holds "
                f"masks of the first one's pictures, such as {printable(pairs[0][1].key)}",
                "expected pictures alone, in a folder for each class",
                f"set source.uri to the folder of the pictures, name both in a table with source.mask_field "
                f"(docs/boxes.md#masks), or set source.label_level if {printable(masks)} is a class",
            )


def _stem(key: str) -> str:
    """A file's name without its folders, and without what tells a mask from its picture."""
    name = re.split(r"[/\0]", key)[-1]
    return _ROLE.sub("", name.rpartition(".")[0] or name)


def _is_mask(data: object) -> bool:
    if not isinstance(data, bytes) or data[:8] != _PNG or len(data) < 24:
        return False
    num_pixels = int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")
    return len(data) - _HEAD_BYTES < _MAX_BYTES_PER_PIXEL * num_pixels
