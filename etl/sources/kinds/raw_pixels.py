"""Raw pixels with class numbers: IDX files (MNIST and similar ones), and the batches of CIFAR-10 and CIFAR-100.

IDX is a header of type and shape, then big-endian numbers: http://yann.lecun.com/exdb/mnist/. A batch of CIFAR is a
pickle or a file of records: https://www.cs.toronto.edu/~kriz/cifar.html
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import itertools
import pickle
import pickletools
import re
import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import file_columns, listed_rows, text_of
from etl.sources.containers import (
    ContainerReader,
    Containers,
    FoundFiles,
    open_file,
    packing_of,
    reading,
    unpacked,
)
from etl.sources.listed import BATCH_ROWS, LISTED_SCHEMA, ListingBatch
from etl.sources.names import CIFAR_SUFFIXES, IDX_SUFFIXES
from etl.sources.rows import listed_files
from shardmill.errors import IntegrityError, ShardmillError, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.stores import open_store
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
            LISTED_SCHEMA.empty_table(), odd.rejections, label_hints=unused if self._takes_labels else ()
        )
        yield from listed_files(
            images, lambda file, split: _list_pair(self._files.store, file, labels[file.path], split)
        )

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


# A task reads a batch whole; CIFAR-100's train split is one of 50,000 images.
_BLOCK_RECORDS = 10_000
_NAMES = ("batches.meta", "batches.meta.txt", "meta", "fine_label_names.txt")
_IMAGE_BYTES = 3 * 32 * 32
# CIFAR-100's train split has 160 MB.
_MAX_FILE_BYTES = 1_000_000_000
_MAX_NAMES_BYTES = 1_000_000
# In records the first byte is a label, at most 19 (of CIFAR-100's 20 coarse classes).
_PICKLE_STARTS = (b"\x80", b"(", b"]", b"}")
# CIFAR-100's train split takes about 400,000; each may make an object of 60 bytes.
_MAX_OPCODES = 5_000_000
# Of tuples in tuples, as keys of a dict, the hash is computed without a bound by the interpreter.
_MAX_TUPLES = 1_000


class CifarSource:
    """Every image of the batches that `source.uri` names."""

    def __init__(self, config: SourceConfig) -> None:
        self._files = Containers(config.uri, CIFAR_SUFFIXES)
        self._takes_labels = config.label_kind != "none"
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> ContainerReader[CifarBatch]:
        """Reads images by number, as PNG."""
        return ContainerReader(self._files.store, read_batch, lambda batch, image: as_png(batch.image_HWC(image.place)))

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no batch. Damage is a rejection."""
        found = self._files.find()
        others = tuple(file for file in found.others if file.path.rpartition("/")[2] not in _NAMES)
        yield ListingBatch.of_rejections(*FoundFiles((), others).rejections)
        # `data_batch_1` to `data_batch_5` are the train split; no other name in the format lacks the word.
        yield from listed_files(
            found.containers, self._list_batch, lambda file: file.path.replace("data_batch", "train_batch")
        )

    def _list_batch(self, file: StoredFile, split: str | None) -> Iterator[ListingBatch]:
        with open_file(self._files.store, file) as stream:
            batch = read_batch(stream, file)
        names = _class_names(self._files.store, file) if self._takes_labels else None
        yield _listed(file, batch.labels_N, names, split)
        if batch.num_spare_bytes:
            raise IntegrityError(
                f"it is cut: {batch.num_spare_bytes} bytes follow its {len(batch.labels_N)} whole images"
            )


def holds_batch(uri: str) -> bool:
    """Whether a file named `train`, `test_batch`, ... is a batch of CIFAR: folders of images have such names, too."""
    folder, _, name = uri.rpartition("/")
    try:
        store = open_store(folder or ("/" if uri.startswith("/") else "."))
        file = store.stat(name)
        if file is None or file.size_bytes < _IMAGE_BYTES:
            return False
        is_whole = any(file.size_bytes % (labels + _IMAGE_BYTES) == 0 for labels in (1, 2))
        return is_whole or store.read_range(name, 0, 1).startswith(_PICKLE_STARTS)
    except (ShardmillError, OSError):
        return False


def _class_names(store: Store, file: StoredFile) -> tuple[str, ...]:
    """The names in the file of them beside a batch; none if there is no such file. Raises IntegrityError."""
    folder, slash, _ = file.path.rpartition("/")
    found = (store.stat(f"{folder}{slash}{name}") for name in _NAMES)
    names = next(filter(None, found), None)
    return () if names is None else _read_class_names(store, names)


