"""Reads the images that a table names: below its folder, by absolute URIs, or from the web.

Downloads are bounded in time, size and number, honour opt-outs, and never come from a private network.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from etl.sources.containers import Containers
from shardmill.errors import AccessDenied, UsageError
from shardmill.storage import Store
from shardmill.storage_errors import as_storage_error
from shardmill.stores import ANY_OTHER, STORES, open_store, scheme_of
from shardmill.values import OTHER_SIZE, UNKNOWN_SIZE, Rejection, RejectReason, SourceImage
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.config import DownloadConfig


HTTP_SCHEMES = ("http", "https")
_AGENT = "shardmill"
_OPT_OUTS = frozenset({"noai", "noimageai", "noindex", "noimageindex"})
_REDIRECTS, _MAX_REDIRECTS = frozenset({301, 302, 303, 307, 308}), 5
_BLOCK_BYTES = 1 << 16
# In a URL as people write it; what else there is, spaces and other scripts, is escaped.
_KEPT_CHARACTERS = "/%:@!$&'()*+,;=~-._"
_MAX_WAIT_SECONDS = 10.0
_NUM_LOOKED_UP = 8
_OF_WINDOWS = r"^(file:/*)?[A-Za-z]:[\\/]|^\\\\"


class PathStyle:
    """The path style of one table; some of its files are looked up if names alone are ambiguous."""

    def __init__(self, store: Store, table: str, *, looks_beside: bool = False) -> None:
        """`looks_beside`: whether a table in a folder is checked to name files from there."""
        self._store, self._table = store, table
        self._looks_beside = looks_beside and "/" in table
        self._are_backslashes_names: bool | None = None
        self._are_paths = False

    def as_paths(self, uris: pa.Array) -> pa.Array:
        """`a/b.jpg` for `a\\b.jpg`, unless files are really named so. Raises UsageError if they are ids of files."""
        has_backslash = pc.and_(pc.match_substring(uris, "\\"), pc.invert(pc.match_substring_regex(uris, _OF_WINDOWS)))
        if pc.any(has_backslash).as_py():
            if self._are_backslashes_names is None:
                self._are_backslashes_names = self._is_any_there(uris.filter(has_backslash))
            if not self._are_backslashes_names:
                uris = pc.if_else(has_backslash, pc.replace_substring(uris, "\\", "/"), uris)
        if not self._are_paths:
            self._check_are_paths(uris)
        if self._looks_beside:
            self._looks_beside = False
            self._check_lie_beside(uris)
        return uris

    def _check_are_paths(self, uris: pa.Array) -> None:
        is_id = pc.invert(pc.match_substring_regex(uris, r"://|^/|\.[^/]*$"))
        self._are_paths = not pc.all(is_id).as_py() or self._is_any_there(uris)
        if not self._are_paths and pc.any(is_id).as_py():
            raise UsageError(
                f"the table {printable(self._table)} names files as {printable(uris.drop_null()[0].as_py())!r}, which "
                "has no suffix, and no such files exist",
                "expected paths of files, relative to the table's folder, with their suffixes",
                "write a column of paths, such as images/ID.jpg, or name it with source.uri_field",
            )

    def _check_lie_beside(self, uris: pa.Array) -> None:
        # Missing files would be reported one by one when they are read; paths for another folder are reported at once.
        relative = without_dots(uris.filter(_are_relative(uris)))
        if self._is_any_there(relative) or not self._is_any_there(relative, table=""):
            return
        path, root = printable(relative[0].as_py()), self._store.uri
        raise UsageError(
            f"the table {printable(self._table)} names files as {path!r}, which is relative to {root}",
            "expected paths of files, relative to the table's folder",
            f"write {'../' * self._table.count('/')}{path}, or move the table to {root}",
        )

    def _is_any_there(self, uris: pa.Array, table: str | None = None) -> bool:
        """Of a few that are spread over the column, beside `table`; None for this one."""
        few = uris.drop_null()[:: max(1, len(uris) // _NUM_LOOKED_UP)]
        paths = beside(few, self._table if table is None else table).to_pylist()
        return any(self._store.stat(path) is not None for path in paths)


def names_drive(uris: pa.Array) -> pa.Array:
    """A mask of paths that only Windows knows: `C:\\a.jpg`, or those of a share, `\\\\host\\a.jpg`."""
    return pc.fill_null(pc.match_substring_regex(uris, _OF_WINDOWS), False)


def without_dots(uris: pa.Array) -> pa.Array:
    """`a.jpg` for `./a.jpg`: one file has one key."""
    if not pc.any(pc.starts_with(uris, "./")).as_py():
        return uris
    return pc.replace_substring_regex(uris, r"^(\./)+", "")


def beside(uris: pa.Array, table: str) -> pa.Array:
    """Paths below the source's root for paths below the table's folder; absolute URIs stay as they are.

    A file that two tables name has one key: `a/t.csv` climbs out of its folder with `../`.
    """
    folder = table.rpartition("/")[0]
    if not folder:
        return uris
    is_relative = _are_relative(uris)
    climbs = pc.and_(is_relative, pc.match_substring_regex(uris, r"^\.\./"))
    found = pc.if_else(is_relative, pc.binary_join_element_wise(folder, uris, "/"), uris)
    if not pc.any(climbs).as_py():
        return found
    climbed = [_climbed(folder, uri) for uri in uris.filter(climbs).to_pylist()]
    return pc.replace_with_mask(found, pc.fill_null(climbs, False), pa.array(climbed, pa.string()))


def _are_relative(uris: pa.Array) -> pa.Array:
    return pc.invert(pc.match_substring_regex(uris, "^/|://"))


def _climbed(folder: str, uri: str) -> str:
    while folder and uri.startswith("../"):
        folder, uri = folder.rpartition("/")[0], uri.removeprefix("../")
    return f"{folder}/{uri}" if folder else uri


_MAX_URI_BYTES = 8_192
_NOT_OF_ROWS = (*HTTP_SCHEMES, ANY_OTHER)


class UriReader:
    """Reads whole files, of which nothing is known before but their URI; relative ones from the source's root."""

    def __init__(self, tables: Containers, max_source_bytes: int, download: DownloadConfig) -> None:
        self.num_parallel = download.num_parallel
        self._tables = tables
        self._root = tables.store
        self._downloader = Downloader(download, max_source_bytes)
        self._max_source_bytes = max_source_bytes
        self._stores: dict[str, Store] = {}

    def read(self, image: SourceImage) -> bytes | Rejection:
        """The file's bytes. Raises FileNotFoundError, AccessDenied, StorageError; never holds more than the limit."""
        uri = image.container or image.key
        data = self._downloader.fetch(uri) if is_on_the_web(uri) else self._read(uri)
        if isinstance(data, NotDownloaded):
            return image.rejected(data.reason, data.detail)
        if len(data) > self._max_source_bytes:
            detail = f"more than {self._max_source_bytes} bytes, which is etl.max_source_bytes"
            return image.rejected(RejectReason.TOO_LARGE_BYTES, detail)
        if image.size_bytes not in (UNKNOWN_SIZE, len(data)):
            detail = f"{OTHER_SIZE} is {image.size_bytes}, and the file has {len(data)} bytes"
            return image.rejected(RejectReason.SOURCE_CHANGED, detail)
        return data

    def expect(self, image: SourceImage) -> None:
        """Does nothing: several images are read at once."""

    def is_there(self, path: str) -> bool:
        """Whether this host sees the file, or at least the place of it.

        One URL that does not answer says nothing about this host; and where a table is, it may name what is not there.
        """
        if is_on_the_web(path):
            return True
        store, path = self._locate(path)
        return store.stat(path) is not None or (store is self._root and self._tables.are_there())

    def _read(self, uri: str) -> bytes:
        """At most one byte more than the limit, whatever the file's size."""
        store, path = self._locate(uri)
        if store.local_root is None:
            return store.read_range(path, 0, self._max_source_bytes + 1)
        file = store.local_root / path
        with as_storage_error(file, denied=AccessDenied), open(file, "rb") as stream:
            return stream.read(self._max_source_bytes + 1)

    def _locate(self, uri: str) -> tuple[Store, str]:
        """The store of a URI and the path in it; one store for each bucket."""
        scheme, separator, rest = uri.partition("://")
        if not separator:
            if not os.path.isabs(uri):
                return self._root, uri
            scheme, rest = "file", uri
        top, _, path = rest.partition("/")
        root = f"{scheme}://{top}/"
        if root not in self._stores:
            self._stores[root] = open_store(root)
        return self._stores[root], path


