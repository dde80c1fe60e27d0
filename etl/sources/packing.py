"""Detects files that are compressed as a whole by their first bytes, not by their names."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import pyarrow as pa

from shardmill.errors import IntegrityError
from shardmill.storage_errors import as_storage_error

PACKED_SUFFIXES = (".gz", ".tgz", ".bz2", ".tbz", ".tbz2", ".xz", ".txz", ".zst", ".tzst")


@dataclass(frozen=True, slots=True)
class Packing:
    """One kind of compression; `open` makes of a packed file one of the unpacked bytes that can seek."""

    name: str
    magic: bytes
    open: Callable[[BinaryIO], Any]


class _KeptOpen:
    """A file that Arrow may read and not close."""

    closed = False

    def __init__(self, file: BinaryIO) -> None:
        self.read = file.read

    def close(self) -> None:
        """Whoever opened it closes it."""


class _Zstandard(io.RawIOBase):
    """Arrow's decompressing stream with a `seek`: back means from the beginning, as with Python's own."""

    def __init__(self, packed: BinaryIO) -> None:
        super().__init__()
        self._packed, self._position = packed, 0
        self._restart()

    def _restart(self) -> None:
        self._packed.seek(0)
        self._stream, self._position = pa.CompressedInputStream(pa.PythonFile(_KeptOpen(self._packed), "r"), "zstd"), 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            raise io.UnsupportedOperation("the end of a packed file is not known")
        wanted = offset + (self._position if whence == io.SEEK_CUR else 0)
        if wanted < self._position:
            self._restart()
        while self._position < wanted and self.readinto(memoryview(bytearray(min(1 << 20, wanted - self._position)))):
            pass
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            data = self._stream.read(len(buffer))
        except OSError as error:
            if error.errno is not None:
                raise
            raise IntegrityError(f"it does not unpack: {error}") from None
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


_PACKINGS = (
    Packing("gzip", b"\x1f\x8b\x08", lambda file: gzip.GzipFile(fileobj=file)),
    Packing("bzip2", b"BZh", bz2.BZ2File),
    Packing("xz", b"\xfd7zXZ\0", partial(lzma.LZMAFile, format=lzma.FORMAT_XZ)),
    Packing("Zstandard", b"\x28\xb5\x2f\xfd", lambda file: io.BufferedReader(_Zstandard(file), 1 << 17)),
)
_LONGEST_MAGIC = max(len(each.magic) for each in _PACKINGS)


def packing_of(file: BinaryIO) -> Packing | None:
    """Return the compression of a file, None if it has none. The file is left at its beginning."""
    file.seek(0)
    head = file.read(_LONGEST_MAGIC)
    file.seek(0)
    return next((each for each in _PACKINGS if head.startswith(each.magic)), None)


def unpacked(file: BinaryIO) -> BinaryIO:
    """The unpacked bytes, or the file itself; seeking back in a compressed one starts again from its beginning."""
    packing = packing_of(file)
    return file if packing is None else packing.open(file)


def is_packed_name(path: str) -> bool:
    """Whether a file's name says that it is compressed as a whole."""
    return path.lower().endswith(PACKED_SUFFIXES)


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Turn damage of a compressed container into IntegrityError, and a fault of its storage into StorageError."""
    with as_storage_error(path):
        try:
            yield
        except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
            raise IntegrityError(f"it does not unpack: {error}") from None
        except OSError as error:
            # So does `bz2` report damage: without a number.
            if error.errno is not None or type(error) is not OSError:
                raise
            raise IntegrityError(f"it does not unpack: {error}") from None
