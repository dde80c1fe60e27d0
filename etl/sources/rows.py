"""Reads rows of every kind of table: their keys, splits, groups, labels, boxes and masks; a kind gives a file's rows.

The rows hold the images (`ImageRows`), or name them (`kinds/table.py`). A listing reads every column but the
images; a task reads these in the order of the file.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, BinaryIO

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.annotations import ReaderOfMasks, in_column
from etl.sources.columns import (
    as_labels,
    as_names,
    as_splits,
    choose_column,
    choose_label_column,
    class_names_of,
    file_columns,
    listed_rows,
    misspelt,
    or_else,
    unread_coordinates,
    with_constants,
)
from etl.sources.containers import ContainerReader, Containers, damaged, gone, open_file, refused_if_large
from etl.sources.extra import ExtraColumns
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.names import SPLIT_OF_NAME
from etl.sources.path_labels import splits_of, with_warnings
from etl.sources.row_file import RowFile, RowFormat, RowImage, bytes_leaf, checked_batches, image_column
from etl.sources.unused_labels import column_hints
from shardmill.errors import IntegrityError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from etl.sources import SourceReader

LABEL_COLUMNS = ("label", "labels", "class")


@dataclass(frozen=True, slots=True)
class ChosenColumns:
    """A file's own names of what we take from it; None for what it lacks."""

    label: str | None
    split: str | None
    key: str | None
    group: str | None

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(name for each in fields(self) if (name := getattr(self, each.name)) is not None))


def usual_columns(names: Sequence[str], config: SourceConfig) -> dict[str, str | None]:
    """The columns of splits, keys and groups."""
    return {
        "split": choose_column(names, config.split_field, ("split",), "split_field"),
        "key": choose_column(names, config.key_field, ("key",), "key_field"),
        "group": choose_column(names, config.group_field, ("group",), "group_field"),
    }


@dataclass(frozen=True, slots=True)
class RowColumns:
    """Columns of a listing that rows decide."""

    columns: dict[str, pa.Array]
    """`split`, `group`, `label` and `extra`, as far as there are any."""
    keys: pa.Array | None
    """None without a column of keys."""
    problems: pa.Array
    """Why a row is refused, null if it is not."""


def row_columns(
    rows: pa.Table, chosen: ChosenColumns, where: str, extra: ExtraColumns, masks: pa.Array | None
) -> RowColumns:
    """`where`: the file, for a person; `masks`: what stands for the mask of each row."""
    columns: dict[str, pa.Array] = {}
    keys, problems = None, pa.nulls(rows.num_rows, pa.string())

    def labels(name: str) -> pa.Array:
        return as_labels(column_of(rows, name), class_names_of(rows.schema, name), where).combine_chunks()

    if chosen.key is not None:
        keys = as_names(column_of(rows, chosen.key)).combine_chunks()
        problems = or_else(problems, keys.is_null(), "no key")
    if chosen.split is not None:
        columns["split"], is_unknown = as_splits(labels(chosen.split))
        problems = or_else(problems, is_unknown, f"no split's name; expected one of {', '.join(SPLIT_OF_NAME)}")
    if chosen.group is not None:
        columns["group"] = as_names(column_of(rows, chosen.group)).combine_chunks()
    if chosen.label is not None and extra.target is None:
        columns["label"] = labels(chosen.label)
        problems = or_else(problems, columns["label"].is_null(), "no label")
    if extra.has_values:
        columns["extra"], odd = extra.of_rows(rows, where, chosen.label, masks)
        problems = pc.coalesce(problems, odd)
    return RowColumns(columns, keys, problems)


def column_of(rows: pa.Table, name: str) -> pa.ChunkedArray:
    """A block of JSON lines may lack a column that the first one has."""
    return rows.column(name) if name in rows.column_names else pa.chunked_array([pa.nulls(len(rows), pa.string())])


