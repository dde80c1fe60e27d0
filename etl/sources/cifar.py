"""CIFAR-10 and CIFAR-100 as their authors distribute them: batches of raw pixels, pickled by Python or as records.

Format: https://www.cs.toronto.edu/~kriz/cifar.html
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import io
import pickle
import pickletools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import file_columns, listed_rows
from etl.sources.containers import ContainerReader, Containers, FoundFiles, open_file, reading
from etl.sources.file_splits import splits_of, with_warnings
from etl.sources.idx import as_png
from etl.sources.labels import text_of
from etl.sources.listed import ListingBatch
from etl.sources.names import CIFAR_SUFFIXES
from etl.sources.rows import each_listed
from shardmill.errors import IntegrityError, ShardmillError
from shardmill.storage import Store, StoredFile
from shardmill.stores import open_store

if TYPE_CHECKING:
    from etl.config import SourceConfig

# A task reads a batch whole; CIFAR-100's train split is one of 50,000 images.
_BLOCK_IMAGES = 10_000
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
        splits = splits_of(_with_split(file.path) for file in found.containers)
        listed = each_listed(found.containers, lambda file: self._list_batch(file, splits.of[_with_split(file.path)]))
        yield from with_warnings(listed, splits.look_alikes)

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


def _with_split(path: str) -> str:
    return path.replace("data_batch", "train_batch")


def _class_names(store: Store, file: StoredFile) -> tuple[str, ...]:
    """The names in the file of them beside a batch; none if there is no such file. Raises IntegrityError."""
    folder, slash, _ = file.path.rpartition("/")
    found = (store.stat(f"{folder}{slash}{name}") for name in _NAMES)
    names = next(filter(None, found), None)
    return () if names is None else _read_class_names(store, names)


def _listed(file: StoredFile, labels_N: np.ndarray, names: tuple[str, ...] | None, split: str | None) -> ListingBatch:
    """`names`: of the classes, empty if they are called by their numbers; None if labels are not taken."""
    numbers_N, problems = np.arange(len(labels_N)), pa.nulls(len(labels_N), pa.string())
    columns = file_columns(file, numbers_N, numbers_N // _BLOCK_IMAGES, split)
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
