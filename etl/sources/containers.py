"""Files that contain many images: found below a URI, opened at any offset, checked against the listing.

A stored file of any storage is opened as a seekable one; files that are compressed as a whole are known by their first
bytes, not by their names.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, BinaryIO, Generic, TypeVar

import pyarrow as pa

from etl.sources.names import expanded, is_pattern, is_utf8, matches, names_any
from shardmill.errors import CannotList, IntegrityError, NoSuchRoot, UsageError
from shardmill.storage import Store, StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason, SourceImage
from shardmill.words import printable

# Remote files are fetched in blocks: few requests for a scan, little waste for a jump over a large member.
_BLOCK_BYTES = 1 << 20


def open_file(store: Store, file: StoredFile) -> BinaryIO:
    """A seekable file; a remote one is read by ranges, in blocks. Raises FileNotFoundError, StorageError."""
    if store.local_root is not None:
        with as_storage_error(store.local_root / file.path):
            return open(store.local_root / file.path, "rb")
    return io.BufferedReader(_RemoteFile(store, file), _BLOCK_BYTES)


class _RemoteFile(io.RawIOBase):
    def __init__(self, store: Store, file: StoredFile) -> None:
        super().__init__()
        self._store, self._file, self._position = store, file, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size_bytes}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # pyright: ignore[reportIncompatibleMethodOverride]
        num_bytes = min(len(buffer), max(0, self._file.size_bytes - self._position))
        data = self._store.read_range(self._file.path, self._position, num_bytes) if num_bytes else b""
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


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


Opened = TypeVar("Opened")
Table = TypeVar("Table")
_NUM_NAMED = 3


@dataclass(frozen=True, slots=True)
class FoundFiles:
    """The files found in a folder."""

    containers: tuple[StoredFile, ...]
    others: tuple[StoredFile, ...]

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The other files, which nobody takes for images."""
        return tuple(
            image_file(file).rejected(RejectReason.NOT_AN_IMAGE_NAME, "not of this source's kind", "list")
            for file in self.others
        )


class Containers:
    """The files that `source.uri` names: a folder, one file, or a pattern of files (see `etl/sources/names.py`).

    Nothing is read before `find`. Paths are relative to `store`: the folder itself, or the fixed part of the pattern.
    """

    def __init__(self, uri: str, suffixes: tuple[str, ...]) -> None:
        self._suffixes = suffixes
        place = _Location.of(uri, suffixes)
        self.store = open_store(place.root)
        self._name, self._is_pattern = place.name, place.is_pattern
        self._seen = ""
        self.uri = f"{self.store.uri.rstrip('/')}/{place.name}" if place.name else self.store.uri

    def find(self) -> FoundFiles:
        """Every container and every other file of the folder, sorted by path. Raises UsageError if there is none."""
        try:
            found = sorted(self._candidates(), key=lambda file: file.path)
        except NoSuchRoot as error:
            raise UsageError(f"source {self.uri} does not exist: {error.what}", "", "check source.uri") from None
        containers = tuple(file for file in found if self._is_container(file))
        if not containers:
            raise UsageError(
                f"source {self.uri} contains no {' or '.join(self._suffixes[:_NUM_NAMED])} file",
                "expected a folder of such files, one such file, or a pattern",
                "check source.uri and source.kind",
            )
        self._check_all_named({file.path for file in containers})
        self._check_are_texts(file.path for file in containers)
        return FoundFiles(containers, tuple(file for file in found if not self._is_container(file)))

    def are_there(self) -> bool:
        """Whether this host sees any of them. One that it saw before is looked up first: a listing may be long."""
        try:
            if self._seen and self.store.stat(self._seen) is not None:
                return True
            self._seen = next((file.path for file in self._candidates() if self._is_container(file)), "")
        except NoSuchRoot:
            return False
        return bool(self._seen)

    def columns_of(self, path: str) -> Mapping[str, str | None]:
        """Columns that have one value in all rows of a file, and are not in the file itself."""
        return {}

    def _check_all_named(self, found: set[str]) -> None:
        """`{000..146}` names 147 files; one that is not there was lost, or is still on its way."""
        if not self._is_pattern or names_any(self._name):
            return
        missing = [path for path in expanded(self._name) if path not in found]
        if missing:
            raise UsageError(
                f"source {self.uri}: {len(missing)} of the files that it names do not exist, such as {missing[0]}",
                "expected all of them",
                "restore them, or name only existing files, for example with a pattern (`*`)",
            )

    def _check_are_texts(self, paths: Iterable[str]) -> None:
        """Keys begin with them, or with their folders, and a key is a text."""
        odd = next((path for path in paths if not is_utf8(path)), None)
        if odd is not None:
            raise UsageError(
                f"source {self.uri} holds {printable(odd)}, whose path is not UTF-8",
                "expected names that are text",
                "rename it, or select the other files with a pattern in source.uri",
            )

    def _candidates(self) -> Iterable[StoredFile]:
        if not self._is_pattern:
            file = self.store.stat(self._name) if self._name else None
            return [file] if file is not None else self.store.list(self._name)
        try:
            return (file for file in self.store.list("") if matches(file.path, self._name))
        except CannotList:
            if names_any(self._name):
                raise
            return filter(None, map(self.store.stat, expanded(self._name)))

    def _is_container(self, file: StoredFile) -> bool:
        # A pattern or a file's own name says what is meant, whatever its suffix.
        return file.path == self._name or is_named(file.path, self._suffixes)


