"""Parses one annotation file of COCO: its images with their boxes and the names of the boxes' categories.

Format: https://cocodataset.org/#format-data. Outlines are most of a file; while it is parsed, they are dropped, or kept
as texts.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from etl.sources.boxes import is_number
from etl.sources.outlines import MAX_VALUE, outline_text
from etl.sources.value_text import text_of_value
from shardmill.errors import IntegrityError, UsageError
from shardmill.printable import printable

_LISTS = ("images", "annotations", "categories")
_KEPT = frozenset({*_LISTS, "id", "file_name", "width", "height", "name", "image_id", "category_id", "bbox", "iscrowd"})
_CROWDS = {"0": False, "false": False, "": False, "1": True, "true": True}
_KEPT_WITH_OUTLINES = _KEPT | {"segmentation", "counts", "size"}


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
    outlines: list[str] = field(default_factory=list)
    """If they are read: the text of each outline, those of crowds included."""


@dataclass(frozen=True, slots=True)
class CocoFile:
    """The images in the order of the file."""

    images: tuple[CocoImage, ...]
    num_crowds: int
    """Annotations of crowds, which outline a region of many objects; their boxes are left out."""
    num_strays: int
    """Annotations of images that the file does not list."""
    num_without_outline: int
    """If outlines are read: annotations that have none."""


def read_coco(stream: BinaryIO, where: str, *, has_boxes: bool = True, has_outlines: bool = False) -> CocoFile:
    """The images of an annotation file; without boxes and outlines nothing else of it is read.

    Raises IntegrityError for what is no JSON, UsageError for JSON of another kind, if no annotation gives a box, and
    for categories that no mask has.
    """
    try:
        content = json.loads(stream.read(), object_hook=_packed if has_outlines else _without_outlines)
    except (ValueError, RecursionError) as error:
        raise IntegrityError(
            f"{printable(where)} does not parse: {error}",
            "expected JSON, as COCO's annotations are",
            "restore the file",
        ) from None
    names = _LISTS if has_boxes or has_outlines else _LISTS[:1]
    lists = {name: content.get(name) if isinstance(content, Mapping) else None for name in names}
    missing = [name for name, values in lists.items() if not _are_objects(values)]
    if missing:
        raise _no_coco(where, f"has no list {' and '.join(missing)}")
    try:
        images = _images_of(_distinct("images", lists, where))
        categories = {_id(each["id"]): each["name"] for each in _distinct("categories", lists, where)}
        annotations = lists.get("annotations") or []
        num_crowds, num_strays = _add_boxes(images, categories, annotations, where) if has_boxes else (0, 0)
        num_without = _add_outlines(images, annotations, where) if has_outlines else 0
    except (KeyError, TypeError) as error:
        raise _no_coco(where, f"has an image, category or annotation without {error}") from None
    # Of two records of one file, the boxes are those of one image.
    found = {id(image): image for image in images.values()}
    return CocoFile(tuple(found.values()), num_crowds, num_strays, num_without)


def _without_outlines(value: dict[str, Any]) -> dict[str, Any]:
    return {name: value[name] for name in _KEPT.intersection(value)}


def _packed(value: dict[str, Any]) -> dict[str, Any]:
    """With its outline as a text, which takes a fraction of the memory of its numbers."""
    kept = {name: value[name] for name in _KEPT_WITH_OUTLINES.intersection(value)}
    if kept.get("segmentation"):
        kept["segmentation"] = json.dumps(kept["segmentation"], separators=(",", ":"))
    return kept


def _are_objects(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(each, dict) for each in values)


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


def _add_outlines(images: Mapping[Any, CocoImage], annotations: list[dict[str, Any]], where: str) -> int:
    """Returns how many annotations have none. Raises UsageError for categories that no mask has, or if none has one."""
    num_without = 0
    for each in annotations:
        image, value = images.get(_id(each["image_id"])), _id(each["category_id"])
        if not each.get("segmentation"):
            num_without += 1
        elif not isinstance(value, int) or not 0 < value <= MAX_VALUE:
            raise UsageError(
                f"{printable(where)} has outlines of the category {printable(repr(value))}",
                f"expected ids from 1 to {MAX_VALUE}: a mask has one byte for each pixel, and 0 is where no object is",
                "give the categories other ids, or set source.coco_masks = false",
            )
        elif image is not None:
            crowd = _is_crowd(each, where)
            image.outlines.append(outline_text(value, each["segmentation"], each.get("bbox"), is_crowd=crowd))
    if annotations and not any(image.outlines for image in images.values()):
        raise UsageError(
            f"{printable(where)} has no outlines, and source.coco_masks = true",
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
