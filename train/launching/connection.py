"""The protocol between ranks and driver: JSON lines over TCP, after both sides have proved that they know the token.

Each side answers the other's fresh nonce with HMAC-SHA256(token, role + nonce): neither the token nor anything that
could be used again, or in the other direction, is sent here. The launcher gives the token to its ranks:
`local` puts it into their environment, `horovod_spark` derives it on both sides from the key in Spark's own task.

This authenticates both sides at the start, and no more: the lines that follow are neither encrypted nor authenticated.
An attacker who can change packets between two hosts can read the task and forge reports (docs/decisions/0006).
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from train.launching.messages import Admitted, Challenge, Hello, Message, Welcome

ADDRESS_VARIABLE = "SHARDMILL_DRIVER_ADDRESS"
TOKEN_VARIABLE = "SHARDMILL_DRIVER_TOKEN"
# Anyone may connect: until a peer has proved the token, the memory and the time that it can take are bounded.
MAX_HANDSHAKE_BYTES = 4096
MAX_WELCOME_BYTES = 1 << 20
HANDSHAKE_TIMEOUT_SECONDS = 10.0
# The driver of many ranks may be busy; a rank waits no longer than this in all.
CALL_TIMEOUT_SECONDS = 60.0
RECEIVE_BYTES = 1 << 16
# A host that vanishes closes no connection: after so long the kernel's probes tell who only waits for a message.
VANISHED_SECONDS = 120
NUM_PROBES = 6


class ProtocolError(Exception):
    """The other side is not one of ours, or does not know the token."""


@functools.cache
def message_adapter() -> TypeAdapter[Message]:
    """Built on first use, because it takes a moment that not every importer of this module needs."""
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class Connection:
    """One end of a conversation. Any thread may send; one thread receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._unread = bytearray()
        self._sending = threading.Lock()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_vanished_host(peer)

    def send(self, message: Message) -> None:
        """Raises OSError if the other side is gone."""
        line = message_adapter().dump_json(message) + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def receive(self, max_bytes: int | None = None, until_seconds: float | None = None) -> Message | None:
        """The next message, or None if the other side is gone. Raises ProtocolError for anything else.

        `until_seconds`, on the monotonic clock, is when the whole message must have come: a deadline for each read
        would let an unauthenticated peer hold the connection forever by sending a byte now and then.
        """
        num_searched = 0
        while (end := self._unread.find(b"\n", num_searched)) < 0:
            num_searched = len(self._unread)
            if max_bytes is not None and num_searched > max_bytes:
                raise ProtocolError(f"a message has more than {max_bytes} bytes")
            try:
                if until_seconds is not None:
                    self.set_timeout(until_seconds)
                data = self._socket.recv(RECEIVE_BYTES)
            except TimeoutError as error:
                if error.errno == errno.ETIMEDOUT:  # the kernel's probes, and not our deadline
                    return None
                raise ProtocolError("no answer in time") from None
            except OSError:
                return None
            if not data:
                # An incomplete line is left by a process that died while it was sending.
                return None
            self._unread += data
        line = bytes(self._unread[:end])
        del self._unread[: end + 1]
        if max_bytes is not None and len(line) > max_bytes:
            raise ProtocolError(f"a message has more than {max_bytes} bytes")
        try:
            return message_adapter().validate_json(line)
        except ValidationError as error:
            raise ProtocolError(str(error)) from None

    @property
    def own_address(self) -> str:
        """Return the address of this host on the network of the other side."""
        return self._socket.getsockname()[0]

    def set_timeout(self, until_seconds: float | None) -> None:
        """Set the time until which sends and receives must finish; None removes it. Raises TimeoutError."""
        if until_seconds is None:
            self._socket.settimeout(None)
        elif (left_seconds := until_seconds - time.monotonic()) > 0:
            self._socket.settimeout(left_seconds)
        else:
            raise TimeoutError("the deadline has passed")

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


def _notice_vanished_host(peer: socket.socket) -> None:
    """Half of the time passes in silence, then come the probes."""
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, VANISHED_SECONDS // 2)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, VANISHED_SECONDS // 2 // NUM_PROBES)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def new_token() -> str:
    return secrets.token_hex(32)


def proof_of(token: str, role: str, nonce: str) -> str:
    """Compute the proof that this role knows `token`, for a nonce, without revealing the token."""
    return hmac.new(token.encode(), f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


def is_proof(token: str, role: str, nonce: str, proof: str) -> bool:
    # `compare_digest` takes text only if it is ASCII; bytes may be anything.
    return hmac.compare_digest(proof_of(token, role, nonce).encode(), proof.encode(errors="replace"))


def call_driver(
    address: str, token: str, role: Literal["rank", "agent"], rank: int, pid: int
) -> tuple[Connection, Welcome]:
    """Connect to the driver at `host:port` and introduce this process. Raises OSError or ProtocolError."""
    host, _, port = address.rpartition(":")
    until_seconds = time.monotonic() + CALL_TIMEOUT_SECONDS
    connection = Connection(socket.create_connection((host, int(port)), timeout=CALL_TIMEOUT_SECONDS))
    challenge = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"{address} is not the driver of this job")
    nonce = secrets.token_hex(16)
    proof = proof_of(token, role, challenge.nonce)
    connection.send(Hello(role, rank, socket.gethostname(), pid, nonce, proof))
    welcome = connection.receive(MAX_WELCOME_BYTES, until_seconds)
    if not isinstance(welcome, Welcome) or not is_proof(token, "driver", nonce, welcome.proof):
        raise ProtocolError(f"the driver at {address} does not know this job's token, or refused this rank")
    connection.set_timeout(None)
    return connection, welcome


def answer_caller(
    peer: socket.socket, token: str, ranks: range, welcome: Callable[[str], Welcome | Admitted]
) -> tuple[Connection, Hello]:
    """The listening side: one of `ranks` that proves the token gets `welcome(our proof)`.

    Raises OSError or ProtocolError.
    """
    until_seconds = time.monotonic() + HANDSHAKE_TIMEOUT_SECONDS
    connection = Connection(peer)
    connection.set_timeout(until_seconds)
    nonce = secrets.token_hex(16)
    connection.send(Challenge(nonce))
    hello = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
    if not isinstance(hello, Hello) or not is_proof(token, hello.role, nonce, hello.proof):
        raise ProtocolError("not a rank of this job")
    if hello.rank not in ranks:
        raise ProtocolError(f"there is no rank {hello.rank} among {ranks.stop}")
    connection.send(welcome(proof_of(token, "driver", hello.nonce)))
    connection.set_timeout(None)
    return connection, hello
