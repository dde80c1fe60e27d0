"""Files that we vouch for: their size and SHA-256 are known before they are read, or stand inside them.

Two kinds. A `SealedFile` is named by another record (a checkpoint's marker, an export's record), which holds its size
and digest. An envelope is a record that nothing else names: one line of JSON that carries the SHA-256 of its own body.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from shardmill.errors import IntegrityError
from shardmill.storage import Store, check_relative_path, join_uri

_HEAD, _NECK, _TAIL = b'{"sha256":"', b'","body":', b"}\n"
_BODY_START = len(_HEAD) + 64 + len(_NECK)


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file as its record vouches for it."""

    path: str
    size_bytes: int
    sha256: str


def seal_file(path: str, data: bytes) -> SealedFile:
    """What vouches for `data` at `path`."""
    return SealedFile(path, len(data), hashlib.sha256(data).hexdigest())


def read_sealed(store: Store, file: SealedFile, folder: str = "") -> bytes:
    """The bytes of a sealed file, its path relative to `folder`.

    Raises IntegrityError if it is missing or altered, SecurityRefusal if its path leaves `folder`.
    """
    check_relative_path(file.path)
    path = f"{folder}/{file.path}" if folder else file.path
    try:
        data = store.read(path)
    except FileNotFoundError:
        raise IntegrityError(
            f"{join_uri(store.uri, path)} is missing", f"expected {file.size_bytes} bytes, SHA-256 {file.sha256}"
        ) from None
    found = seal_file(file.path, data)
    if found != file:
        raise IntegrityError(
            f"{join_uri(store.uri, path)} was altered: {found.size_bytes} bytes, SHA-256 {found.sha256}",
            f"expected {file.size_bytes} bytes, SHA-256 {file.sha256}",
        )
    return data


def seal(body: bytes) -> bytes:
    """An envelope around `body`, which is one JSON value: itself JSON, so that people and tools can read it."""
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + _NECK + body + _TAIL


def unseal(data: bytes, where: str) -> bytes:
    """The body of the envelope that `seal` made. Raises IntegrityError, naming `where`, if any byte differs."""
    body = data[_BODY_START : -len(_TAIL)]
    if data != seal(body):
        raise IntegrityError(f"{where} was altered", "its own SHA-256 does not match")
    return body
