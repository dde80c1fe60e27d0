"""IDX files, the format of MNIST and similar datasets: raw pixels in one file, class numbers in another beside it.

A file is a header of type and shape, then raw big-endian numbers: http://yann.lecun.com/exdb/mnist/
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa

from etl.sources.columns import file_columns, listed_rows
from etl.sources.containers import (
    ContainerReader,
    Containers,
    FoundFiles,
    open_file,
    packing_of,
    reading,
    unpacked,
)
from etl.sources.file_splits import splits_of, with_warnings
from etl.sources.listed import BATCH_ROWS, LISTED_SCHEMA, ListingBatch
from etl.sources.names import IDX_SUFFIXES
from etl.sources.rows import each_listed
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import SourceConfig

# One after the other; a compressed file is unpacked from its start for each block.
_BLOCK_IMAGES = 4_096
_READ_BYTES = 1 << 20
_MAX_IMAGES, _MAX_IMAGE_BYTES = 100_000_000, 100_000_000
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}

# The usual ones first; QMNIST has `idx2-int`.
_LABEL_KINDS = tuple(
    f"idx{dims}-{kind}" for kind in ("ubyte", "int", "short", "byte", "float", "double") for dims in (1, 2)
)


class IdxSource:
    """Every image of the pairs `*images*-idx3-ubyte` and `*labels*-idx1-ubyte` that `source.uri` names."""

    def __init__(self, config: SourceConfig) -> None:
        self._files = Containers(config.uri, IDX_SUFFIXES)
        self._takes_labels = config.label_kind != "none"
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> ContainerReader[IdxFile]:
        """Reads images by number, as PNG."""
        return ContainerReader(self._files.store, open_images, lambda images, image: as_png(images.read(image.place)))

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file of images, or only some have labels. Damage is a rejection."""
        found = self._files.find()
        known = {file.path: file for file in (*found.containers, *found.others)}
        images = [file for file in found.containers if "images" in file.path.rpartition("/")[2]]
        labels = {file.path: self._labels_of(file.path, known) if self._takes_labels else None for file in images}
        _check_pairs(self.uri, labels)
        used = {file.path for file in labels.values() if file is not None} | labels.keys()
        odd = FoundFiles((), tuple(file for path, file in known.items() if path not in used))
        unused = tuple(
            f"{printable(file.path)!r} belongs to no file of images" for file in odd.others if "label" in file.path
        )
        yield ListingBatch(
            LISTED_SCHEMA.empty_table(), odd.rejections, label_signs=unused if self._takes_labels else ()
        )
        splits = splits_of(labels)
        listed = each_listed(
            images, lambda file: _list_pair(self._files.store, file, labels[file.path], splits.of[file.path])
        )
        yield from with_warnings(listed, splits.look_alikes)

    def _labels_of(self, images: str, known: Mapping[str, StoredFile]) -> StoredFile | None:
        """The file of labels that belongs to a file of images, packed or not; a single file's lies beside it."""
        found = (known.get(name) or self._files.store.stat(name) for name in _label_names(images))
        return next((file for file in found if file is not None), None)


def _label_names(images: str) -> Iterator[str]:
    """Possible names of the file of labels: `train-labels-idx1-ubyte`, packed or not, or in a folder of that name."""
    folder, slash, name = images.rpartition("/")
    plain = name.replace("images", "labels").removesuffix(".gz")
    folders = dict.fromkeys((folder, folder.replace("images", "labels")))
    names = dict.fromkeys(re.sub(r"idx\d-\w+$", kind, plain) for kind in _LABEL_KINDS)
    for folder, name in itertools.product(folders, names):
        yield from (f"{folder}{slash}{name}{suffix}" for suffix in ("", ".gz"))


def _check_pairs(uri: str, labels: dict[str, StoredFile | None]) -> None:
    if not labels:
        raise UsageError(
            f"source {uri} contains no IDX file of images", "expected names such as train-images-idx3-ubyte"
        )
    without = next((path for path, file in labels.items() if file is None), None)
    if without is not None and any(labels.values()):
        raise UsageError(
            f"{printable(without)} has no file of labels, but others have",
            "expected train-labels-idx1-ubyte for train-images-idx3-ubyte",
            "restore it, or select the files with a pattern in source.uri",
        )


