"""Finds labels that a source has and does not take, so that it does not end as a dataset without labels.

Two rules: a column, a field or a file beside the images is named as labels are, or the first values of a column repeat
as class names do; and images with texts beside them lie in named folders.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.columns import as_labels, class_names_of
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import IMAGE_SUFFIXES, TABLE_SUFFIXES, hidden_folder_of, is_split, names_splits
from etl.sources.table_rows import first_rows
from shardmill.errors import ShardmillError
from shardmill.values import Rejection, RejectReason
from shardmill.words import first_of, printable

_LABEL_WORDS = {
    *("label", "labels", "class", "classes", "classname", "cls", "category", "categories"),
    *("target", "targets", "annotation", "annotations", "species", "breed", "diagnosis"),
}
# Last words of columns that are facts of files, or of nobody's classes.
_FACTS = {
    *("width", "height", "size", "bytes", "channels", "dpi", "format", "license", "licence"),
    *("date", "year", "time", "timestamp", "fold", "split", "subset"),
}
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_NO_CLASS = re.compile(r"\d{4}-\d\d-\d\d.*|[-+]?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
# Folders of shards and samples: `00`, `part-3`, `a7` and longer hashes.
_NUMBERED = re.compile(
    r"(?:shard|part|chunk|batch|group|sample|image|img|data|set|folder|dir|bucket)?s?[-_. ]?\d+(?:[-_.]\d+)*"
    r"|[0-9a-f]{2}|[0-9a-f-]{8,}",
    re.IGNORECASE,
)
_LIST_SUFFIXES = (*TABLE_SUFFIXES, ".json", ".txt", ".xml", ".mat", ".xlsx", ".npy")
_LABEL_FOLDERS = {"label", "labels", "annotation", "annotations"}
_PEEKED_SUFFIXES = (".csv", ".tsv", ".jsonl")
_HEAD_BYTES, _MAX_JSON_BYTES = 1 << 16, 1 << 20
_MIN_ROWS, _NUM_NAMED, _MAX_TABLES, _MAX_IMAGES, _MAX_FOLDERS = 4, 4, 4, 10_000, 100_000


def names_labels(name: str) -> bool:
    """Whether a column, file or field is named as labels are: `Labels`, `class_id`, `fineLabel`, `lable`."""
    is_near = difflib.get_close_matches(name.strip().lower(), ("label", "labels"), n=1, cutoff=0.75)
    return bool(is_near) or any(word.lower() in _LABEL_WORDS for word in _WORDS.findall(name))


def named_hints(names: Iterable[str], where: str) -> Iterator[str]:
    """A phrase for each of the names that is one of labels; `where` is the file that has them."""
    return (f"{printable(where)} has {printable(name)!r}" for name in names if names_labels(name))


def column_hints(schema: pa.Schema, unused: Collection[str], rows: pa.Table, where: str) -> tuple[str, ...]:
    """The hints in columns that nothing else uses: in their names, and in the values of those among the first rows."""
    names = [name for field in schema if field.name in unused for name in _names_in(field, schema)]
    rows = rows.select([place for place, name in enumerate(rows.column_names) if name in unused])
    repeating = [f"{printable(where)} has {_quoted(found)}, whose values repeat like class names"
                 for found in [_repeating(rows)] if found]  # fmt: skip
    return (*named_hints(names, where), *repeating)


def _names_in(field: pa.Field, schema: pa.Schema) -> Iterator[str]:
    """Of a column, and of the fields in it: `objects`, `objects.category`."""
    yield field.name if not class_names_of(schema, field.name) else f"{field.name} (ClassLabel)"
    kind = field.type
    while pa.types.is_list(kind):
        kind = kind.value_type
    if pa.types.is_struct(kind):
        for inner in (kind.field(place) for place in range(kind.num_fields)):
            yield from _names_in(inner.with_name(f"{field.name}.{inner.name}"), schema)


def _repeating(rows: pa.Table, *, name_images: bool = False) -> list[str]:
    """The columns of few values, each of which may be a class; if it is the only column, also of such as a year.

    Beside a column that names images one value that is there twice is enough, and of a few rows any.
    """
    found = []
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        try:
            texts = pc.unique(as_labels(column, (), "")).drop_null().to_pylist()
        except ShardmillError:
            continue  # such a type names no classes
        is_fact = any(word.lower() in _FACTS for word in _WORDS.findall(name)[-1:]) or any(
            map(_NO_CLASS.fullmatch, texts)
        )
        repeat = rows.num_rows >= _MIN_ROWS and 1 < len(texts) <= rows.num_rows // 2
        if name_images:
            repeat = 0 < len(texts) < (rows.num_rows if rows.num_rows >= _MIN_ROWS else _MIN_ROWS)
        if repeat and (not is_fact or (rows.num_columns == 1 and not name_images)):
            found.append(name)
    return found


class FilesBeside:
    """What a listing meets beside the images of a folder or an archive; of files it looks at a few, and at no more."""

    def __init__(self, *, looks_at_folders: bool = False) -> None:
        """`looks_at_folders`: the images have texts beside them, so that their folders were not taken as classes."""
        self._looks_at_folders = looks_at_folders
        self._named: dict[str, None] = {}
        self._tables: dict[str, bytes] = {}
        self._stems: set[str] = set()
        self._folders: set[str] = set()
        self._has_read_json = False

    def image(self, name: str) -> None:
        """Take in an image's path."""
        if len(self._stems) < _MAX_IMAGES:
            self._stems.add(_stem_of(name))
        if self._looks_at_folders and len(self._folders) < _MAX_FOLDERS:
            self._folders.add(name.rpartition("/")[0].removeprefix("./"))

    def other(self, key: str, head: Callable[[int], bytes]) -> None:
        """Take in a file that is no image: a class alone, the fields of the first JSON file, the first tables."""
        archive, _, name = key.rpartition("\0")
        suffix = os.path.splitext(name.lower())[1]
        if suffix == ".cls" and archive:
            self._add(f"{printable(archive)} has {printable(name)!r}")
        elif suffix == ".json" and archive and not self._has_read_json:
            self._has_read_json = True
            with suppress(ValueError, RecursionError):
                fields = json.loads(head(_MAX_JSON_BYTES))
                self._add(*named_hints(fields if isinstance(fields, dict) else (), f"{archive}/{name}"))
        elif suffix in _PEEKED_SUFFIXES and len(self._tables) < _MAX_TABLES and not hidden_folder_of(key):
            self._tables[key] = head(_HEAD_BYTES)

    def noting(
        self, batches: Iterable[ListingBatch], read: Callable[[str, int], bytes] | None = None
    ) -> Iterator[ListingBatch]:
        """A listing, and behind it the hints that were found meanwhile; `read` reads the beginning of a file."""
        for batch in batches:
            for key in batch.images.column("key").slice(0, _MAX_IMAGES).to_pylist() if read else ():
                self.image(key)
            for refused in batch.rejections:
                self._look_at_name(refused)
                if read and refused.reason == RejectReason.NOT_AN_IMAGE_NAME:
                    # The listing does not depend on what cannot be read.
                    with suppress(ShardmillError, OSError):
                        self.other(refused.key, lambda num_bytes, key=refused.key: read(key, num_bytes))
            yield batch
        hints = (*self._named, *self._of_tables(), *self._of_folders())
        yield ListingBatch(LISTED_SCHEMA.empty_table(), label_hints=hints)

    def _look_at_name(self, refused: Rejection) -> None:
        """By the names of refused files: `labels.csv`, `annotations/1.xml`."""
        folder, _, name = refused.key.rpartition("\0")[2].rpartition("/")
        if len(self._named) >= _NUM_NAMED or not name.lower().endswith(_LIST_SUFFIXES):
            return
        if names_labels(name.partition(".")[0]) or _LABEL_FOLDERS.intersection(folder.lower().split("/")):
            what = "is stored beside the images (a table that names them can be used as a source)"
            self._add(f"{printable(refused.key)!r} {what}")

    def _add(self, *hints: str) -> None:
        if len(self._named) < _NUM_NAMED:
            self._named.update(dict.fromkeys(hints))

    def _of_tables(self) -> Iterator[str]:
        """A phrase for each table that names the images, and beside them something that may be their class."""
        for key, head in self._tables.items():
            whole = head.rpartition(b"\n")[0] if len(head) >= _HEAD_BYTES else head
            rows = None
            with suppress(ShardmillError, pa.ArrowException):
                rows = first_rows(whole, key)
            if rows is None or not rows.num_columns:
                continue
            matches = {place: self._num_images(column) for place, column in enumerate(rows.columns)}
            image = max(matches, key=lambda place: matches[place])
            others = rows.remove_column(image)
            found = dict.fromkeys((*filter(names_labels, others.column_names), *_repeating(others, name_images=True)))
            if found and matches[image]:
                place = " in ".join(repr(printable(part)) for part in reversed(key.split("\0")))
                yield (
                    f"{place} names the images, with {_quoted(found)} for each (to use it, set it as the source: "
                    'source.kind = "table", source.uri = its path)'
                )

    def _num_images(self, column: pa.ChunkedArray) -> int:
        """How many of a column's values name images."""
        values = [str(value).strip() for value in column.to_pylist()]
        return sum(
            os.path.splitext(each)[1].lower() in IMAGE_SUFFIXES or _stem_of(each) in self._stems for each in values
        )

    def _of_folders(self) -> Iterator[str]:
        """A phrase if two or more folders of images have names that are neither numbers nor splits."""
        folders = [folder.split("/") for folder in sorted(self._folders) if folder]
        has_splits = names_splits({folder[0] for folder in folders})
        levels: dict[str, int] = {}
        for folder in folders:
            while folder and is_split(folder[-1]):
                folder.pop()
            if folder and not _NUMBERED.fullmatch(folder[-1]):
                levels.setdefault(folder[-1], len(folder) - (has_splits and is_split(folder[0])))
        if len(levels) > 1:
            level = levels[max(levels)] if len(set(levels.values())) == 1 else "N"
            named = first_of([*map(printable, sorted(levels))], _NUM_NAMED)
            yield (
                f"the images are in the folders {named}, with text files beside them (if these folders are "
                f"the classes, set source.label_level = {level})"
            )


def _quoted(names: Iterable[str]) -> str:
    return first_of([repr(printable(name)) for name in names], _NUM_NAMED)


def _stem_of(name: str) -> str:
    return os.path.splitext(re.split(r"[/\\\0]", name)[-1])[0]
