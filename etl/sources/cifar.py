"""CIFAR-10 and CIFAR-100 as their authors distribute them: batches of raw pixels, pickled by Python or as records."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.cifar_file import CifarBatch, looks_like_batch, read_batch, read_class_names
from etl.sources.columns import listed_rows
from etl.sources.containers import ContainerReader, Containers, FoundFiles, damaged, gone
from etl.sources.file_splits import splits_of, with_warnings
from etl.sources.listed import ListingBatch
from etl.sources.names import CIFAR_SUFFIXES
from etl.sources.plain_png import plain_png
from etl.sources.stored_file import open_file
from shardmill.errors import IntegrityError, ShardmillError
from shardmill.storage import Store, StoredFile
from shardmill.stores import open_store

if TYPE_CHECKING:
    from etl.config import SourceConfig

# A task reads a batch whole; CIFAR-100's train split is one of 50,000 images.
_BLOCK_IMAGES = 10_000
_NAMES = ("batches.meta", "batches.meta.txt", "meta", "fine_label_names.txt")
_HEAD_BYTES = 16


class CifarSource:
    """Every image of the batches that `source.uri` names."""

    def __init__(self, config: SourceConfig) -> None:
        self._files = Containers(config.uri, CIFAR_SUFFIXES)
        self._takes_labels = config.label_kind != "none"
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> ContainerReader[CifarBatch]:
        """Reads images by number, as PNG."""
        return ContainerReader(
            self._files.store, read_batch, lambda batch, image: plain_png(batch.image_HWC(image.place))
        )

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no batch. Damage is a rejection."""
        found = self._files.find()
        others = tuple(file for file in found.others if file.path.rpartition("/")[2] not in _NAMES)
        yield ListingBatch.of_rejections(*FoundFiles((), others).rejections)
        # `data_batch_1` to `data_batch_5` are the train split; no other name in the format lacks the word.
        splits = splits_of(_with_split(file.path) for file in found.containers)
        listed = (self._list_batch(file, splits.of[_with_split(file.path)]) for file in found.containers)
        yield from with_warnings(itertools.chain.from_iterable(listed), splits.look_alikes)

    def _list_batch(self, file: StoredFile, split: str | None) -> Iterator[ListingBatch]:
        store = self._files.store
        try:
            with open_file(store, file) as stream:
                batch = read_batch(stream, file)
            names = _class_names(store, file) if self._takes_labels else ()
        except IntegrityError as error:
            yield ListingBatch.of_rejections(damaged(file, str(error)))
            return
        except FileNotFoundError:
            yield ListingBatch.of_rejections(gone(file))
            return
        yield _listed(file, batch.labels_N, names if self._takes_labels else None, split)
        if batch.num_spare_bytes:
            problem = f"it is cut: {batch.num_spare_bytes} bytes follow its {len(batch.labels_N)} whole images"
            yield ListingBatch.of_rejections(damaged(file, problem))


def holds_batch(uri: str) -> bool:
    """Whether a file named `train`, `test_batch`, ... is a batch of CIFAR: folders of images have such names, too."""
    folder, _, name = uri.rpartition("/")
    try:
        store = open_store(folder or ("/" if uri.startswith("/") else "."))
        file = store.stat(name)
        return file is not None and looks_like_batch(store.read_range(name, 0, _HEAD_BYTES), file)
    except (ShardmillError, OSError):
        return False


def _with_split(path: str) -> str:
    return path.replace("data_batch", "train_batch")


def _class_names(store: Store, file: StoredFile) -> tuple[str, ...]:
    """The names in the file of them beside a batch; none if there is no such file. Raises IntegrityError."""
    folder, slash, _ = file.path.rpartition("/")
    found = (store.stat(f"{folder}{slash}{name}") for name in _NAMES)
    names = next(filter(None, found), None)
    return () if names is None else read_class_names(store, names)


def _listed(file: StoredFile, labels_N: np.ndarray, names: tuple[str, ...] | None, split: str | None) -> ListingBatch:
    """`names`: of the classes, empty if they are called by their numbers; None if labels are not taken."""
    num_rows = len(labels_N)
    places = pa.array(np.arange(num_rows, dtype=np.int64))
    columns: dict[str, pa.Array] = {
        "key": pc.binary_join_element_wise(file.path, places.cast(pa.string()), "\0"),
        "mtime_ns": pa.repeat(file.mtime_ns, num_rows),
        "etag": pa.repeat(file.etag, num_rows),
        "split": pa.repeat(pa.scalar(split, pa.string()), num_rows),
        "container": pa.repeat(file.path, num_rows),
        "place": places,
        "block": pa.array(np.arange(num_rows, dtype=np.int64) // _BLOCK_IMAGES),
    }
    problems = pa.nulls(num_rows, pa.string())
    if names:
        is_named_N = labels_N < len(names)
        columns["label"] = pa.array(names).take(pa.array(np.where(is_named_N, labels_N, 0)))
        problem = f"its label has no name: the file of names has {len(names)}"
        problems = pc.if_else(pa.array(is_named_N), pa.scalar(None, pa.string()), problem)
    elif names is not None:
        columns["label"] = pa.array(labels_N).cast(pa.string())
    return listed_rows(columns, problems, file.path)
