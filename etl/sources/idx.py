"""IDX files, the format of MNIST and its family: bare pixels in one file, the classes' numbers in another beside it.

Format: http://yann.lecun.com/exdb/mnist/
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.columns import listed_rows
from etl.sources.containers import (
    ContainerReader,
    Containers,
    FoundFiles,
    gone,
    image_file,
    is_packed,
    reading,
    splits_of,
    unpacked,
)
from etl.sources.names import IDX_SUFFIXES
from etl.sources.plain_png import plain_png
from etl.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.printable import printable
from shardmill.storage import Store, StoredFile
from shardmill.values import RejectReason

if TYPE_CHECKING:
    from etl.config import SourceConfig

# One after the other; a compressed file is unpacked from its start for each block.
_BLOCK_IMAGES = 4_096
_READ_BYTES = 1 << 20
_BATCH_ROWS = 65_536
_MAX_IMAGES, _MAX_IMAGE_BYTES = 100_000_000, 100_000_000
_UNSIGNED_BYTE = 8


class IdxSource:
    """Every image of the pairs `*images*-idx3-ubyte` and `*labels*-idx1-ubyte` that `source.uri` names."""

    def __init__(self, config: SourceConfig) -> None:
        self._files = Containers(config.uri, IDX_SUFFIXES)
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> ContainerReader[_IdxFile]:
        """Reads images by number, as PNG."""
        return ContainerReader(
            self._files.store, _open_images, lambda images, image: plain_png(images.read(image.place))
        )

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file of images, or only some have labels. Damage is a rejection."""
        found = self._files.find()
        images = [file for file in found.containers if "images" in file.path]
        labels = {file.path: self._labels_of(file) for file in images}
        _check_pairs(self.uri, labels)
        used = {file.path for file in labels.values() if file is not None} | labels.keys()
        odd = FoundFiles((), tuple(file for file in (*found.containers, *found.others) if file.path not in used))
        yield ListingBatch(LISTED_SCHEMA.empty_table(), odd.rejections)
        splits = splits_of(labels)
        for file in images:
            yield from _list_pair(self._files.store, file, labels[file.path], splits[file.path])

    def _labels_of(self, images: StoredFile) -> StoredFile | None:
        """The file of labels that belongs to a file of images, packed or not."""
        folder, slash, name = images.path.rpartition("/")
        plain = re.sub(r"idx\d", "idx1", name.replace("images", "labels")).removesuffix(".gz")
        found = (self._files.store.stat(f"{folder}{slash}{plain}{suffix}") for suffix in ("", ".gz"))
        return next((file for file in found if file is not None), None)


def _check_pairs(uri: str, labels: dict[str, StoredFile | None]) -> None:
    if not labels:
        raise UsageError(f"source {uri} holds no IDX file of images", "expected names such as train-images-idx3-ubyte")
    without = next((path for path, file in labels.items() if file is None), None)
    if without is not None and any(labels.values()):
        raise UsageError(
            f"{printable(without)} has no file of labels beside it, and others have",
            "expected train-labels-idx1-ubyte for train-images-idx3-ubyte",
            "restore it, or choose the files with a pattern in source.uri",
        )


@dataclass(slots=True)
class _IdxFile:
    """An opened file: `shape` is what its header states."""

    file: BinaryIO
    path: str
    shape: tuple[int, ...]
    start: int
    """First byte of the data."""

    @property
    def item_bytes(self) -> int:
        return prod(self.shape[1:])

    def read(self, number: int) -> np.ndarray:
        """One image: uint8 of shape `shape[1:]`. Raises IntegrityError if the file ends inside it."""
        with reading(self.path):
            self.file.seek(self.start + number * self.item_bytes)
            data = self.file.read(self.item_bytes)
        if len(data) < self.item_bytes:
            raise IntegrityError(f"the file ends inside image {number}")
        return np.frombuffer(data, np.uint8).reshape(self.shape[1:])


def _open_idx(stream: BinaryIO, file: StoredFile) -> _IdxFile:
    data = unpacked(stream, file)
    with reading(file.path):
        head = data.read(4)
        sizes = data.read(4 * head[3]) if len(head) == 4 else b""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] != _UNSIGNED_BYTE or not 1 <= head[3] <= 4:
        raise IntegrityError(f"no IDX file of bytes: it begins with {head.hex()}")
    if len(sizes) < 4 * head[3]:
        raise IntegrityError("the file ends inside its header")
    shape = struct.unpack(f">{head[3]}I", sizes)
    if shape[0] > _MAX_IMAGES:
        raise IntegrityError(f"it claims {shape[0]} items, and at most {_MAX_IMAGES} are read")
    return _IdxFile(data, file.path, shape, 4 + 4 * head[3])