def _list_pair(
    store: Store, file: StoredFile, labels_file: StoredFile | None, split: str | None
) -> Iterator[ListingBatch]:
    """The images of one file; those that a cut file lacks are one rejection, and so is a pair that does not fit."""
    with open_file(store, file) as stream:
        images = open_images(stream, file)
        num_whole = images.num_whole(file.size_bytes)
    labels = None if labels_file is None else read_labels(store, labels_file)
    if labels is not None and len(labels) != images.shape[0]:
        raise IntegrityError(f"it has {images.shape[0]} images, and its file of labels {len(labels)}")
    for start in range(0, num_whole, BATCH_ROWS):
        rows = np.arange(start, min(start + BATCH_ROWS, num_whole), dtype=np.int64)
        columns = file_columns(file, rows, rows // _BLOCK_IMAGES, split)
        if labels is not None:
            columns["label"] = pa.array(labels[rows]).cast(pa.string())
        yield listed_rows(columns, pa.nulls(len(rows), pa.string()), file.path)
    if num_whole < images.shape[0]:
        raise IntegrityError(f"it is cut: {num_whole} of its {images.shape[0]} images are there")


def as_png(pixels: np.ndarray) -> bytes:
    """A file of uint8 pixels, HW or HW3, whose bytes depend on nothing else, because they are stored and not packed.

    A compressor's next release would make other bytes, and with them other content hashes and so other splits.
    """
    # Each row begins with the number of its filter: none.
    raw = b"".join(b"\0" + row.tobytes() for row in pixels)
    blocks = [raw[start : start + 65_535] for start in range(0, len(raw), 65_535)]
    stored = (struct.pack("<BHH", each is blocks[-1], len(each), len(each) ^ 0xFFFF) + each for each in blocks)
    header = struct.pack(">2I5B", pixels.shape[1], pixels.shape[0], 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    data = b"\x78\x01" + b"".join(stored) + struct.pack(">I", zlib.adler32(raw))
    chunks = (b"IHDR" + header, b"IDAT" + data, b"IEND")
    framed = (struct.pack(">I", len(each) - 4) + each + struct.pack(">I", zlib.crc32(each)) for each in chunks)
    return b"\x89PNG\r\n\x1a\n" + b"".join(framed)


@dataclass(slots=True)
class IdxFile:
    """An opened file: `dtype` and `shape` are what its header states."""

    file: BinaryIO
    path: str
    dtype: np.dtype
    shape: tuple[int, ...]
    start: int
    """First byte of the data."""
    is_packed: bool

    @property
    def item_bytes(self) -> int:
        return prod(self.shape[1:]) * self.dtype.itemsize

    def read(self, number: int) -> np.ndarray:
        """One image: uint8 of shape `shape[1:]`. Raises IntegrityError if the file ends inside it."""
        with reading(self.path):
            self.file.seek(self.start + number * self.item_bytes)
            data = self.file.read(self.item_bytes)
        if len(data) < self.item_bytes:
            raise IntegrityError(f"the file ends inside image {number}")
        return np.frombuffer(data, np.uint8).reshape(self.shape[1:])

    def num_whole(self, size_bytes: int) -> int:
        """Number of images that a file of this size really contains.

        A packed one is read to its end, where its checksum is compared.
        """
        num_bytes = self._unpacked_bytes() if self.is_packed else size_bytes - self.start
        return min(self.shape[0], num_bytes // self.item_bytes)

    def _unpacked_bytes(self) -> int:
        expected, num_bytes = self.shape[0] * self.item_bytes, 0
        # Read until the end is met, or a bomb has shown that it has more than its header states.
        with reading(self.path):
            while num_bytes <= expected:
                data = self.file.read(_READ_BYTES)
                if not data:
                    return num_bytes
                num_bytes += len(data)
        raise IntegrityError(f"more than the {self.shape[0]} images of its header follow")


def open_idx(stream: BinaryIO, file: StoredFile) -> IdxFile:
    """Raises IntegrityError if the header is none, or claims more than there may be."""
    with reading(file.path):
        is_packed, data = packing_of(stream) is not None, unpacked(stream)
        head = data.read(4)
        sizes = data.read(4 * head[3]) if len(head) == 4 else b""
    if len(head) < 4 or head[:2] != b"\0\0" or head[2] not in _TYPES or not 1 <= head[3] <= 4:
        raise IntegrityError(f"no IDX file: it begins with {head.hex() or 'nothing'}")
    if len(sizes) < 4 * head[3]:
        raise IntegrityError("the file ends inside its header")
    shape = struct.unpack(f">{head[3]}I", sizes)
    if shape[0] > _MAX_IMAGES:
        raise IntegrityError(f"it claims {shape[0]} items, and at most {_MAX_IMAGES} are read")
    return IdxFile(data, file.path, np.dtype(_TYPES[head[2]]), shape, 4 + 4 * head[3], is_packed)


def open_images(stream: BinaryIO, file: StoredFile) -> IdxFile:
    """A file of pictures. Raises IntegrityError if it is none."""
    images = open_idx(stream, file)
    if images.dtype != np.uint8:
        raise IntegrityError(f"its pixels are {images.dtype.name}, expected uint8 (IDX type 0x08)")
    is_picture = len(images.shape) == 3 or (len(images.shape) == 4 and images.shape[3] == 3)
    if not is_picture or not 0 < images.item_bytes <= _MAX_IMAGE_BYTES:
        raise IntegrityError(f"its shape is {images.shape}, expected (images, height, width) or (..., 3)")
    return images


def read_labels(store: Store, file: StoredFile) -> np.ndarray:
    """The class number of each image, int64. Raises IntegrityError if the file does not hold one for each."""
    with open_file(store, file) as stream, reading(file.path):
        labels = open_idx(stream, file)
        if prod(labels.shape[1:]) != 1:
            raise IntegrityError(f"its file of labels has the shape {labels.shape}, expected one number for each image")
        data = labels.file.read(labels.shape[0] * labels.item_bytes + 1)
    if len(data) != labels.shape[0] * labels.item_bytes:
        raise IntegrityError(f"its file of labels has the shape {labels.shape} and {len(data)} bytes of data")
    numbers = np.frombuffer(data, labels.dtype)
    if not np.all(np.isfinite(numbers) & (numbers == np.floor(numbers)) & (np.abs(numbers.astype(np.float64)) < 2**53)):
        raise IntegrityError(f"its labels are {labels.dtype.name} and not whole numbers")
    return numbers.astype(np.int64)
