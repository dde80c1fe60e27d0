"""Images with boxes from COCO's annotation files: a listing reads these, and no image."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import json
import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.annotations import (
    ANNOTATED_SIZE,
    MAX_VALUE,
    SEGMENTATIONS,
    box_types,
    box_values,
    is_number,
    joined,
    segmentation_text,
)
from etl.sources.columns import listed_rows, text_of_value
from etl.sources.containers import Containers, open_file
from etl.sources.listed import BATCH_ROWS, LISTED_SCHEMA, ListingBatch
from etl.sources.names import COCO_SUFFIXES, SPLIT_OF_NAME
from etl.sources.uris import UriReader, is_on_the_web, uri_problems
from shardmill.errors import IntegrityError, UsageError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store
from shardmill.typed_columns import MASK, MASK_TYPE, encode_values
from shardmill.values import NO_BLOCK, Value
from shardmill.words import counted, printable

if TYPE_CHECKING:
    from etl.config import SourceConfig


_LISTS = ("images", "annotations", "categories")
_KEPT = frozenset({*_LISTS, "id", "file_name", "width", "height", "name", "image_id", "category_id", "bbox", "iscrowd"})
_CROWDS = {"0": False, "false": False, "": False, "1": True, "true": True}
_KEPT_WITH_SEGMENTATIONS = _KEPT | {"segmentation", "counts", "size"}


@dataclass(slots=True)
class CocoImage:
    """One image of the file."""

    file_name: str
    size: list[int]
    """Width and height of the image in which the boxes were drawn; empty if the file does not say."""
    boxes: list[Any] = field(default_factory=list)
    """Corner, width and height, as the file has them."""
    labels: list[Any] = field(default_factory=list)
    """The category's name of each box."""
    problem: str = ""
    """What is wrong with its size, or with the first annotation that gives no box."""
    segmentations: list[str] = field(default_factory=list)
    """If they are read: the text of each segmentation, those of crowds included."""


@dataclass(frozen=True, slots=True)
class CocoFile:
    """The images in the order of the file."""

    images: tuple[CocoImage, ...]
    num_crowds: int
    """Annotations of crowds, which show a region of many objects; their boxes are left out."""
    num_strays: int
    """Annotations of images that the file does not list."""
    num_without_segmentation: int
    """If segmentations are read: annotations that have none."""


def read_coco(stream: BinaryIO, where: str, *, has_boxes: bool = True, has_segmentations: bool = False) -> CocoFile:
    """The images of an annotation file; without boxes and segmentations nothing else of it is read.

    Raises IntegrityError for what is no JSON, UsageError for JSON of another kind, if no annotation gives a box, and
    for categories that no mask has.
    """
    try:
        content = json.loads(stream.read(), object_hook=partial(_packed, has_segmentations=has_segmentations))
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{printable(where)} does not parse: {error}",
            "expected JSON, as COCO's annotations are",
            "restore the file",
        ) from None
    names = _LISTS if has_boxes or has_segmentations else _LISTS[:1]
    lists = {name: content.get(name) if isinstance(content, Mapping) else None for name in names}
    missing = [
        name
        for name, values in lists.items()
        if not isinstance(values, list) or not all(isinstance(each, dict) for each in values)
    ]
    if missing:
        raise _no_coco(where, f"has no list {' and '.join(missing)}")
    try:
        images = _images_of(_distinct("images", lists, where))
        categories = {_id(each["id"]): each["name"] for each in _distinct("categories", lists, where)}
        annotations = lists.get("annotations") or []
        num_crowds, num_strays = _add_boxes(images, categories, annotations, where) if has_boxes else (0, 0)
        num_without = _add_segmentations(images, annotations, where) if has_segmentations else 0
    except (KeyError, TypeError) as error:
        raise _no_coco(where, f"has an image, category or annotation without {error}") from None
    # Of two records of one file, the boxes are those of one image.
    found = {id(image): image for image in images.values()}
    return CocoFile(tuple(found.values()), num_crowds, num_strays, num_without)


def _packed(value: dict[str, Any], *, has_segmentations: bool) -> dict[str, Any]:
    """What is read of an object; its segmentation as a text, which takes a fraction of the memory of its numbers."""
    kept = {
        name: value[name] for name in (_KEPT_WITH_SEGMENTATIONS if has_segmentations else _KEPT).intersection(value)
    }
    if kept.get("segmentation"):
        kept["segmentation"] = json.dumps(kept["segmentation"], separators=(",", ":"))
    return kept