class ImageRows:
    """Every row of files that hold the images, one in each row; a kind of such files has its format."""

    row_format: RowFormat

    def __init__(
        self, config: SourceConfig, files: Containers | None = None, row_format: RowFormat | None = None
    ) -> None:
        """`files`: those of a table that `source.uri` names in another way than by their suffixes."""
        self._config = config.without_box_labels
        self._format = row_format or self.row_format
        self._files = files or Containers(config.uri, self._format.suffixes)
        self._extra = ExtraColumns.of_source(config)
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> SourceReader:
        """Reads rows, each block once if they come in order."""
        config = self._config
        images = self._reader(config.image_field, "image_field", max_source_bytes)
        if not config.mask_field:
            return images
        return ReaderOfMasks(images, self._reader(config.mask_field, "mask_field", max_source_bytes))

    def _reader(self, field: str, key: str, max_bytes: int) -> ContainerReader[Callable[[int], RowImage]]:
        """Of the column that `source.KEY` names."""

        def open_rows(stream: BinaryIO, file: StoredFile) -> Callable[[int], RowImage]:
            with self._parsing(file.path):
                rows = self._format.open(stream, file)
                return rows.images(image_column(rows.schema, field, file.path, key))

        def take(read: Callable[[int], RowImage], image: SourceImage) -> bytes | Rejection:
            with self._parsing(image.container):
                found = read(image.place)
            data = found["bytes"] if isinstance(found, dict) else found
            if data is None:
                return image.rejected(RejectReason.BAD_ROW, "the row holds no image")
            return refused_if_large(image, len(data), max_bytes) or data

        return ContainerReader(self._files.store, open_rows, take)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file, or no column of images. A damaged file is a rejection."""
        found = self._files.find()
        yield ListingBatch.of_rejections(*found.rejections)
        yield from listed_files(found.containers, self._list_file)

    @contextmanager
    def _parsing(self, path: str) -> Iterator[None]:
        """Turn damage into IntegrityError. Raises StorageError if the storage is at fault."""
        with as_storage_error(path):
            try:
                yield
            except (pa.ArrowException, IntegrityError, OSError) as error:
                # pyarrow reports damage as OSError too, but without a number.
                if isinstance(error, OSError) and error.errno is not None:
                    raise
                problem = str(error).splitlines()[0]
                raise IntegrityError(f"does not parse as {self._format.name}: {problem}") from None

    def _list_file(self, file: StoredFile, split: str | None) -> Iterator[ListingBatch]:
        with open_file(self._files.store, file) as stream, self._parsing(file.path):
            config, extra = self._config, self._extra
            rows_of, constants = self._format.open(stream, file), self._files.columns_of(file.path)
            schema = rows_of.schema
            if rows_of.num_rows > file.size_bytes:
                raise IntegrityError(f"it claims {rows_of.num_rows} rows in {file.size_bytes} bytes")
            image_column(schema, config.image_field, file.path)
            mask = in_column(config.mask_field) if config.mask_field else ""
            if mask:
                image_column(schema, config.mask_field, file.path, "mask_field")
            names = [each.name for each in schema if not pa.types.is_nested(each.type)] + [*constants]
            # Only labels that are no classes may be lists.
            label_names = names if extra.target is None else [*schema.names, *constants]
            label = choose_label_column(label_names, config, LABEL_COLUMNS)
            chosen = ChosenColumns(label, **usual_columns(names, config))
            hints = ()
            if chosen.label is None and config.label_kind == "class":
                hints = _label_hints(rows_of, {*chosen.names, *extra.own_names}, file.path)
            warnings = misspelt(names, {"split": chosen.split, "group": chosen.group}, file.path)
            if not config.boxes.field:
                warnings += unread_coordinates(names, (*chosen.names, *extra.own_names), file.path)
            yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=warnings, label_hints=hints)
            known = {*schema.names, *constants}
            wanted = dict.fromkeys([*chosen.names, *(name for name in extra.own_names if name in known)])
            stored = [name for name in wanted if name not in constants]
            for rows, places_N, blocks_N in checked_batches(rows_of, stored):
                rows = with_constants(rows, constants)
                masks = pa.repeat(mask, rows.num_rows) if mask else None
                found = row_columns(rows, chosen, file.path, extra, masks)
                # A key is the image's identity, whatever file holds its row.
                keys = {} if found.keys is None else {"key": found.keys}
                columns = {**file_columns(file, places_N, blocks_N, split), **keys, **found.columns}
                yield replace(listed_rows(columns, found.problems, file.path), extra_types=extra.types)


def listed_files(
    files: Sequence[StoredFile],
    list_file: Callable[[StoredFile, str | None], Iterator[ListingBatch]],
    path_of: Callable[[StoredFile], str] = attrgetter("path"),
) -> Iterator[ListingBatch]:
    """The files' listings, each with the split that its path names; one that is damaged or gone is a rejection, which
    costs no other."""
    splits = splits_of(map(path_of, files))

    def listed() -> Iterator[ListingBatch]:
        for file in files:
            try:
                yield from list_file(file, splits.of[path_of(file)])
            except IntegrityError as error:
                yield ListingBatch.of_rejections(damaged(file, str(error)))
            except FileNotFoundError:
                yield ListingBatch.of_rejections(gone(file))

    yield from with_warnings(listed(), splits.look_alikes)


def _label_hints(file: RowFile, taken: Collection[str], where: str) -> tuple[str, ...]:
    """Those in the first rows of the columns that nothing else uses; of other columns of bytes no value is read."""
    schema = file.schema
    free = [field for field in schema if field.name not in taken and bytes_leaf(field) is None]
    unused = [field.name for field in free]
    flat = [field.name for field in free if not pa.types.is_nested(field.type)]
    first = next(checked_batches(file, flat), None) if flat else None
    return column_hints(schema, unused, pa.table({}) if first is None else first[0], where)