def files_of_version(
    store: Store, folder: str, paths: Collection[str], uri: str, cleanup: str
) -> tuple[StoredFile, ...]:
    """The stored files of one version of a table, sorted by path. Raises IntegrityError if `cleanup` deleted some."""
    stored = {file.path: file for file in store.list(folder) if file.path in paths}
    gone = sorted(set(paths) - stored.keys())
    if gone:
        raise IntegrityError(
            f"{uri} has lost {len(gone)} of its {len(paths)} files, such as {printable(gone[0])}",
            f"expected every file that the version's log names; {cleanup} deletes those of older versions",
            "name a newer version, or restore the files",
        )
    if not stored:
        raise UsageError(f"the table {uri} is empty", "expected rows", "name another version")
    return tuple(stored[path] for path in sorted(stored))


class VersionFiles(Containers, Generic[Table]):
    """The files of one version of a table, whose own library knows them."""

    def __init__(
        self, root: str, version: int | None, suffixes: tuple[str, ...], opened: Callable[[str, int | None], Table]
    ) -> None:
        """`opened`: the table at a URI, at a version or at its latest one, which is decided now."""
        super().__init__(root, suffixes)
        self._table = opened(self.store.uri, None) if version is None else _version_of(opened, self.store.uri, version)


@lru_cache(maxsize=8)
def _version_of(opened: Callable[[str, int | None], Table], uri: str, version: int) -> Table:
    """A version never changes; each work unit asks for it, and its log may be long."""
    return opened(uri, version)


