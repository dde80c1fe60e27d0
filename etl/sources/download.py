"""Downloads images from the web: bounded in time, size and number, honouring opt-outs, never from a private network."""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
import threading
import time
import urllib.parse
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.values import RejectReason
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.download_config import DownloadConfig

HTTP_SCHEMES = ("http", "https")
_AGENT = "shardmill"
_OPT_OUTS = frozenset({"noai", "noimageai", "noindex", "noimageindex"})
_REDIRECTS, _MAX_REDIRECTS = frozenset({301, 302, 303, 307, 308}), 5
_BLOCK_BYTES = 1 << 16
# In a URL as people write it; what else there is, spaces and other scripts, is escaped.
_KEPT_CHARACTERS = "/%:@!$&'()*+,;=~-._"
_MAX_WAIT_SECONDS = 10.0


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
            with self._slot(host):
                answer = self._ask(parts, deadline)
            if not isinstance(answer, str):
                return answer
            base, url = parts.geturl(), answer
        return NotDownloaded(RejectReason.MISSING, f"more than {_MAX_REDIRECTS} redirects")

    def _slot(self, host: str) -> threading.Semaphore:
        with self._lock:
            return self._hosts[host]

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
