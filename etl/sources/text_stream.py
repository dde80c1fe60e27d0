"""Reads a text table as UTF-8 from any Unicode encoding; other encodings fail with a one-line error."""

from __future__ import annotations

import codecs
import io
from typing import Any, BinaryIO

from shardmill.errors import UsageError
from shardmill.printable import printable

_READ_BYTES = 1 << 20
# The longer marks first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
    (codecs.BOM_UTF8, "utf-8-sig"),
)
_HEAD_BYTES = 512


def utf8_stream(stream: BinaryIO, table: str) -> io.BufferedReader:
    """The text without its byte order mark. Reading raises UsageError at the first bytes that are not in
    this encoding.
    """
    return io.BufferedReader(_Utf8(stream, table), _READ_BYTES)


class _Utf8(io.RawIOBase):
    def __init__(self, stream: BinaryIO, table: str) -> None:
        self._stream, self._table = stream, table
        head = stream.read(_HEAD_BYTES)
        self._encoding = _encoding_of(head)
        self._decoder = codecs.getincrementaldecoder(self._encoding)()
        self._num_read = 0
        self._waiting = self._decoded(head)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._waiting:
            block = self._stream.read(_READ_BYTES)
            self._waiting = self._decoded(block)
            if not block:
                break
        num_bytes = min(len(buffer), len(self._waiting))
        buffer[:num_bytes] = self._waiting[:num_bytes]
        self._waiting = self._waiting[num_bytes:]
        return num_bytes

    def _decoded(self, block: bytes) -> memoryview:
        try:
            text = self._decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            place = max(0, self._num_read + error.start)
            raise UsageError(
                f"the table {printable(self._table)} is not {self._encoding.removesuffix('-sig').upper()}: byte "
                f"0x{error.object[error.start]:02x} near byte {place}",
                "expected UTF-8, or UTF-16 with its byte order mark",
                "convert it; for Windows-1252 (Western Windows): iconv -f WINDOWS-1252 -t UTF-8",
            ) from None
        self._num_read += len(block)
        # What was decoded only to be checked needs no second copy.
        return memoryview(block if self._encoding == "utf-8" else text.encode())


def _encoding_of(head: bytes) -> str:
    marked = next((encoding for mark, encoding in _MARKS if head.startswith(mark)), None)
    if marked is not None:
        return marked
    # A table begins with a name or a bracket: of its first letter, one byte in UTF-16 is zero.
    if len(head) > 1 and 0 in head[:2] and head[:2] != b"\0\0":
        return "utf-16-be" if head[0] == 0 else "utf-16-le"
    return "utf-8"
