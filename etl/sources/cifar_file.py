"""Reads one of CIFAR's batches, a pickle of Python or raw records, and the file of class names beside it.

Format: https://www.cs.toronto.edu/~kriz/cifar.html
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from etl.sources.class_values import text_of
from etl.sources.packing import reading
from etl.sources.pickled import byte_array, read_pickle
from etl.sources.stored_file import open_file
from shardmill.errors import IntegrityError
from shardmill.storage import Store, StoredFile

_SHAPE_CHW = (3, 32, 32)
_IMAGE_BYTES = 3 * 32 * 32
# CIFAR-100's train split has 160 MB.
_MAX_FILE_BYTES = 1_000_000_000
_MAX_NAMES_BYTES = 1_000_000
# In records the first byte is a label, at most 19 (of CIFAR-100's 20 coarse classes).
_PICKLE_STARTS = (b"\x80", b"(", b"]", b"}")


@dataclass(frozen=True, slots=True)
class CifarBatch:
    """One file's images, in memory."""

    pixels_NK: np.ndarray
    """uint8, three planes of 32 x 32 in each row."""
    labels_N: np.ndarray
    """int64; CIFAR-100's fine ones."""
    num_spare_bytes: int = 0
    """Of a last record that is cut."""

    def image_HWC(self, number: int) -> np.ndarray:
        """One image. Raises IntegrityError if the file has fewer."""
        if number >= len(self.pixels_NK):
            raise IntegrityError(f"the file ends before image {number}")
        return np.ascontiguousarray(self.pixels_NK[number].reshape(_SHAPE_CHW).transpose(1, 2, 0))


def read_batch(stream: BinaryIO, file: StoredFile) -> CifarBatch:
    """Raises IntegrityError if the file is none."""
    data = _read(stream, file, _MAX_FILE_BYTES)
    if data.startswith(_PICKLE_STARTS):
        return _of_pickle(read_pickle(data))
    return _of_records(data, file.path.rpartition("/")[2])


def looks_like_batch(head: bytes, file: StoredFile) -> bool:
    """Whether a file may be one, by its first bytes and its size."""
    is_whole = any(file.size_bytes % (labels + _IMAGE_BYTES) == 0 for labels in (1, 2))
    return file.size_bytes >= _IMAGE_BYTES and (head.startswith(_PICKLE_STARTS) or is_whole)


def read_class_names(store: Store, file: StoredFile) -> tuple[str, ...]:
    """The names in the order of their numbers. Raises IntegrityError if the file holds none."""
    with open_file(store, file) as stream:
        data = _read(stream, file, _MAX_NAMES_BYTES)
    if file.path.endswith(".txt"):
        names: Any = (text_of(data) or "").split()
    else:
        values = read_pickle(data)
        names = _item(values, "fine_label_names") or _item(values, "label_names")
    if not isinstance(names, list) or not names:
        raise IntegrityError(f"{file.path} holds no names of classes")
    return tuple(name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name) for name in names)


def _read(stream: BinaryIO, file: StoredFile, max_bytes: int) -> bytes:
    with reading(file.path):
        stream.seek(0)
        data = stream.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise IntegrityError(f"it has more than {max_bytes} bytes")
    return data


def _of_records(data: bytes, name: str) -> CifarBatch:
    """A label (of CIFAR-100 two, coarse and fine) and 3,072 bytes of pixels for each image."""
    is_cifar10 = "batch" in name or len(data) % (1 + _IMAGE_BYTES) == 0
    num_labels = 1 if is_cifar10 else 2
    record_bytes = num_labels + _IMAGE_BYTES
    num_images, num_spare_bytes = divmod(len(data), record_bytes)
    if not data:
        raise IntegrityError("it is empty")
    records = np.frombuffer(data, np.uint8, num_images * record_bytes).reshape(num_images, record_bytes)
    return CifarBatch(records[:, num_labels:], records[:, num_labels - 1].astype(np.int64), num_spare_bytes)


def _of_pickle(values: Any) -> CifarBatch:
    pixels = byte_array(_item(values, "data"))
    if pixels is None or pixels.ndim != 2 or pixels.shape[1] != _IMAGE_BYTES:
        raise IntegrityError(f"its `data` is no array of uint8 with {_IMAGE_BYTES} values for each image")
    labels = _item(values, "fine_labels") or _item(values, "labels")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < 2**31 for label in labels):
        raise IntegrityError("its `labels` (or `fine_labels`) are no list of class numbers")
    if len(labels) != len(pixels):
        raise IntegrityError(f"it has {len(pixels)} images and {len(labels)} labels")
    return CifarBatch(pixels, np.array(labels, np.int64))


def _item(values: Any, name: str) -> Any:
    """Of a dict: its keys are texts, or bytes if Python 3 has copied what Python 2 wrote."""
    return (values.get(name) or values.get(name.encode())) if isinstance(values, dict) else None
