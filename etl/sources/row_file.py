"""One file of a table: what a kind of table gives of it, and which of its columns holds images.

A kind writes a `RowFile`; keys, splits, labels, boxes, masks and types are those of every table (`rows.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol

import numpy as np
import pyarrow as pa

from etl.sources.columns import check_texts, choose_column
from etl.sources.containers import Containers, open_file
from shardmill.errors import ShardmillError, UsageError
from shardmill.storage import StoredFile
from shardmill.words import printable

BATCH_ROWS = 65_536
RowImage = bytes | dict[str, Any] | None
"""A row's bytes, or a struct with `bytes`."""


class RowFile(Protocol):
    """One opened file of a table. Whatever of it cannot be read is an IntegrityError, or an error of pyarrow's."""

    schema: pa.Schema
    num_rows: int
    """What it claims to have, 0 if its library has counted them; more than it has bytes are refused."""

    def batches(self, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
        """Columns of all rows with the file's metadata, and each row's number in the file and block, int64.

        A block is what one task reads. Without names, a batch still has its rows.
        """
        ...

    def images(self, leaf: str) -> Callable[[int], RowImage]:
        """Reads the image of a row in a column (`image`, `image.bytes`); those of a block in their order only once."""
        ...


@dataclass(frozen=True, slots=True)
class RowFormat:
    """How one kind of table is stored."""

    name: str
    suffixes: tuple[str, ...]
    """Of its files; empty for tables that are found by a log of their versions."""
    open: Callable[[BinaryIO, StoredFile], RowFile]

    def holds_images(self, uri: str) -> bool:
        """Whether a file (of a pattern, the first one) has a column of bytes, which may be images; a table has none."""
        files = Containers(uri, self.suffixes)
        try:
            file = files.find().containers[0]
            with open_file(files.store, file) as stream:
                schema = self.open(stream, file).schema
        except (pa.ArrowException, OSError, ShardmillError):
            return False
        return any(bytes_leaf(field) is not None or holds_lists_of_bytes(field) for field in schema)


def checked_batches(file: RowFile, names: Sequence[str]) -> Iterator[tuple[pa.Table, np.ndarray, np.ndarray]]:
    """Its `batches`. Raises IntegrityError if the texts of one would become too large."""
    for rows, places_N, blocks_N in file.batches(names):
        for column in rows.columns:
            check_texts(column)
        yield rows, places_N, blocks_N


# A group of rows is decoded from its beginning for each of its blocks: at most so many, so 4.5 times in all.
_MAX_BLOCKS_OF_GROUP, _MIN_BLOCK_ROWS = 8, 1_024


def blocks_of(places_N: np.ndarray, first_rows: Sequence[int], group: int) -> np.ndarray:
    """The blocks of rows of one group: the number of the group, if it is one; those of further ones lie behind these.

    `first_rows`: those of all groups that are stored as one (a row group, a record batch), and the end of the last one.
    """
    first, end = first_rows[group], first_rows[group + 1]
    block_rows = max(_MIN_BLOCK_ROWS, -(-(end - first) // _MAX_BLOCKS_OF_GROUP))
    return group + (places_N - first) // block_rows * (len(first_rows) - 1)


def bytes_leaf(field: pa.Field) -> str | None:
    """The name of a column of bytes, or of the bytes inside a struct, as Hugging Face writes images; else None."""
    kind = field.type
    if _is_bytes(kind):
        return field.name
    if pa.types.is_struct(kind) and kind.get_field_index("bytes") >= 0:
        return f"{field.name}.bytes" if _is_bytes(kind.field("bytes").type) else None
    return None


def _is_bytes(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def image_column(schema: pa.Schema, configured: str, where: str, key: str = "image_field") -> str:
    """The leaf that holds the bytes of images, or of what `source.KEY` names.

    Raises UsageError if there is none, or several could be meant.
    """
    leaves = {field.name: leaf for field in schema if (leaf := bytes_leaf(field)) is not None}
    found = choose_column(list(leaves), configured, ("image", "img"), key)
    if found is None and len(leaves) == 1:
        [found] = leaves
    lists = [field.name for field in schema if holds_lists_of_bytes(field)]
    if found is None and lists:
        raise UsageError(
            f"the column {printable(lists[0])!r} of {printable(where)} contains lists of images",
            "expected one image in each row",
            "write a row for each image, with the label of its list; or name another column with source.image_field",
        )
    if found is None:
        raise UsageError(
            f"{printable(where)} has the columns {', '.join(map(printable, schema.names[:20]))}",
            "expected one with an image's bytes: binary, or a struct with a field `bytes`",
            "name it with source.image_field; for a table of file names use source.kind=table",
        )
    return leaves[found]


def holds_lists_of_bytes(field: pa.Field) -> bool:
    """Whether a value of the column is a list of what may be images."""
    kind = field.type
    if not (pa.types.is_list(kind) or pa.types.is_map(kind)):
        return False
    inner = pa.field(field.name, kind.item_type if pa.types.is_map(kind) else kind.value_type)
    return bytes_leaf(inner) is not None or holds_lists_of_bytes(inner)
