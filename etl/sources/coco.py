"""Images with boxes from COCO's annotation files: a listing reads these, and no image."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.boxes import ANNOTATED_SIZE, box_types, box_values
from etl.sources.coco_file import CocoFile, CocoImage, read_coco
from etl.sources.columns import listed_rows
from etl.sources.containers import Containers
from etl.sources.listed import BATCH_ROWS, LISTED_SCHEMA, ListingBatch
from etl.sources.names import COCO_SUFFIXES, SPLIT_OF_NAME
from etl.sources.outlines import OUTLINES, joined
from etl.sources.stored_file import open_file
from etl.sources.uris import UriReader, is_on_the_web, uri_problems
from shardmill.errors import UsageError
from shardmill.printable import printable
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store
from shardmill.typed_columns import MASK, MASK_TYPE, encode_values
from shardmill.values import NO_BLOCK, Value
from shardmill.words import counted

if TYPE_CHECKING:
    from etl.config import SourceConfig

# Where the images usually are, from the folder of the annotation file; the last word of its name is a folder's:
# `instances_val2017.json` beside or below `val2017`.
_USUAL_FOLDERS = ("", "images", "{word}", "images/{word}", "..", "../{word}", "../images", "../images/{word}")
_NUM_LOOKED_UP = 3


class CocoSource:
    """The images that annotation files name. An image has its boxes, and their classes as labels, unless no labels are
    asked for.
    """

    def __init__(self, config: SourceConfig) -> None:
        self._config = config
        self._files = Containers(config.uri, COCO_SUFFIXES)
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> UriReader:
        """Reads the images as those of a table."""
        return UriReader(self._files, max_source_bytes, self._config.download)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no annotation file, IntegrityError for one that does not parse."""
        files = self._files.find().containers
        splits = _splits_of([file.path for file in files])
        for file in files:
            with open_file(self._files.store, file) as stream, as_storage_error(file.path):
                found = read_coco(
                    stream, file.path, has_boxes=self._config.labels_are_of_boxes, has_outlines=self._config.coco_masks
                )
            yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=tuple(_warnings(found, file.path)))
            folder, found_images = self._folder_of(file, found.images)
            for first in range(0, len(found_images), BATCH_ROWS):
                images = found_images[first : first + BATCH_ROWS]
                yield self._listed(images, first, file.path, folder, splits[file.path])

    def _folder_of(self, file: StoredFile, images: Sequence[CocoImage]) -> tuple[str, Sequence[CocoImage]]:
        """The folder of the images: below the source's root without a scheme, else as a URI; and the images with their
        names from there, which programs of Windows write with backslashes.

        Raises UsageError if none of those that are looked up is in a usual one.
        """
        slashed = [replace(each, file_name=each.file_name.replace("\\", "/")) for each in images]
        for named in (images, slashed):
            few = named[:: max(1, len(named) // _NUM_LOOKED_UP)][:_NUM_LOOKED_UP]
            if (folder := self._folder_with(file, few, is_last=named is slashed)) is not None:
                return folder, named
        raise AssertionError("the last look raises")

    def _folder_with(self, file: StoredFile, few: Sequence[CocoImage], *, is_last: bool) -> str | None:
        if self._config.coco_images:
            return self._named_folder(self._config.coco_images, file.path, few, is_last=is_last)
        above, _, name = file.path.rpartition("/")
        word = name.partition(".")[0].rpartition("_")[2]
        for usual in _USUAL_FOLDERS:
            folder = posixpath.normpath(posixpath.join(above, usual.format(word=word)))
            if (found := self._located(folder)) is not None and self._is_any_there(found, few):
                return found
        if not is_last:
            return None
        raise UsageError(
            f"none of the images that {printable(file.path)} names is there, such as {printable(few[0].file_name)}"
            if few
            else f"{printable(file.path)} names no image",
            f"expected them beside {self.uri}, or in a folder images or {printable(word)} there or one above",
            "name their folder with source.coco_images",
        )

    def _named_folder(self, uri: str, file: str, few: Sequence[CocoImage], *, is_last: bool) -> str | None:
        folder = uri if "://" in uri else os.path.abspath(os.path.expanduser(uri))
        if is_on_the_web(folder):
            return folder if is_last else None
        if few and not self._is_any_there(folder, few):
            if not is_last:
                return None
            raise UsageError(
                f"source.coco_images = {uri} has none of the images that {printable(file)} names, such as "
                f"{printable(few[0].file_name)}",
                "expected the folder from which their names in the file begin",
                "correct source.coco_images",
            )
        return folder

    def _located(self, folder: str) -> str | None:
        """A folder below the root or beside it; None if there is nothing above the root."""
        if not folder.startswith(".."):
            return "" if folder == "." else folder
        parent, separator, _ = self._files.store.uri.rstrip("/").rpartition("/")
        if not separator or parent.endswith(":/") or folder.startswith("../.."):
            return None
        return posixpath.join(parent, folder[3:]) if folder != ".." else parent

    def _is_any_there(self, folder: str, images: Sequence[CocoImage]) -> bool:
        store = open_store(folder) if _is_elsewhere(folder) else self._files.store
        paths = [path for image in images if (path := _path_of(image.file_name, folder)) is not None]
        return any(store.stat(path) is not None for path in paths)

    def _listed(
        self, images: Sequence[CocoImage], first: int, where: str, folder: str, split: str | None
    ) -> ListingBatch:
        problems: list[str | None] = []
        texts: list[str] = []
        found: list[str] = []
        for image in images:
            path, problem = _path_of(image.file_name, folder), None
            if path is None:
                problem = f"file_name {printable(repr(image.file_name))} is not below the folder of the images"
            try:
                texts.append(self._values(image))
            except (ValueError, TypeError) as error:
                texts.append("")
                problem = problem or f"{printable(image.file_name)}: {error}"
            found.append(path or "")
            problems.append(problem)
        paths = pa.array(found, pa.string())
        columns: dict[str, pa.Array] = {
            "key": paths,
            # As rows of a table, images of a file are counted from 1.
            "place": pa.array(np.arange(first + 1, first + 1 + len(images), dtype=np.int64)),
            "extra": pa.array(texts, pa.string()),
            "split": pa.repeat(pa.scalar(split, pa.string()), len(images)),
        }
        if _is_elsewhere(folder):
            # A key says nothing of the place of the whole collection.
            last = folder.rstrip("/").rpartition("/")[2]
            keys, containers = (
                pa.array([posixpath.join(above, path) for path in found], pa.string()) for above in (last, folder)
            )
            columns |= {"key": keys, "container": containers, "block": pa.repeat(NO_BLOCK, len(images))}
        # The folder is the user's; only the paths below it are the file's.
        problem_of_paths = uri_problems(paths, self._files.store)
        batch = listed_rows(columns, pc.coalesce(pa.array(problems, pa.string()), problem_of_paths), where)
        types = box_types(has_labels=True) if self._config.labels_are_of_boxes else {}
        types |= {MASK: MASK_TYPE} if self._config.coco_masks else {}
        return ListingBatch(batch.images, batch.rejections, extra_types=types)

    def _values(self, image: CocoImage) -> str:
        """The text of what moves with the pixels. Raises ValueError that says what is wrong with it."""
        if image.problem:
            raise ValueError(image.problem)
        values: dict[str, Value] = {}
        if self._config.labels_are_of_boxes:
            values |= box_values(image.boxes, image.labels, "xywh")
        if self._config.coco_masks:
            values[OUTLINES] = joined(image.outlines)
        values |= {ANNOTATED_SIZE: list(image.size)} if values and image.size else {}
        return encode_values(values) if values else ""


def _is_elsewhere(folder: str) -> bool:
    """Whether it is a URI, and not below the source's root."""
    return os.path.isabs(folder) or "://" in folder


def _path_of(name: str, folder: str) -> str | None:
    """An image's path from `folder` if that is elsewhere, otherwise from the root; None if it leads out of either."""
    path = name if _is_elsewhere(folder) else posixpath.join(folder, name)
    if {".", ".."}.intersection(path.split("/")):
        path = posixpath.normpath(path)
    leads_out = os.path.isabs(name) or "://" in name or path == ".." or path.startswith("../")
    return None if leads_out else path


def _splits_of(paths: Sequence[str]) -> Mapping[str, str | None]:
    """The split that each annotation file's path names (`instances_train2017.json`, `train/_annotations.coco.json`);
    None for all if not all do, or none names `train`.
    """
    splits: dict[str, str | None] = {}
    for path in paths:
        words = (word.rstrip("0123456789").lower() for word in re.split(r"[-_./]", path))
        named = {SPLIT_OF_NAME[word] for word in words if word in SPLIT_OF_NAME}
        splits[path] = named.pop() if len(named) == 1 else None
    return splits if "train" in splits.values() and None not in splits.values() else dict.fromkeys(paths)


def _warnings(found: CocoFile, where: str) -> Iterator[str]:
    if found.num_crowds:
        yield f"crowds: the boxes of {counted(found.num_crowds, 'annotation')} of {printable(where)} are left out"
    if found.num_strays:
        strays = counted(found.num_strays, "annotation")
        yield f"left out: {strays} of {printable(where)}, of images that it does not list"
    if found.num_without_outline:
        has = "has" if found.num_without_outline == 1 else "have"
        annotations = counted(found.num_without_outline, "annotation")
        yield f"{annotations} of {printable(where)} {has} no outline, so no mask shows them"
