"""Reads one IDX file: a header of type and shape, then raw big-endian numbers.

Format: http://yann.lecun.com/exdb/mnist/
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod
from typing import BinaryIO

import numpy as np

from etl.sources.packing import packing_of, reading, unpacked
from etl.sources.stored_file import open_file
from shardmill.errors import IntegrityError
from shardmill.storage import Store, StoredFile

_READ_BYTES = 1 << 20
_MAX_IMAGES, _MAX_IMAGE_BYTES = 100_000_000, 100_000_000
_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}


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