def _listed(file: StoredFile, labels_N: np.ndarray, names: tuple[str, ...] | None, split: str | None) -> ListingBatch:
    """`names`: of the classes, empty if they are called by their numbers; None if labels are not taken."""
    numbers_N, problems = np.arange(len(labels_N)), pa.nulls(len(labels_N), pa.string())
    columns = file_columns(file, numbers_N, numbers_N // _BLOCK_RECORDS, split)
    if names:
        is_named_N = labels_N < len(names)
        columns["label"] = pa.array(names).take(pa.array(np.where(is_named_N, labels_N, 0)))
        problem = f"its label has no name: the file of names has {len(names)}"
        problems = pc.if_else(pa.array(is_named_N), pa.scalar(None, pa.string()), problem)
    elif names is not None:
        columns["label"] = pa.array(labels_N).cast(pa.string())
    return listed_rows(columns, problems, file.path)


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
        return np.ascontiguousarray(self.pixels_NK[number].reshape((3, 32, 32)).transpose(1, 2, 0))


def read_batch(stream: BinaryIO, file: StoredFile) -> CifarBatch:
    """Raises IntegrityError if the file is none."""
    data = _read(stream, file, _MAX_FILE_BYTES)
    if data.startswith(_PICKLE_STARTS):
        return _of_pickle(read_pickle(data))
    return _of_records(data, file.path.rpartition("/")[2])


def _read_class_names(store: Store, file: StoredFile) -> tuple[str, ...]:
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
    pixels = _item(values, "data")
    if not isinstance(pixels, _Array) or (pixels_NK := pixels.rows()) is None:
        raise IntegrityError(f"its `data` is no array of uint8 with {_IMAGE_BYTES} values for each image")
    labels = _item(values, "fine_labels") or _item(values, "labels")
    if not isinstance(labels, list) or not all(isinstance(label, int) and 0 <= label < 2**31 for label in labels):
        raise IntegrityError("its `labels` (or `fine_labels`) are no list of class numbers")
    if len(labels) != len(pixels_NK):
        raise IntegrityError(f"it has {len(pixels_NK)} images and {len(labels)} labels")
    return CifarBatch(pixels_NK, np.array(labels, np.int64))


def _item(values: Any, name: str) -> Any:
    """Of a dict: its keys are texts, or bytes if Python 3 has copied what Python 2 wrote."""
    return (values.get(name) or values.get(name.encode())) if isinstance(values, dict) else None


def read_pickle(data: bytes) -> Any:
    """Texts, numbers, lists, dicts and `_Array` for arrays; nothing else is made. Raises IntegrityError.

    Bytes that Python 2 stored are texts in Latin-1, one character for each.
    """
    try:
        _check_opcodes(data)
        return _Unpickler(io.BytesIO(data), encoding="latin-1").load()
    except Exception as error:  # unpickling raises whatever its data make it
        raise IntegrityError(f"no pickle of plain values: {error}") from None


def _check_opcodes(data: bytes) -> None:
    """Raise ValueError for one that claims more bytes than there are, or would have memory allocated for them."""
    num_tuples = 0
    for number, (opcode, argument, _) in enumerate(pickletools.genops(io.BytesIO(data))):
        num_tuples += "TUPLE" in opcode.name
        if number == _MAX_OPCODES or num_tuples > _MAX_TUPLES:
            raise ValueError("too many opcodes")
        # The memo is an array that is as long as its largest index.
        if "PUT" in opcode.name and isinstance(argument, int) and argument > _MAX_OPCODES:
            raise ValueError(f"{opcode.name} {argument}")


class _Array:
    """Stands for an array of NumPy: what would fill it is kept and not run."""

    def __init__(self, *parts: Any) -> None:
        self._parts = parts

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._parts = state[-4:]

    def rows(self) -> np.ndarray | None:
        """The array, if it is one of uint8 with an image in each row, and its bytes fill it."""
        try:
            shape, type_name, order, stored = self._parts
            stored = stored.encode("latin-1") if isinstance(stored, str) else stored
            pixels_NK = np.frombuffer(stored, np.uint8).reshape(shape, order="F" if order in ("F", True) else "C")
        except (ValueError, TypeError, AttributeError):
            return None
        is_byte = isinstance(type_name, _Type) and type_name.name in ("u1", "|u1", "uint8")
        return pixels_NK if is_byte and pixels_NK.shape[1:] == (_IMAGE_BYTES,) else None


class _Type:
    """Stands for a type of NumPy."""

    def __init__(self, name: object, *_: object) -> None:
        self.name = name

    def __setstate__(self, state: object) -> None:
        """Byte order and alignment: a byte has none."""


_STAND_INS: dict[str, Any] = {
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy.core.numeric._frombuffer": lambda stored, type_name, shape, order: _Array(shape, type_name, order, stored),
    "numpy.dtype": _Type,
    # An argument of `_reconstruct`, which cannot be called.
    "numpy.ndarray": None,
    # Protocols 0 to 2 of Python 3 have no bytes.
    "_codecs.encode": lambda text, encoding: text.encode("latin-1"),
}


class _Unpickler(pickle.Unpickler):
    """Finds stand-ins alone: nothing is imported, and no code but that of this file is called."""

    def find_class(self, module_name: str, global_name: str) -> Any:
        name = f"{module_name}.{global_name}".replace("numpy._core", "numpy.core")
        if name not in _STAND_INS:
            raise pickle.UnpicklingError(f"{name} in it")
        return _STAND_INS[name]