def _distinct(name: str, lists: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """Those of a list. Raises UsageError if two have one id: nothing says whose the boxes are."""
    found = lists.get(name) or []
    [(number, count)] = Counter(_id(each["id"]) for each in found).most_common(1) or [(0, 0)]
    if count > 1:
        raise UsageError(
            f"{printable(where)} has {count} {name} of the id {printable(str(number))}",
            "expected an id for each",
            "give them new ids, as a merge of two files has to, or read the files that were merged",
        )
    return found


def _id(value: Any) -> int | str:
    """Some tools write the number 3 as "3" or 3.0. Raises KeyError for what is no id."""
    if type(value) is int:
        return value
    if not isinstance(value, str | float) or value == "":
        raise KeyError("id")
    text = text_of_value(value)
    return int(text) if text.isdecimal() and str(int(text)) == text else text


def _is_crowd(annotation: Mapping[str, Any], where: str) -> bool:
    value = annotation.get("iscrowd")
    found = _CROWDS.get(text_of_value(value or 0).strip().lower())
    if found is None:
        raise UsageError(
            f"{printable(where)} has iscrowd = {printable(repr(value)[:60])}", "expected 0 or 1", "correct the file"
        )
    return found


def _images_of(listed: list[dict[str, Any]]) -> dict[int | str, CocoImage]:
    """Id -> image; two of one file are one image."""
    images: dict[int | str, CocoImage] = {}
    by_name: dict[str, CocoImage] = {}
    for each in listed:
        name, size = str(each["file_name"]), _size_of(each)
        image = images[_id(each["id"])] = by_name.setdefault(name, CocoImage(name, size))
        if size != image.size:
            image.problem = f"{printable(name)} is listed twice, of the sizes {image.size} and {size}"
    return images


def _size_of(image: Mapping[str, Any]) -> list[int]:
    given = (image.get("width"), image.get("height"))
    sides = [int(side) for side in given if is_number(side)]
    return sides if len(sides) == len(given) else []


def _add_boxes(
    images: Mapping[Any, CocoImage], names: Mapping[Any, Any], annotations: list[dict[str, Any]], where: str
) -> tuple[int, int]:
    """Returns how many annotations are of crowds, and of no image. Raises KeyError if none has a box, UsageError if
    all are lost.
    """
    num_crowds = num_strays = 0
    if annotations and not any(each.get("bbox") for each in annotations):
        raise KeyError("bbox")
    for each in annotations:
        image = images.get(_id(each["image_id"]))
        if image is None:
            num_strays += 1
        elif _is_crowd(each, where):
            num_crowds += 1
        elif not each.get("bbox"):
            image.problem = image.problem or f"annotation {printable(str(each.get('id')))} has no bbox"
        elif (category := _id(each["category_id"])) not in names:
            problem = f"annotation {printable(str(each.get('id')))} has the category_id {each['category_id']!r}"
            image.problem = image.problem or f"{printable(problem)}, which is none of the file's categories"
        else:
            image.boxes.append(each["bbox"])
            image.labels.append(names[category])
    if annotations and not any(image.boxes for image in images.values()):
        problem = next((image.problem for image in images.values() if image.problem), "")
        raise UsageError(
            f"none of the {len(annotations)} annotations of {printable(where)} gives a box: {num_strays} are of images "
            f"that it does not list, {num_crowds} of crowds{problem and f'; {problem}'}",
            "expected annotations of the file's images and categories",
            'correct the file, or set source.label_kind = "none" for the images alone',
        )
    return num_crowds, num_strays


def _add_segmentations(images: Mapping[Any, CocoImage], annotations: list[dict[str, Any]], where: str) -> int:
    """Returns how many annotations have none. Raises UsageError for categories that no mask has, or if none has one."""
    num_without = 0
    for each in annotations:
        image, value = images.get(_id(each["image_id"])), _id(each["category_id"])
        if not each.get("segmentation"):
            num_without += 1
        elif not isinstance(value, int) or not 0 < value <= MAX_VALUE:
            raise UsageError(
                f"{printable(where)} has segmentations of the category {printable(repr(value))}",
                f"expected ids from 1 to {MAX_VALUE}: a mask has one byte for each pixel, and 0 is where no object is",
                "give the categories other ids, or set source.coco_masks = false",
            )
        elif image is not None:
            crowd = _is_crowd(each, where)
            image.segmentations.append(segmentation_text(value, each["segmentation"], each.get("bbox"), is_crowd=crowd))
    if annotations and not any(image.segmentations for image in images.values()):
        raise UsageError(
            f"{printable(where)} has no segmentations, and source.coco_masks = true",
            "expected annotations with a segmentation",
            "set source.coco_masks = false to read the boxes alone",
        )
    return num_without


def _no_coco(where: str, what: str) -> UsageError:
    return UsageError(
        f"{printable(where)} {what}, so it is no annotation file of COCO's boxes",
        "expected images, categories, and annotations with image_id, category_id and bbox",
        "select such files with a pattern in source.uri, for example annotations/instances_*.json; for the images "
        'alone, set source.label_kind = "none"',
    )


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
                    stream,
                    file.path,
                    has_boxes=self._config.labels_are_of_boxes,
                    has_segmentations=self._config.coco_masks,
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
            values[SEGMENTATIONS] = joined(image.segmentations)
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
    if found.num_without_segmentation:
        has = "has" if found.num_without_segmentation == 1 else "have"
        annotations = counted(found.num_without_segmentation, "annotation")
        yield f"{annotations} of {printable(where)} {has} no segmentation, so no mask shows them"
