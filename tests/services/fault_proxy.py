"""An HTTP proxy before an object store, in threads of the test: it passes on all that the test does not spoil."""

from __future__ import annotations

import http.client
import random
import socket
import struct
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import ModuleType
from typing import Any

import pytest

from shardmill.errors import StorageError
from shardmill.storage import Store
from shardmill.stores import bucket_requests

_OF_ONE_CONNECTION = {"connection", "transfer-encoding", "expect", "keep-alive"}


class Fault(StrEnum):
    """What becomes of one request."""

    INTERNAL_ERROR = auto()
    """500, and it was not done."""
    SLOW_DOWN = auto()
    """503, and it was not done."""
    TOO_MANY = auto()
    """429, and it was not done."""
    ERROR_IN_200 = auto()
    """A 200 whose body is an error, as the end of an upload in parts may be answered; it was not done."""
    CONFLICT = auto()
    """409 as of two conditional PUTs at once, and it was not done."""
    FORBIDDEN = auto()
    """403, and it was not done."""
    EXPIRED = auto()
    """400, as Amazon's servers answer a token that has expired; it was not done."""
    BARE_412 = auto()
    """Done, but a refused condition comes without a word in the body."""
    DROPPED = auto()
    """It was done, and its answer never comes."""
    RESET = auto()
    """It was done; the connection is reset in the middle of the answer's body."""
    CUT = auto()
    """It was done; the connection is closed in the middle of the answer's body."""
    SHORT = auto()
    """It was done; half of the body is sent, under a 200 and a Content-Length that say no more."""
    STALLED = auto()
    """It was not done, and nothing comes."""
    DELAYED = auto()
    """It is done 200 ms later."""
    SLOW = auto()
    """It was done; the body of its answer comes at `SLOW_BYTES_PER_SECOND`."""


DELAY_SECONDS = 0.2
SLOW_BYTES_PER_SECOND = 1e6
_SLOW_BLOCK_BYTES = 20_000
_ANSWERS = {
    Fault.INTERNAL_ERROR: (500, "InternalError"),
    Fault.SLOW_DOWN: (503, "SlowDown"),
    Fault.TOO_MANY: (429, "TooManyRequests"),
    Fault.ERROR_IN_200: (200, "InternalError"),
    Fault.CONFLICT: (409, "ConditionalRequestConflict"),
    Fault.FORBIDDEN: (403, "AccessDenied"),
    Fault.EXPIRED: (400, "ExpiredToken"),
}
Choice = Callable[[str, str], Fault | None]
Answer = tuple[int, list[tuple[str, str]], bytes]
"""Status, headers, body."""


@dataclass(slots=True)
class FaultProxy:
    """A running proxy. `choose(method, path)` says what becomes of each request; paths are unquoted, with the query."""

    upstream: str
    endpoint: str = ""
    choose: Choice = lambda method, path: None
    withheld: frozenset[str] = frozenset()
    """Headers, in lower case, that the server never sees."""
    told: Counter[Fault | None] = field(default_factory=Counter)
    """How many requests each fault has spoiled; under None, those that passed."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    ended: threading.Event = field(default_factory=threading.Event)

    def decide(self, method: str, path: str) -> Fault | None:
        # One request after the other: a choice may count.
        with self.lock:
            fault = self.choose(method, path)
            self.told[fault] += 1
            return fault


@contextmanager
def proxying(upstream: str, port: int = 0, handler: type[PassOn] | None = None) -> Iterator[FaultProxy]:
    """A proxy before the endpoint `upstream`, at a free port unless one is given."""
    proxy = FaultProxy(upstream)
    served: Any = type("Handler", (handler or PassOn,), {"proxy": proxy})
    server = ThreadingHTTPServer(("127.0.0.1", port), served)
    server.daemon_threads = True
    proxy.endpoint = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield proxy
    finally:
        proxy.ended.set()
        server.shutdown()
        server.server_close()


def in_turn(*faults: Fault | None, method: str = "", path: str = "") -> Choice:
    """The first requests of a method, with `path` in theirs, get these faults; all others pass."""
    left = list(faults)

    def choose(asked: str, where: str) -> Fault | None:
        is_meant = method in ("", asked) and path in where
        return left.pop(0) if left and is_meant else None

    return choose


def at_random(rate: float, *faults: Fault, seed: int) -> Choice:
    """Every request gets one of these faults with this probability."""
    chance = random.Random(seed)
    return lambda method, path: chance.choice(faults) if chance.random() < rate else None


def at_the_deadline(request: Callable[[float], Any], *how: object) -> Any:
    """In place of `retries.patiently`: one request, whose deadline has come when it begins."""
    return request(time.monotonic())


def check_late_answers(store: Store, client: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole answer of a bucket counts however late; one that is not whole at the deadline is given up.

    `client`: the module that reads answers, in blocks.
    """
    store.put("a", b"1234")
    monkeypatch.setattr(bucket_requests, "patiently", at_the_deadline)
    assert store.read("a") == b"1234" and store.read_range("a", 1, 2) == b"23"
    store.put("a", bytes(20_000_000))
    monkeypatch.setattr(client, "_BLOCK_BYTES", 1 << 20)
    with pytest.raises(StorageError, match="bytes received.*, slowly"):
        store.read("a")


