"""Parquet files that hold the images themselves, one in each row, as Hugging Face's image datasets do.

A listing reads every column but the images; a task reads them in the order of the file.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from etl.sources.columns import choose_label_column, file_columns, listed_rows, misspelt, with_constants
from etl.sources.containers import ContainerReader, Containers, damaged, gone, open_file, refused_if_large
from etl.sources.extra import ChosenColumns, ExtraColumns, row_columns, usual_columns
from etl.sources.file_splits import FileSplits, splits_of, with_warnings
from etl.sources.listed import LISTED_SCHEMA, ListingBatch
from etl.sources.mask_places import ReaderOfMasks, in_column
from etl.sources.names import PARQUET_SUFFIXES
from etl.sources.parquet_columns import (
    Blocks,
    BytesRows,
    bytes_leaf,
    column_batches,
    holds_lists_of_bytes,
    image_column,
    open_columns,
    read_footer,
)
from etl.sources.unused_labels import column_signs
from shardmill.errors import IntegrityError, ShardmillError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.values import Rejection, RejectReason, SourceImage

if TYPE_CHECKING:
    from etl.config import SourceConfig
    from etl.sources import SourceReader

_LABEL_COLUMNS = ("label", "labels", "class")


class ParquetSource:
    """Every row of the Parquet files that `source.uri` names: a folder, one file, or a pattern."""

    def __init__(self, config: SourceConfig, files: Containers | None = None) -> None:
        self._config = config.without_box_labels
        self._files = files or Containers(config.uri, PARQUET_SUFFIXES)
        self._extra = ExtraColumns.of_source(config)
        self.uri = self._files.uri

    def open(self, max_source_bytes: int) -> SourceReader:
        """Reads rows, each row group once if they come in order."""
        config = self._config
        images = self._reader(config.image_field, "image_field", max_source_bytes)
        if not config.mask_field:
            return images
        return ReaderOfMasks(images, self._reader(config.mask_field, "mask_field", max_source_bytes))

    def _reader(self, field: str, key: str, max_bytes: int) -> ContainerReader[BytesRows]:
        """Of the column that `source.KEY` names."""

        def open_rows(stream: BinaryIO, file: StoredFile) -> BytesRows:
            with _parsing(file.path):
                return BytesRows(stream, file.path, field, key)

        def take(rows: BytesRows, image: SourceImage) -> bytes | Rejection:
            with _parsing(image.container):
                data = rows.read(image.place)
            if data is None:
                return image.rejected(RejectReason.BAD_ROW, "the row holds no image")
            return refused_if_large(image, len(data), max_bytes) or data

        return ContainerReader(self._files.store, open_rows, take)

    def list(self) -> Iterator[ListingBatch]:
        """Raises UsageError if there is no file, or no column of images. A damaged file is a rejection."""
        found = self._files.find()
        yield ListingBatch(LISTED_SCHEMA.empty_table(), found.rejections)
        splits = splits_of(file.path for file in found.containers)
        yield from with_warnings(self._rows(found.containers, splits), splits.look_alikes)

    def _rows(self, files: Sequence[StoredFile], splits: FileSplits) -> Iterator[ListingBatch]:
        for file in files:
            try:
                with open_file(self._files.store, file) as stream, _parsing(file.path):
                    facts = _FileFacts(file, splits.of[file.path], self._files.columns_of(file.path))
                    yield from _list_file(stream, facts, self._config, self._extra)
            except IntegrityError as error:
                yield ListingBatch.of_rejections(damaged(file, str(error)))
            except FileNotFoundError:
                yield ListingBatch.of_rejections(gone(file))


@contextmanager
def _parsing(path: str) -> Iterator[None]:
    """Turn damage into IntegrityError. Raises StorageError if the storage is at fault."""
    with as_storage_error(path):
        try:
            yield
        except (pa.ArrowException, IntegrityError, OSError) as error:
            # pyarrow reports damage as OSError too, but without a number.
            if isinstance(error, OSError) and error.errno is not None:
                raise
            raise IntegrityError(f"does not parse as Parquet: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True, slots=True)
class _FileFacts:
    """What is known of a file before it is opened."""

    file: StoredFile
    split: str | None
    constants: Mapping[str, str | None]
    """Columns that it does not hold itself."""


def _list_file(
    stream: BinaryIO, facts: _FileFacts, config: SourceConfig, extra: ExtraColumns
) -> Iterator[ListingBatch]:
    parquet, file, constants = open_columns(stream), facts.file, facts.constants
    schema = parquet.schema_arrow
    if parquet.metadata.num_rows > file.size_bytes:
        raise IntegrityError(f"it claims {parquet.metadata.num_rows} rows in {file.size_bytes} bytes")
    image = image_column(schema, config.image_field, file.path)
    mask = in_column(config.mask_field) if config.mask_field else ""
    if mask:
        image_column(schema, config.mask_field, file.path, "mask_field")
    names = [name for name in schema.names if not pa.types.is_nested(schema.field(name).type)] + [*constants]
    # Only labels that are no classes may be lists.
    label_names = names if extra.target is None else [*schema.names, *constants]
    chosen = ChosenColumns(choose_label_column(label_names, config, _LABEL_COLUMNS), **usual_columns(names, config))
    signs = ()
    if chosen.label is None and config.label_kind == "class":
        signs = _label_signs(parquet, {image.partition(".")[0], *chosen.names, *extra.own_names}, file.path)
    warnings = misspelt(names, {"split": chosen.split, "group": chosen.group}, file.path)
    yield ListingBatch(LISTED_SCHEMA.empty_table(), warnings=warnings, label_signs=signs)
    known = {*schema.names, *constants}
    wanted = dict.fromkeys([*chosen.names, *(name for name in extra.own_names if name in known)])
    in_file = [name for name in wanted if name not in constants]
    first_row, blocks = 0, Blocks.of_file(parquet.metadata)
    for group in range(parquet.metadata.num_row_groups):
        for rows in column_batches(parquet, group, in_file):
            rows_N = np.arange(first_row, first_row + rows.num_rows, dtype=np.int64)
            columns = file_columns(file, rows_N, blocks.of(rows_N, group), facts.split)
            batch = _listed(with_constants(rows, constants), chosen, columns, file.path, mask, extra)
            yield replace(batch, extra_types=extra.types)
            first_row += rows.num_rows


def _label_signs(parquet: pq.ParquetFile, taken: Collection[str], where: str) -> tuple[str, ...]:
    """Those in the first rows of the columns that nothing else uses; of other columns of bytes no value is read."""
    schema = parquet.schema_arrow
    unused = [field.name for field in schema if field.name not in taken and bytes_leaf(field) is None]
    flat = [name for name in unused if not pa.types.is_nested(schema.field(name).type)]
    batches = column_batches(parquet, 0, flat) if flat and parquet.num_row_groups else iter(())
    return column_signs(schema, unused, next(batches, pa.table({})), where)


def _listed(
    rows: pa.Table, chosen: ChosenColumns, columns: dict[str, pa.Array], where: str, mask: str, extra: ExtraColumns
) -> ListingBatch:
    """`columns`: what their file says of all rows; `mask`: what stands for the mask of each, empty without masks."""
    found = row_columns(rows, chosen, where, extra, pa.repeat(mask, rows.num_rows) if mask else None)
    # A key is the image's identity, whatever file holds its row.
    keys = {} if found.keys is None else {"key": found.keys}
    return listed_rows({**columns, **keys, **found.columns}, found.problems, where)


def holds_images(uri: str) -> bool:
    """Whether a file (of a pattern, the first one) has a column of bytes, which may be images; a table has none."""
    files = Containers(uri, PARQUET_SUFFIXES)
    try:
        with open_file(files.store, files.find().containers[0]) as stream:
            schema = read_footer(stream).schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ShardmillError):
        return False
    return any(bytes_leaf(field) is not None or holds_lists_of_bytes(field) for field in schema)