def _open_images(stream: BinaryIO, file: StoredFile) -> _IdxFile:
    images = _open_idx(stream, file)
    is_picture = len(images.shape) == 3 or (len(images.shape) == 4 and images.shape[3] == 3)
    if not is_picture or not 0 < images.item_bytes <= _MAX_IMAGE_BYTES:
        raise IntegrityError(f"its shape is {images.shape}, expected (images, height, width) or (..., 3)")
    return images


def _list_pair(
    store: Store, file: StoredFile, labels_file: StoredFile | None, split: str | None
) -> Iterator[ListingBatch]:
    """The images of one file; those that a cut file lacks are one rejection, and so is a pair that does not fit."""

    def damage(problem: str) -> ListingBatch:
        refused = image_file(file).rejected(RejectReason.DAMAGED_CONTAINER, problem, "list")
        return ListingBatch(LISTED_SCHEMA.empty_table(), (refused,))

    try:
        with open_file(store, file) as stream:
            images = _open_images(stream, file)
            num_whole = _num_whole(images, file)
        labels = None if labels_file is None else _read_labels(store, labels_file)
        if labels is not None and len(labels) != images.shape[0]:
            raise IntegrityError(f"it has {images.shape[0]} images, and its file of labels {len(labels)}")
    except IntegrityError as error:
        yield damage(str(error))
        return
    except FileNotFoundError:
        yield ListingBatch(LISTED_SCHEMA.empty_table(), (gone(file),))
        return
    for start in range(0, num_whole, _BATCH_ROWS):
        rows = np.arange(start, min(start + _BATCH_ROWS, num_whole), dtype=np.int64)
        yield _listed(rows, file, labels, split)
    if num_whole < images.shape[0]:
        yield damage(f"it is cut: {num_whole} of its {images.shape[0]} images are there")


def _listed(rows: np.ndarray, file: StoredFile, labels: np.ndarray | None, split: str | None) -> ListingBatch:
    num_rows = len(rows)
    places = pa.array(rows)
    columns: dict[str, pa.Array] = {
        "key": pc.binary_join_element_wise(file.path, places.cast(pa.string()), "\0"),
        "mtime_ns": pa.repeat(file.mtime_ns, num_rows),
        "etag": pa.repeat(file.etag, num_rows),
        "split": pa.repeat(pa.scalar(split, pa.string()), num_rows),
        "container": pa.repeat(file.path, num_rows),
        "place": places,
        "block": pa.array(rows // _BLOCK_IMAGES),
    }
    if labels is not None:
        columns["label"] = pa.array(labels[rows]).cast(pa.string())
    return listed_rows(columns, pa.nulls(num_rows, pa.string()), file.path)


def _num_whole(images: _IdxFile, file: StoredFile) -> int:
    """How many images the file really holds. A packed one is read to its end, where its checksum is compared."""
    num_bytes = file.size_bytes - images.start
    if is_packed(file.path):
        num_bytes = _unpacked_bytes(images)
    return min(images.shape[0], num_bytes // images.item_bytes)


def _unpacked_bytes(images: _IdxFile) -> int:
    expected, num_bytes = images.shape[0] * images.item_bytes, 0
    # Read until the end is met, or a bomb has shown that it has more than its header states.
    with reading(images.path):
        while num_bytes <= expected:
            data = images.file.read(_READ_BYTES)
            if not data:
                return num_bytes
            num_bytes += len(data)
    raise IntegrityError(f"more than the {images.shape[0]} images of its header follow")


def _read_labels(store: Store, file: StoredFile) -> np.ndarray:
    with open_file(store, file) as stream, reading(file.path):
        labels = _open_idx(stream, file)
        data = labels.file.read(labels.shape[0] + 1)
    if len(labels.shape) != 1 or len(data) != labels.shape[0]:
        raise IntegrityError(f"its file of labels has the shape {labels.shape} and {len(data)} bytes")
    return np.frombuffer(data, np.uint8)
