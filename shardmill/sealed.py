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
_BLOCK_BYTES = 8_000_000


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A file as its record vouches for it."""

    path: str
    size_bytes: int
    sha256: str


def seal_file(path: str, data: bytes) -> SealedFile:
    """What vouches for `data` at `path`."""
    return SealedFile(path, len(data), hashlib.sha256(data).hexdigest())


def read_sealed(store: Store, file: SealedFile, folder: str = "", *, fix: str = "") -> bytes:
    """The bytes of a sealed file, its path relative to `folder`.

    Raises IntegrityError, with `fix` as its advice, if it is missing or altered; SecurityRefusal if its path leaves
    `folder`. A file of another size is refused before it is read.
    """
    path = _checked_size(store, file, folder, fix)
    data = store.read(path)
    _compare(seal_file(file.path, data), file, join_uri(store.uri, path), fix)
    return data


def check_sealed(store: Store, file: SealedFile, folder: str = "", *, fix: str = "") -> None:
    """Read a sealed file for its digest alone, in bounded memory. Raises as `read_sealed` does."""
    path = _checked_size(store, file, folder, fix)
    digest = hashlib.sha256()
    for start in range(0, file.size_bytes, _BLOCK_BYTES):
        digest.update(store.read_range(path, start, min(_BLOCK_BYTES, file.size_bytes - start)))
    _compare(SealedFile(file.path, file.size_bytes, digest.hexdigest()), file, join_uri(store.uri, path), fix)


def seal(body: bytes) -> bytes:
    """An envelope around `body`, which is one JSON value: itself JSON, so that people and tools can read it."""
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + _NECK + body + _TAIL


def unseal(data: bytes, where: str) -> bytes:
    """The body of the envelope that `seal` made. Raises IntegrityError, naming `where`, if any byte differs."""
    body = data[_BODY_START : -len(_TAIL)]
    if data != seal(body):
        raise IntegrityError(f"{where} was altered", "its own SHA-256 does not match")
    return body


def _checked_size(store: Store, file: SealedFile, folder: str, fix: str) -> str:
    """The path of a sealed file below the store's root, after a look at its size."""
    check_relative_path(file.path)
    path = f"{folder}/{file.path}" if folder else file.path
    found = store.stat(path)
    where = join_uri(store.uri, path)
    if found is None:
        raise IntegrityError(f"{where} is missing", f"expected {file.size_bytes} bytes, SHA-256 {file.sha256}", fix)
    if found.size_bytes != file.size_bytes:
        raise IntegrityError(
            f"{where} was altered: it has {found.size_bytes} bytes", f"expected {file.size_bytes}", fix
        )
    return path


def _compare(found: SealedFile, file: SealedFile, where: str, fix: str) -> None:
    if found != file:
        raise IntegrityError(
            f"{where} was altered: {found.size_bytes} bytes, SHA-256 {found.sha256}",
            f"expected {file.size_bytes} bytes, SHA-256 {file.sha256}",
            fix,
        )
