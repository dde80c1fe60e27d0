"""Finds the values of a row group where they lie in its bytes: what Arrow would copy, and parse for 0.5 to 1.3 ms.

Only plain, uncompressed pages of columns that are never null, as `shardmill.formats.parquet` writes them; Arrow reads
all others. Layout: https://parquet.apache.org/docs/file-format/data-pages/.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from shardmill.errors import IntegrityError
from shardmill.formats.rows import Slices

if TYPE_CHECKING:
    import pyarrow.parquet as pq

    from shardmill.formats.rows import ByteRange

_LENGTH = struct.Struct("<I")
# How the header of a data page begins: field 1, its type, is 0, and then comes field 2, its size.
_DATA_PAGE = b"\x15\x00\x15"
_MAX_PAGE_HEADER_BYTES = 64
# The second one is of the levels, which a column without nulls does not have.
_PLAIN_ENCODINGS = {"PLAIN", "RLE"}


@dataclass(frozen=True, slots=True)
class PlainPage:
    """The only data page of a column in one row group."""

    data: bytes | memoryview
    first: int
    """Where its values begin."""
    end: int
    num_values: int
    kind: pq.ColumnSchema

    def integers(self) -> np.ndarray:
        """The values of a column of int64."""
        self._check_size(8)
        return np.frombuffer(self.data, dtype="<i8", count=self.num_values, offset=self.first)

    def slices(self) -> Slices:
        """Where the values of a column of bytes lie. Raises IntegrityError if their lengths do not add up."""
        if self.kind.physical_type == "BYTE_ARRAY":
            return self._with_lengths()
        self._check_size(self.kind.length)
        starts_N = np.arange(self.first, self.end, self.kind.length, dtype=np.int64)
        return Slices(self.data, starts_N, starts_N + self.kind.length)

    def _with_lengths(self) -> Slices:
        """Values that follow their lengths, 4 bytes each, little-endian."""
        data, starts, stop, length_at = self.data, [], self.first, _LENGTH.unpack_from
        for _ in range(self.num_values):
            start = stop + _LENGTH.size
            if start > self.end:
                break
            starts.append(start)
            stop = start + length_at(data, stop)[0]
        if stop != self.end or len(starts) != self.num_values:
            raise IntegrityError(
                f"the lengths in column {self.kind.name} of a Parquet row group do not add up to its page"
            )
        starts_N = np.array(starts, dtype=np.int64)
        return Slices(data, starts_N, np.append(starts_N[1:] - _LENGTH.size, self.end))

    def _check_size(self, value_bytes: int) -> None:
        if value_bytes * self.num_values != self.end - self.first:
            raise IntegrityError(
                f"column {self.kind.name} of a Parquet row group does not have {self.num_values} values"
            )


def find_page(
    footer: pq.FileMetaData, row_group: int, place: ByteRange, data: bytes | memoryview, column: int, name: str
) -> PlainPage | None:
    """The page of a column, if that has this name and one plain page; `data` are the row group's bytes."""
    found, kind = footer.row_group(row_group).column(column), footer.schema.column(column)
    is_plain = found.compression == "UNCOMPRESSED" and not found.has_dictionary_page
    if not is_plain or kind.path != name or kind.max_definition_level or kind.max_repetition_level:
        return None
    begin = found.data_page_offset - place.start
    end = begin + found.total_compressed_size
    if not 0 <= begin < end <= len(data) or not _PLAIN_ENCODINGS.issuperset(found.encodings):
        return None
    # All that the column has beside its one page is that page's header.
    first = end - _page_bytes(bytes(data[begin : begin + _MAX_PAGE_HEADER_BYTES]))
    if not begin < first <= begin + _MAX_PAGE_HEADER_BYTES:
        return None
    return PlainPage(data, first, end, found.num_values, kind)


def _page_bytes(header: bytes) -> int:
    """The size that a data page's header states; 0 for another header.

    `PageHeader` of parquet.thrift in Thrift's compact protocol: 7 bits of a number in each byte, the lowest first, and
    its sign in the last bit (zigzag).
    """
    number = 0
    if header.startswith(_DATA_PAGE):
        for place, byte in enumerate(header[len(_DATA_PAGE) :]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                return number >> 1
    return 0