def end_patience_with(num_failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline of each call of `retries.patiently` comes with so many failures, whatever the clock says."""
    import tenacity

    monkeypatch.setattr(tenacity, "stop_before_delay", lambda seconds: tenacity.stop_after_attempt(num_failures))


def uses_of(store: Store, data: bytes) -> tuple[Callable[[], bool], ...]:
    """Requests about the object `a/b`, which holds `data`: whether each has the right answer."""
    return (
        lambda: store.put("a/b", data) or True,
        lambda: store.read("a/b") == data,
        lambda: store.read_range("a/b", 7, 5000) == data[7:5007],
        lambda: [file.size_bytes for file in store.list("a")] == [len(data)],
        lambda: store.stat("a/b").size_bytes == len(data),  # pyright: ignore[reportOptionalMemberAccess]
    )


class PassOn(BaseHTTPRequestHandler):
    """One connection of a client."""

    proxy: FaultProxy
    protocol_version = "HTTP/1.1"
    timeout = 120

    def log_message(self, format: str, *args: object) -> None:
        return

    def handle(self) -> None:
        # Of a client that has given up.
        with suppress(ConnectionError):
            super().handle()

    def _pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.proxy.decide(self.command, urllib.parse.unquote(self.path))
        if fault is not None and fault in _ANSWERS:
            status, code = _ANSWERS[fault]
            answer = f"<Error><Code>{code}</Code><Message>by the fault proxy</Message></Error>".encode()
            return self._answer(status, [("Content-Type", "application/xml")], answer, len(answer))
        if fault is Fault.STALLED:
            self.proxy.ended.wait()
            return self._hang_up(reset=True)
        if fault is Fault.DELAYED:
            time.sleep(DELAY_SECONDS)
        status, headers, data = self._ask(body)
        if fault is Fault.DROPPED:
            return self._hang_up(reset=False)
        if fault is Fault.BARE_412 and status == 412:
            data = b""
        told = len(data)
        if fault in (Fault.RESET, Fault.CUT, Fault.SHORT) and data and status < 300:
            data = data[: len(data) // 2]
        if fault is Fault.SHORT and status < 300:
            status, told = 200, len(data)
            headers = [(name, value) for name, value in headers if name.lower() != "content-range"]
        self._answer(status, headers, data, told, is_slow=fault is Fault.SLOW)
        if len(data) < told or fault in (Fault.RESET, Fault.CUT):
            self._hang_up(reset=fault is Fault.RESET)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _pass_on

    def _ask(self, body: bytes) -> Answer:
        """What the server answers. The host stays as the client named it: it has signed it."""
        upstream = http.client.HTTPConnection(self.proxy.upstream.removeprefix("http://"), timeout=60)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self._passed().items():
            upstream.putheader(name, value)
        upstream.endheaders(body)
        answer = upstream.getresponse()
        data = answer.read()
        headers = [pair for pair in answer.getheaders() if pair[0].lower() not in _OF_ONE_CONNECTION]
        if self.command != "HEAD":
            headers = [pair for pair in headers if pair[0].lower() != "content-length"]
        upstream.close()
        return answer.status, headers, data

    def _passed(self) -> dict[str, str]:
        """The request headers that are sent to the server, by lower-case name."""
        withheld = _OF_ONE_CONNECTION | self.proxy.withheld
        return {name.lower(): value for name, value in self.headers.items() if name.lower() not in withheld}

    def _answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, told_bytes: int, *, is_slow: bool = False
    ) -> None:
        self.send_response_only(status)
        for name, value in headers:
            self.send_header(name, value)
        if status != 204 and self.command != "HEAD":
            self.send_header("Content-Length", str(told_bytes))
        self.end_headers()
        if self.command != "HEAD":
            block_bytes = _SLOW_BLOCK_BYTES if is_slow else max(1, len(data))
            for start in range(0, len(data), block_bytes):
                if is_slow:
                    time.sleep(_SLOW_BLOCK_BYTES / SLOW_BYTES_PER_SECOND)
                self.wfile.write(data[start : start + block_bytes])
                self.wfile.flush()

    def _hang_up(self, *, reset: bool) -> None:
        self.close_connection = True
        if reset:
            # With no time to linger, closing sends a reset.
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            self.connection.close()
