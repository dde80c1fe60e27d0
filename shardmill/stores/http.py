"""A read-only store on a web server: a file is a GET by its name, and there is no list of names."""

from __future__ import annotations

import email.utils
import errno
import functools
import math
import os
import time
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from shardmill.errors import CannotList, UsageError
from shardmill.storage import StoredFile
from shardmill.storage_errors import as_storage_error
from shardmill.stores.read_only import ReadOnlyStore
from shardmill.stores.retries import CONNECT_SECONDS, FirstAnswer, patiently, stall_seconds

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from urllib3 import PoolManager
    from urllib3.response import BaseHTTPResponse

DEADLINE_SECONDS = 120.0
"""Time limit of a request including all retries."""
PIECE_BYTES = 1 << 24
"""Maximum transfer of one request, so that a slow line needs no other deadline than a fast one."""
_BLOCK_BYTES = 1 << 16
_MAX_CONNECTIONS = 32
# In an address as people write it; what else there is, spaces and other scripts, is escaped.
_KEPT_CHARACTERS = "/%:@!$&'()*+,;=~-._"
_FIX = "check the address, its server and the way to it (proxies of the environment are not used); then run it again"
_PERMANENT = (HTTPStatus.NOT_IMPLEMENTED, HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
Value = TypeVar("Value")


class HttpStore(ReadOnlyStore):
    """`http://host/folder` or `https://...`: names below it are escaped as they are, `#` and `?` included.

    Raises UsageError for an address with a user, a query or a fragment.
    """

    deadline_seconds = DEADLINE_SECONDS + stall_seconds(DEADLINE_SECONDS)

    def __init__(self, uri: str) -> None:
        parts = urllib.parse.urlsplit(uri)
        plain = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
        if not parts.hostname or "@" in parts.netloc or "?" in uri or "#" in uri:
            raise UsageError(
                f"no store at {plain}",
                "expected scheme://host/folder, without user, password, query or fragment: it is written into records",
                "serve the folder without; for single URLs of any kind, source.kind = 'table'",
            )
        self.uri = uri.rstrip("/")
        self.local_root: Path | None = None
        self._root = urllib.parse.quote(self.uri, _KEPT_CHARACTERS)
        self._knows_ranges = False

    def read(self, path: str) -> bytes:
        return self._get(path, 0, None)

    def read_range(self, path: str, start: int, num_bytes: int) -> bytes:
        return self._get(path, start, num_bytes) if num_bytes else b""

    def stat(self, path: str) -> StoredFile | None:
        try:
            with as_storage_error(f"{self.uri}/{path}", fix=_FIX):
                return self._patiently(partial(_head, self._url(path), path))
        except FileNotFoundError:
            return None

    def list(self, prefix: str) -> Iterator[StoredFile]:
        uri = f"{self.uri}/{prefix}".rstrip("/")
        what = uri if self.stat(prefix) else f"there is no {uri} (HTTP 404), and it"
        raise CannotList(
            f"{what} cannot be listed: a web server can only be asked for files by name",
            "expected a committed dataset, one container file or a pattern without *, or a table that names each image",
            "copy the folder to a local path, a bucket or hdfs://; or name its images with source.kind = 'table'",
        )

    def _patiently(self, request: Callable[[float], Value]) -> Value:
        first_answer = first_answer_of(os.getpid(), urllib.parse.urlsplit(self.uri).netloc)

        def is_worth_another(error: BaseException | None, seconds: float) -> bool:
            if isinstance(error, _NotSent):
                return first_answer.is_awaited(seconds)
            first_answer.has_come = True
            return isinstance(error, _Transient)

        return patiently(request, is_worth_another, DEADLINE_SECONDS)

    def _url(self, path: str) -> str:
        if {".", ".."} & set(path.split("/")):
            raise FileNotFoundError(errno.ENOENT, "not a file name: it leads to another folder")
        return f"{self._root}/{urllib.parse.quote(path, '/')}"

    def _get(self, path: str, start: int, num_bytes: int | None) -> bytes:
        url, end = self._url(path), math.inf if num_bytes is None else start + num_bytes
        pieces: list[_Piece] = []
        with as_storage_error(f"{self.uri}/{path}", fix=_FIX):
            while not pieces or not (pieces[-1].is_last or start == end):
                pieces.append(self._patiently(partial(self._get_piece, url, start, end)))
                if pieces[-1].version != pieces[0].version:
                    raise OSError(errno.EIO, "it was replaced while it was read")
                start += len(pieces[-1].data)
        return b"".join(piece.data for piece in pieces)[:num_bytes]

    def _get_piece(self, url: str, start: int, end: float, deadline: float) -> _Piece:
        """Get the bytes from `start` to `end`, but at most one piece; from a server without ranges, all up to `end`."""
        stop = int(min(end, start + PIECE_BYTES))
        most: dict[int, float] = {HTTPStatus.PARTIAL_CONTENT: stop - start, HTTPStatus.OK: end}
        response, body = _ask("GET", url, most, deadline, Range=f"bytes={start}-{stop - 1}")
        version = response.headers.get("ETag") or response.headers.get("Last-Modified", "")
        if response.status == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _Piece(b"", version, is_last=True)
        if response.status == HTTPStatus.PARTIAL_CONTENT:
            self._knows_ranges = True
            unit, _, total = response.headers.get("Content-Range", "").partition("/")
            if not unit.startswith(f"bytes {start}-") or not total.isdigit():
                raise OSError(errno.EIO, f"its server answers bytes {start}-{stop - 1} with {unit or 'no range'}")
            if len(body) != min(stop, int(total)) - start:
                raise _Transient(errno.EIO, f"received {len(body)} bytes of bytes {start}-{stop - 1} of {total}")
            return _Piece(body, version, is_last=start + len(body) == int(total))
        if self._knows_ranges:
            raise _Transient(errno.EIO, "the server sent a whole file for a range request")
        if start:
            raise OSError(errno.EIO, "its server does not support range requests: it sends the whole file each time")
        return _Piece(body, version, is_last=True)


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes of a file that one GET returned."""

    data: bytes
    version: str
    is_last: bool


class _Transient(OSError):
    """A failure that may pass."""


class _NotSent(_Transient):
    """Nobody took the connection."""


def _head(url: str, path: str, deadline: float) -> StoredFile:
    response, _ = _ask("HEAD", url, {}, deadline)
    size = response.headers.get("Content-Length", "")
    if not size.isdigit():
        raise OSError(errno.EIO, "its server does not report its size")
    changed = email.utils.parsedate_tz(response.headers.get("Last-Modified", ""))
    mtime_ns = email.utils.mktime_tz(changed) * 1_000_000_000 if changed else 0
    return StoredFile(path, int(size), mtime_ns, response.headers.get("ETag", "").strip('"'))


def _ask(
    method: str, url: str, most: Mapping[int, float], deadline: float, **headers: str
) -> tuple[BaseHTTPResponse, bytes]:
    """One request: the answer, and of its body little more than `most` bytes, by its status.

    Raises FileNotFoundError, PermissionError, _Transient, and OSError for any other answer without data.
    """
    import urllib3
    from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError

    # The last request has this time, too: its answer tells the cause.
    patience = stall_seconds(DEADLINE_SECONDS)
    wait = urllib3.Timeout(connect=min(CONNECT_SECONDS, patience), read=patience)
    try:
        # No redirects: an address that was given does not lead to another host unseen.
        response = connections(os.getpid()).request(
            method, url, headers={"Accept-Encoding": "identity", **headers}, redirect=False, retries=False,
            preload_content=False, timeout=wait,
        )  # fmt: skip
        try:
            _check_status(response)
            body, max_bytes = bytearray(), most.get(response.status, 0)
            while len(body) <= max_bytes and (block := response.read1(_BLOCK_BYTES)):
                body += block
                if time.monotonic() > deadline and response.length_remaining != 0:
                    raise _Transient(errno.EIO, f"it took longer than {DEADLINE_SECONDS:g} s")
            if len(body) <= max_bytes:
                response.release_conn()
        finally:
            # What was not read to its end cannot carry another request.
            response.close()
        return response, bytes(body)
    except (ConnectTimeoutError, NewConnectionError) as error:
        raise _NotSent(errno.EIO, str(error)) from error
    except HTTPError as error:
        raise _Transient(errno.EIO, str(error)) from error


def _check_status(response: BaseHTTPResponse) -> None:
    status = response.status
    if status in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        raise FileNotFoundError(errno.ENOENT, f"HTTP {status}")
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        raise PermissionError(errno.EACCES, f"HTTP {status}")
    if status == HTTPStatus.TOO_MANY_REQUESTS or (status >= 500 and status not in _PERMANENT):
        raise _Transient(errno.EIO, f"HTTP {status}")
    if 300 <= status < 400:
        host = urllib.parse.urlsplit(response.headers.get("Location", "")).hostname
        raise OSError(errno.EIO, f"HTTP {status}: it leads to {host or 'another place'}; name that")
    if status >= 400 and status != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
        raise OSError(errno.EIO, f"HTTP {status}")


@functools.cache
def first_answer_of(pid: int, server: str) -> FirstAnswer:
    """Of a server to one process."""
    return FirstAnswer()


@functools.cache
def connections(pid: int) -> PoolManager:
    """Connections of one process: a connection cannot be shared with a fork."""
    import urllib3

    return urllib3.PoolManager(maxsize=_MAX_CONNECTIONS)
