"""Refuses folders of masks that would become a class beside their pictures, as those of ADE20K and Pascal VOC."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from etl.units.units import images_of_table
from shardmill.errors import AccessDenied, UsageError
from shardmill.values import SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from etl.listing.listing import Listing
    from etl.sources import Source

_FOLDER_KINDS = frozenset({"folders", "zip", "webdataset", "several"})
_MAX_CLASSES, _MAX_IMAGES = 8, 100_000
# Numbered files have equal names in any two classes: so masks are told by what they hold.
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
    for image in itertools.islice(_images(listing), _MAX_IMAGES):
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


def _images(listing: Listing) -> Iterator[SourceImage]:
    for segment in listing.segments:
        for batch in pq.ParquetFile(listing.folder / segment.path).iter_batches():
            yield from images_of_table(pa.Table.from_batches([batch]))


def _stem(key: str) -> str:
    """A file's name without its folders, and without what tells a mask from its picture."""
    name = re.split(r"[/\0]", key)[-1]
    return _ROLE.sub("", name.rpartition(".")[0] or name)


def _is_mask(data: object) -> bool:
    if not isinstance(data, bytes) or data[:8] != _PNG or len(data) < 24:
        return False
    num_pixels = int.from_bytes(data[16:20], "big") * int.from_bytes(data[20:24], "big")
    return len(data) - _HEAD_BYTES < _MAX_BYTES_PER_PIXEL * num_pixels