def uri_problems(uris: pa.Array, store: Store) -> pa.Array:
    """Describe the problem of each URI of a table in `store`, as text; null if there is none."""
    schemes = pa.nulls(len(uris), pa.string())
    if pc.any(pc.match_substring(uris, "://")).as_py():
        schemes = pc.struct_field(pc.extract_regex(uris, r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://"), "scheme")
    unknown = [
        name
        for name in pc.unique(schemes).to_pylist()
        # Of fsspec's schemes some name files of this machine, or hosts behind its firewall: not for a table to choose.
        if name not in (None, *HTTP_SCHEMES) and not _may_be_named(name)
    ]
    named = (*filter(_may_be_named, STORES), *HTTP_SCHEMES)
    names_local_file = pc.or_kleene(pc.starts_with(uris, "/"), pc.equal(schemes, "file"))
    # A table that was fetched from elsewhere does not choose among the files of this machine.
    is_forbidden = pc.and_(pc.fill_null(names_local_file, False), store.local_root is None)
    return pc.case_when(
        pc.make_struct(
            uris.is_null(),
            pc.fill_null(pc.greater(pc.binary_length(uris), _MAX_URI_BYTES), False),
            names_drive(uris),
            pc.is_in(schemes, pa.array(unknown, pa.string())),
            is_forbidden,
        ),
        "no URI",
        f"a URI of more than {_MAX_URI_BYTES} bytes",
        "a path with a drive or a share of Windows; expected one relative to the table's folder",
        f"this URI scheme is not supported; expected one of {', '.join(named)}",
        f"a table in {store.uri} cannot name a local file",
    )


def _may_be_named(scheme: str) -> bool:
    """Whether rows may name files of this scheme in a store."""
    entry = scheme_of(f"{scheme}://")
    return entry in STORES and entry not in _NOT_OF_ROWS


def is_on_the_web(uri: str) -> bool:
    """Whether it is fetched, from any server."""
    return uri.partition("://")[0] in HTTP_SCHEMES


@dataclass(frozen=True, slots=True)
class NotDownloaded:
    """Why a URL gave no bytes."""

    reason: RejectReason
    detail: str


class _TryAgain(Exception):
    """A failure that may pass; `wait_seconds` is what the server asks for."""

    def __init__(self, detail: str, wait_seconds: float = 0.0) -> None:
        super().__init__(detail)
        self.wait_seconds = wait_seconds


class Downloader:
    """Fetches URLs; several threads may share one."""

    def __init__(self, config: DownloadConfig, max_bytes: int) -> None:
        self._config = config
        self._max_bytes = max_bytes
        self._networks = [ipaddress.ip_network(each) for each in config.allow_networks]
        self._lock = threading.Lock()
        self._hosts: dict[str, threading.Semaphore] = defaultdict(
            lambda: threading.Semaphore(config.num_parallel_per_host)
        )

    def fetch(self, url: str) -> bytes | NotDownloaded:
        """The body, at most one byte more than the limit; after all retries, why there is none."""
        wait_seconds = 0.5
        for last in (*[False] * self._config.num_retries, True):
            try:
                return self._follow(url)
            except (_TryAgain, OSError, http.client.HTTPException) as error:
                if last:
                    return NotDownloaded(RejectReason.MISSING, f"{type(error).__name__}: {error}".lstrip("_"))
                asked = error.wait_seconds if isinstance(error, _TryAgain) else 0.0
                time.sleep(min(max(wait_seconds, asked), _MAX_WAIT_SECONDS))
                wait_seconds *= 2
        raise AssertionError("unreachable")

    def _follow(self, url: str) -> bytes | NotDownloaded:
        """One try, with its redirects."""
        deadline = time.monotonic() + self._config.timeout_seconds
        base = ""
        for _ in range(_MAX_REDIRECTS + 1):
            found = _split(url, base)
            if found is None:
                return NotDownloaded(RejectReason.MISSING, f"leads to {printable(url)[:200]}, which is not on the web")
            parts, host = found
            with self._lock:
                slot = self._hosts[host]
            with slot:
                answer = self._ask(parts, deadline)
            if not isinstance(answer, str):
                return answer
            base, url = parts.geturl(), answer
        return NotDownloaded(RejectReason.MISSING, f"more than {_MAX_REDIRECTS} redirects")

    def _ask(self, parts: urllib.parse.SplitResult, deadline: float) -> bytes | NotDownloaded | str:
        """One request: the body, why there is none, or where it redirects."""
        left_seconds = deadline - time.monotonic()
        if left_seconds <= 0:
            raise _TryAgain(f"took longer than {self._config.timeout_seconds} s")
        connected = self._connect(parts, left_seconds)
        if isinstance(connected, NotDownloaded):
            return connected
        # A socket's own timeout begins anew with every byte that a slow server sends.
        watchdog = threading.Timer(left_seconds, _hang_up, [connected])
        watchdog.daemon = True
        watchdog.start()
        try:
            return self._exchange(parts, connected)
        finally:
            watchdog.cancel()
            connected.close()

    def _connect(self, parts: urllib.parse.SplitResult, timeout_seconds: float) -> socket.socket | NotDownloaded:
        """A connection to an address that was looked at: a name may resolve to a machine behind our firewall."""
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        found = [str(each[4][0]) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
        if not all(map(self.may_ask, found)):
            return NotDownloaded(RejectReason.BAD_ROW, f"{printable(host)} is an address of a private network")
        connection = socket.create_connection((found[0], port), timeout_seconds)
        if parts.scheme == "http":
            return connection
        try:
            return ssl.create_default_context().wrap_socket(connection, server_hostname=host)
        except BaseException:
            connection.close()
            raise

    def may_ask(self, address: str) -> bool:
        """Whether the address is public, or one that the config allows."""
        found = ipaddress.ip_address(address.partition("%")[0])
        # ::ffff:127.0.0.1 is this machine.
        found = getattr(found, "ipv4_mapped", None) or found
        is_allowed = self._config.allow_private_addresses or any(found in network for network in self._networks)
        return is_allowed or (found.is_global and not found.is_multicast)

    def _exchange(self, parts: urllib.parse.SplitResult, connected: socket.socket) -> bytes | NotDownloaded | str:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        connection.sock = connected
        target = urllib.parse.quote(parts.path or "/", _KEPT_CHARACTERS)
        query = urllib.parse.quote(parts.query, _KEPT_CHARACTERS + "?")
        headers = {"Host": parts.netloc.rpartition("@")[2], "User-Agent": _AGENT, "Accept-Encoding": "identity"}
        connection.request("GET", f"{target}?{query}" if query else target, headers=headers)
        response = connection.getresponse()
        location = response.headers.get("Location")
        if response.status in _REDIRECTS and location:
            return location
        if response.status == 429 or response.status >= 500:
            asked = response.headers.get("Retry-After", "")
            raise _TryAgain(f"HTTP {response.status}", float(asked) if asked.isdigit() else 0.0)
        if response.status != 200:
            return NotDownloaded(RejectReason.MISSING, f"HTTP {response.status}")
        opt_out = opt_out_of(response.headers.get_all("X-Robots-Tag") or [])
        if opt_out:
            return NotDownloaded(RejectReason.OPTED_OUT, f"X-Robots-Tag: {opt_out}")
        return self._body(response)

    def _body(self, response: http.client.HTTPResponse) -> bytes:
        data = bytearray()
        while len(data) <= self._max_bytes and (block := response.read(_BLOCK_BYTES)):
            data += block
        stated = response.headers.get("Content-Length", "")
        if len(data) <= self._max_bytes and stated.isdigit() and len(data) < int(stated):
            raise _TryAgain(f"ended after {len(data)} of {stated} bytes")
        return bytes(data[: self._max_bytes + 1])


def _split(url: str, base: str) -> tuple[urllib.parse.SplitResult, str] | None:
    """Its parts, and of these the host; None for what is no URL of the web.

    That is another scheme, a port that is not a number, or an invalid host name.
    """
    try:
        parts = urllib.parse.urlsplit(urllib.parse.urljoin(base, url))
        host, _ = parts.hostname or "", parts.port
        host.encode("idna")
    except ValueError:
        return None
    return (parts, host) if parts.scheme in HTTP_SCHEMES and host else None


def opt_out_of(values: list[str]) -> str:
    """The directive of `X-Robots-Tag` headers that forbids us to use the image, or nothing.

    `noai, noimageai` speaks to everyone, `otherbot: noai` to another.
    """
    for value in values:
        agent, colon, rest = value.partition(":")
        is_addressed = bool(colon) and "," not in agent and agent.strip().lower() != "unavailable_after"
        if is_addressed and agent.strip().lower() != _AGENT:
            continue
        for directive in (rest if is_addressed else value).split(","):
            if directive.strip().lower() in _OPT_OUTS:
                return directive.strip().lower()
    return ""


def _hang_up(connected: socket.socket) -> None:
    try:
        connected.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it has ended by itself
