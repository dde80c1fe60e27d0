"""Files with a known digest: their size and SHA-256 are known before they are read, or are stored inside them.

Two kinds. A `ChecksummedFile` is named by another record (a checkpoint's marker, an export's record), which holds its
size and digest. An envelope is a record that nothing else names: one line of JSON with the SHA-256 of its own
body.
"""

from __future__ import annotations

import hashlib
import re
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from shardmill.errors import IntegrityError, SecurityRefusal
from shardmill.storage import Store, join_uri

# An envelope's bytes are these three parts around a digest of 64 hex digits and a body, itself JSON.
_BEFORE_DIGEST, _BEFORE_BODY, _AFTER_BODY = b'{"sha256":"', b'","body":', b"}\n"
_BODY_START = len(_BEFORE_DIGEST) + 64 + len(_BEFORE_BODY)
_BLOCK_BYTES = 8_000_000

RESTORE = "restore it from a copy, or delete it and run `shardmill etl`, which rebuilds what is missing"
"""The fix for a damaged file, for an error that names it."""


@dataclass(frozen=True, slots=True)
class ChecksummedFile:
    """A file with the size and digest of its record."""

    path: str
    size_bytes: int
    sha256: str


def check_relative_path(path: str) -> str:
    """`path` itself, if it can only lead below its root. Raises SecurityRefusal otherwise."""
    parts = path.split("/")
    decoded = urllib.parse.unquote(path)
    hostile = (
        not path
        or any(part in ("", ".", "..") for part in parts)
        or ".." in decoded.split("/")
        or "\\" in decoded
        or any(ord(character) < 32 for character in decoded)
        or re.match(r"^[A-Za-z]:|^[A-Za-z][A-Za-z0-9+.-]*://", decoded) is not None
        or decoded.startswith(("/", "~"))
    )
    if hostile:
        raise SecurityRefusal(
            f"the path {path!r} leaves its root folder",
            "expected a relative, normalised path",
            "do not use this dataset; find out who wrote it",
        )
    return path


def checksum_file(path: str, data: bytes) -> ChecksummedFile:
    """Return the size and digest of `data` at `path`."""
    return ChecksummedFile(path, len(data), hashlib.sha256(data).hexdigest())


def read_checksummed(store: Store, file: ChecksummedFile, folder: str = "", *, fix: str = "") -> bytes:
    """The bytes of a checksummed file, its path relative to `folder`.

    Raises IntegrityError, with `fix` as its advice, if it is missing or altered; SecurityRefusal if its path leaves
    `folder`. Of a larger file no more is read than its record allows.
    """
    with _expected(store, file, folder, fix) as path:
        # One byte more than expected: a file that has it is larger, and nothing else needs to ask for its size.
        data = store.read_range(path, 0, file.size_bytes + 1)
    _compare(store, checksum_file(file.path, data), file, path, fix)
    return data


def verify_file(store: Store, file: ChecksummedFile, folder: str = "", *, fix: str = "") -> None:
    """Read a checksummed file for its digest alone, in bounded memory. Raises as `read_checksummed` does."""
    digest, size_bytes = hashlib.sha256(), 0
    with _expected(store, file, folder, fix) as path:
        while size_bytes <= file.size_bytes:
            block = store.read_range(path, size_bytes, min(_BLOCK_BYTES, file.size_bytes + 1 - size_bytes))
            if not block:
                break
            digest.update(block)
            size_bytes += len(block)
    _compare(store, ChecksummedFile(file.path, size_bytes, digest.hexdigest()), file, path, fix)


def with_checksum(body: bytes) -> bytes:
    """An envelope around `body`, which is one JSON value: itself JSON, so that people and tools can read it."""
    return _BEFORE_DIGEST + hashlib.sha256(body).hexdigest().encode() + _BEFORE_BODY + body + _AFTER_BODY


def verified_body(data: bytes, where: str, *, fix: str = "") -> bytes:
    """The body of what `with_checksum` made. Raises IntegrityError, with `where` and `fix`, if any byte differs."""
    body = data[_BODY_START : -len(_AFTER_BODY)]
    if data != with_checksum(body):
        raise IntegrityError(f"{where} was altered", "its own SHA-256 does not match", fix)
    return body


@contextmanager
def _expected(store: Store, file: ChecksummedFile, folder: str, fix: str) -> Iterator[str]:
    """The path of a checksummed file below the store's root; its absence is an IntegrityError."""
    check_relative_path(file.path)
    path = f"{folder}/{file.path}" if folder else file.path
    try:
        yield path
    except FileNotFoundError:
        raise IntegrityError(
            f"{join_uri(store.uri, path)} is missing",
            f"expected {file.size_bytes} bytes, SHA-256 {file.sha256}",
            fix,
        ) from None


def _compare(store: Store, found: ChecksummedFile, file: ChecksummedFile, path: str, fix: str) -> None:
    """Raise IntegrityError unless the read bytes match the record."""
    if found == file:
        return
    where = join_uri(store.uri, path)
    if found.size_bytes != file.size_bytes:
        # Reading stopped one byte behind the expected end; the whole size is only for the message.
        stored = store.stat(path)
        size_bytes = found.size_bytes if stored is None else stored.size_bytes
        raise IntegrityError(f"{where} was altered: it has {size_bytes} bytes", f"expected {file.size_bytes}", fix)
    raise IntegrityError(f"{where} was altered: SHA-256 {found.sha256}", f"expected {file.sha256}", fix)


def require(holds: bool, problem: str) -> None:
    """Raise IntegrityError with `problem` unless the rule holds."""
    if not holds:
        raise IntegrityError(problem)
