"""IDX files, the format of MNIST and similar datasets: raw pixels in one file, class numbers in another beside it."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import listed_rows
from etl.sources.containers import ContainerReader, Containers, FoundFiles, damaged, gone
from etl.sources.file_splits import splits_of, with_warnings
from etl.sources.idx_file import IdxFile, open_images, read_labels
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import IDX_SUFFIXES
from etl.sources.plain_png import plain_png
from etl.sources.stored_file import open_file
from shardmill.errors import IntegrityError, UsageError
from shardmill.printable import printable
from shardmill.storage import Store, StoredFile

if TYPE_CHECKING:
    from etl.config import SourceConfig

# One after the other; a compressed file is unpacked from its start for each block.
_BLOCK_IMAGES = 4_096
_BATCH_ROWS = 65_536
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
        return ContainerReader(
            self._files.store, open_images, lambda images, image: plain_png(images.read(image.place))
        )

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
        listed = (_list_pair(self._files.store, file, labels[file.path], splits.of[file.path]) for file in images)
        yield from with_warnings(itertools.chain.from_iterable(listed), splits.look_alikes)

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
    try:
        with open_file(store, file) as stream:
            images = open_images(stream, file)
            num_whole = images.num_whole(file.size_bytes)
        labels = None if labels_file is None else read_labels(store, labels_file)
        if labels is not None and len(labels) != images.shape[0]:
            raise IntegrityError(f"it has {images.shape[0]} images, and its file of labels {len(labels)}")
    except IntegrityError as error:
        yield ListingBatch.of_rejections(damaged(file, str(error)))
        return
    except FileNotFoundError:
        yield ListingBatch.of_rejections(gone(file))
        return
    for start in range(0, num_whole, _BATCH_ROWS):
        rows = np.arange(start, min(start + _BATCH_ROWS, num_whole), dtype=np.int64)
        yield _listed(rows, file, labels, split)
    if num_whole < images.shape[0]:
        problem = f"it is cut: {num_whole} of its {images.shape[0]} images are there"
        yield ListingBatch.of_rejections(damaged(file, problem))


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