class ContainerReader(Generic[Opened]):
    """Reads the images of containers by their places; the latest container stays open, as units come block by block."""

    num_parallel = 1

    def __init__(
        self,
        store: Store,
        open: Callable[[BinaryIO, StoredFile], Opened],
        take: Callable[[Opened, SourceImage], bytes | Rejection],
    ) -> None:
        """`open` makes of a file what `take` reads images from; both raise IntegrityError on damage."""
        self._store, self._open, self._take = store, open, take
        self._known: tuple[str, int, str] | None = None
        self._file: BinaryIO | None = None
        self._opened: Opened | None = None

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The image's bytes, or a rejection if its container changed or is damaged. Raises as `Store.read` does."""
        try:
            opened = self._container_of(image)
            if isinstance(opened, Rejection):
                return opened
            with reading(image.container):
                return self._take(opened, image)
        except IntegrityError as error:
            return image.rejected(RejectReason.DAMAGED_CONTAINER, str(error))

    def expect(self, image: SourceImage) -> None:
        """Does nothing: the operating system reads ahead in a file."""

    def is_there(self, path: str) -> bool:
        """Whether this host sees the container."""
        return self._store.stat(path) is not None

    def _container_of(self, image: SourceImage) -> Opened | Rejection:
        known = (image.container, image.mtime_ns, image.etag)
        if known != self._known or self._opened is None:
            file = self._store.stat(image.container)
            if file is None:
                raise FileNotFoundError(image.container)
            if (file.mtime_ns, file.etag) != (image.mtime_ns, image.etag):
                return image.rejected(RejectReason.SOURCE_CHANGED, "its container changed after it was listed")
            if self._file is not None:
                self._file.close()
            self._file = open_file(self._store, file)
            self._opened, self._known = self._open(self._file, file), known
        return self._opened


def refused_if_large(image: SourceImage, num_bytes: int, max_bytes: int) -> Rejection | None:
    """Of an image or mask whose size a listing does not know."""
    detail = f"{num_bytes} bytes; the limit is etl.max_source_bytes"
    return image.rejected(RejectReason.TOO_LARGE_BYTES, detail) if num_bytes > max_bytes else None


def image_file(file: StoredFile) -> SourceImage:
    """A file as a listed input of its own."""
    return SourceImage(file.path, file.size_bytes, file.mtime_ns, file.etag)


def image_in(file: StoredFile, name: object, start: int, block: int, size_bytes: int = 0) -> SourceImage:
    """One of the images in a container: its name there, its first byte and its block."""
    return SourceImage(
        f"{file.path}\0{name}", size_bytes, file.mtime_ns, file.etag, container=file.path, place=start, block=block
    )


def gone(file: StoredFile) -> Rejection:
    """Return the rejection of a container that vanished after the listing, for all images that it contained."""
    return image_file(file).rejected(RejectReason.MISSING, "gone while the source was listed", "list")


def damaged(file: StoredFile, problem: str) -> Rejection:
    """Return the rejection of a container, for all images that it does not give up."""
    return image_file(file).rejected(RejectReason.DAMAGED_CONTAINER, problem, "list")


@dataclass(frozen=True, slots=True)
class _Location:
    """A root to open, and a name or a pattern below it; empty if the root itself is meant."""

    root: str
    name: str
    is_pattern: bool

    @classmethod
    def of(cls, uri: str, suffixes: tuple[str, ...]) -> _Location:
        """Its text alone decides, so that every host decides alike, but for local paths that look like patterns."""
        scheme, separator, path = uri.rpartition("://")
        parts = path.rstrip("/").split("/")

        def is_there(number: int) -> bool:
            return scheme in ("", "file") and os.path.exists(os.path.expanduser("/".join(parts[: number + 1])))

        patterns = [number for number, part in enumerate(parts) if is_pattern(part) and not is_there(number)]
        if not patterns and not is_named(parts[-1], suffixes):
            return cls(uri, "", is_pattern=False)
        fixed = patterns[0] if patterns else len(parts) - 1
        root = "/".join(parts[:fixed]) or ("/" if path.startswith("/") else ".")
        return cls(f"{scheme}{separator}{root}", "/".join(parts[fixed:]), is_pattern=bool(patterns))


def is_named(path: str, suffixes: tuple[str, ...]) -> bool:
    """Whether a name ends in one of the suffixes, whatever its case."""
    return plain_name(path).endswith(suffixes)


def plain_name(path: str) -> str:
    """In small letters, without the shard's number: TFDS writes `mnist-train.tfrecord-00000-of-00001`."""
    return re.sub(r"-\d+-of-\d+$", "", path.lower())
