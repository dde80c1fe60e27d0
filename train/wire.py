"""What ranks and their driver say to each other over TCP: JSON lines, once both have proved that they know the token.

The token itself never crosses the wire: each side answers the other's nonce with HMAC-SHA256(token, role + nonce).
"""

from __future__ import annotations

import functools
import hashlib
import hmac
import secrets
import socket
import threading
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from train.values import StepReport, TrainResult, WorkerTask

ADDRESS_VARIABLE = "SHARDMILL_DRIVER_ADDRESS"
TOKEN_VARIABLE = "SHARDMILL_DRIVER_TOKEN"
# Strangers may connect: what they can make us hold in memory is bounded until they have proved the token.
MAX_HANDSHAKE_BYTES = 4096
HANDSHAKE_TIMEOUT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Challenge:
    """Driver to whoever connected."""

    nonce: str
    kind: Literal["challenge"] = "challenge"


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first words; or those of the keeper, the process that started the rank and sees how it ends."""

    role: Literal["rank", "keeper"]
    rank: int
    host: str
    pid: int
    nonce: str
    proof: str
    kind: Literal["hello"] = "hello"


@dataclass(frozen=True, slots=True)
class Welcome:
    """The driver's answer: its own proof, and what to do."""

    proof: str
    task: WorkerTask
    worker: str
    """Dotted name `package.module:function` of the function that does it."""
    kind: Literal["welcome"] = "welcome"


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """Nothing to say, still alive."""

    kind: Literal["heartbeat"] = "heartbeat"


@dataclass(frozen=True, slots=True)
class Step:
    """`Reporter.step`."""

    report: StepReport
    kind: Literal["step"] = "step"


@dataclass(frozen=True, slots=True)
class Event:
    """`Reporter.event`."""

    name: str
    fields: dict[str, str | int | float] = field(default_factory=dict)
    kind: Literal["event"] = "event"


@dataclass(frozen=True, slots=True)
class Failure:
    """The rank's function raised."""

    error_type: str
    what: str
    """The message; of a ShardmillError its first part, the others follow."""
    expected: str
    fix: str
    exit_code: int
    """Of a ShardmillError its own; 5 for anything else."""
    collective: bool
    """True where the error only says that another rank went away."""
    traceback: str
    """The tail of it, oldest call first."""
    kind: Literal["failure"] = "failure"


@dataclass(frozen=True, slots=True)
class Finished:
    """The rank's function returned. The last words: the connection closes after it."""

    result: TrainResult
    kind: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True)
class RankExit:
    """A keeper saw its rank's process end."""

    returncode: int
    """As `subprocess` gives it: minus the signal's number where a signal ended it."""
    output_tail: str
    """The last lines that the process wrote to stdout and stderr."""
    kind: Literal["rank_exit"] = "rank_exit"


@dataclass(frozen=True, slots=True)
class Abort:
    """Driver to rank or keeper: end at once."""

    kind: Literal["abort"] = "abort"


Message = Challenge | Hello | Welcome | Heartbeat | Step | Event | Failure | Finished | RankExit | Abort


class ProtocolError(Exception):
    """The other side is not one of ours, or does not know the token."""


@functools.cache
def _messages() -> TypeAdapter[Message]:
    return TypeAdapter(Annotated[Message, Field(discriminator="kind")])


class Connection:
    """One end of a conversation. Any thread may send; one thread receives."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._reader = peer.makefile("rb")
        self._sending = threading.Lock()
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Message) -> None:
        """Raises OSError where the other side is gone."""
        line = _messages().dump_json(message) + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def receive(self, max_bytes: int = -1) -> Message | None:
        """The next message, or None when the other side is gone. Raises ProtocolError for anything else."""
        try:
            line = self._reader.readline(max_bytes)
        except TimeoutError:
            raise ProtocolError("no answer") from None
        except (OSError, ValueError):
            return None
        if not line.endswith(b"\n"):
            # A half line is what a process leaves that died while it spoke.
            return None
        try:
            return _messages().validate_json(line)
        except ValidationError as error:
            raise ProtocolError(str(error)) from None

    def set_timeout(self, timeout_seconds: float | None) -> None:
        self._socket.settimeout(timeout_seconds)

    def close(self) -> None:
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._socket.close()


def new_token() -> str:
    return secrets.token_hex(32)


def proof_of(token: str, role: str, nonce: str) -> str:
    """What shows knowledge of `token` for this role and nonce, without telling it."""
    return hmac.new(token.encode(), f"{role}:{nonce}".encode(), hashlib.sha256).hexdigest()


def is_proof(token: str, role: str, nonce: str, proof: str) -> bool:
    return hmac.compare_digest(proof_of(token, role, nonce), proof)


def call_driver(
    address: str, token: str, role: Literal["rank", "keeper"], rank: int, pid: int
) -> tuple[Connection, Welcome]:
    """Connect to the driver at `host:port` and introduce this process. Raises OSError or ProtocolError."""
    host, _, port = address.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_SECONDS)
    connection = Connection(peer)
    challenge = connection.receive(MAX_HANDSHAKE_BYTES)
    if not isinstance(challenge, Challenge):
        raise ProtocolError(f"{address} is not the driver of this job")
    nonce = secrets.token_hex(16)
    proof = proof_of(token, role, challenge.nonce)
    connection.send(Hello(role, rank, socket.gethostname(), pid, nonce, proof))
    welcome = connection.receive()
    if not isinstance(welcome, Welcome) or not is_proof(token, "driver", nonce, welcome.proof):
        raise ProtocolError(f"the driver at {address} does not know this job's token, or refused this rank")
    connection.set_timeout(None)
    return connection, welcome


def answer_caller(peer: socket.socket, token: str, task: WorkerTask, worker: str) -> tuple[Connection, Hello]:
    """The driver's side of `call_driver`. Raises OSError or ProtocolError."""
    peer.settimeout(HANDSHAKE_TIMEOUT_SECONDS)
    connection = Connection(peer)
    nonce = secrets.token_hex(16)
    connection.send(Challenge(nonce))
    hello = connection.receive(MAX_HANDSHAKE_BYTES)
    if not isinstance(hello, Hello) or not is_proof(token, hello.role, nonce, hello.proof):
        raise ProtocolError("not a rank of this job")
    if not 0 <= hello.rank < task.config.num_workers:
        raise ProtocolError(f"there is no rank {hello.rank} among {task.config.num_workers}")
    connection.send(Welcome(proof_of(token, "driver", hello.nonce), task, worker))
    peer.settimeout(None)
    return connection, hello
