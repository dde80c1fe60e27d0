"""The protocol between ranks and driver: JSON lines over TCP, after both sides have proved that they know the token.

Each side answers the other's fresh nonce with HMAC-SHA256(token, role + nonce): neither the token nor anything that
could be used again, or in the other direction, is sent here. The launcher gives the token to its ranks:
`local` puts it into their environment, `horovod_spark` derives it on both sides from the key in Spark's own task.

Over it ranks exchange values, and agree on the step before which they stop after SIGTERM. Neither needs a collective,
so both work for every strategy, before the ranks have one and beside it: a thread that writes checkpoints exchanges in
a separate lane, independent of the training thread.

This authenticates both sides at the start, and no more: the lines that follow are neither encrypted nor authenticated.
An attacker who can change packets between two hosts can read the task and forge reports (docs/decisions/0006).
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import queue
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter, ValidationError

from train.launching.messages import Admitted, Challenge, Exchange, Exchanged, Hello, Lane, Message, Welcome

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


Answer = Callable[[socket.socket], tuple[Connection, Hello]]
"""The listening side of a handshake; raises OSError or ProtocolError."""

MAX_PENDING = 64
MAX_PENDING_PER_RANK = 4
# After `accept` failed, mostly for lack of file descriptors, it is tried again this much later.
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Received:
    """A message from a rank or its agent."""

    role: str
    rank: int
    message: Message | None
    """The message; None: the connection closed."""
    seen_seconds: float
    """Time on this process's monotonic clock."""


class RankListener:
    """The driver's listening socket, from its construction: authenticates connections, and keeps those of this job.

    `on_received` is called with every message, from the connection's thread. Anyone who reaches the port can connect: a
    connection has one deadline for the whole handshake and takes one of a bounded number of pending places, so it
    cannot keep ranks out, not by silence, not by connecting often, not by using up file descriptors.
    """

    def __init__(
        self, bind_host: str, answer: Answer, num_ranks: int, on_received: Callable[[Received], None], port: int = 0
    ) -> None:
        """`port`: 0 for any that is free. Raises OSError if it cannot listen there."""
        self._answer = answer
        self._on_received = on_received
        self._max_pending = MAX_PENDING + MAX_PENDING_PER_RANK * num_ranks
        self._lock = threading.Lock()
        self._pending: dict[socket.socket, None] = {}
        """Connections that have not authenticated yet, oldest first."""
        self._connections: list[Connection] = []
        self._is_closed = False
        # Built before the first rank connects: building it imports modules of pydantic, and by then other connections
        # may have used up all file descriptors.
        message_adapter()
        self._socket = socket.create_server((bind_host, port), backlog=256)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="watchdog-accept", daemon=True).start()

    def send_to_all(self, message: Message) -> None:
        """Send to every authenticated connection that is still open."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.send(message)
            except OSError:
                pass

    def close(self) -> None:
        """Accept nothing more, and close every connection."""
        with self._lock:
            self._is_closed = True
            connections, pending = list(self._connections), list(self._pending)
        # Closing alone would not wake the thread that waits in `accept`, and the port would stay open under it.
        _shut(self._socket)
        self._socket.close()
        for connection in connections:
            connection.close()
        for peer in pending:
            _shut(peer)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._socket.accept()
                threading.Thread(target=self._serve, args=(peer,), name="watchdog-rank", daemon=True).start()
            except (OSError, RuntimeError):
                # No file descriptor or no thread is left, or the peer hung up: later ones must still be served.
                if self._is_closed:
                    return
                time.sleep(RETRY_SECONDS)

    def _serve(self, peer: socket.socket) -> None:
        """The thread of one connection: from the handshake to its end."""
        self._make_room_for(peer)
        try:
            connection, hello = self._answer(peer)
        except (OSError, ProtocolError):
            # A port scanner, or a rank of an older job: not a fault of this one.
            peer.close()
            return
        finally:
            with self._lock:
                self._pending.pop(peer, None)
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connections.append(connection)
        self._on_received(Received(hello.role, hello.rank, hello, time.monotonic()))
        while True:
            try:
                message = connection.receive()
            except ProtocolError:
                message = None
            self._on_received(Received(hello.role, hello.rank, message, time.monotonic()))
            if message is None:
                return

    def _make_room_for(self, peer: socket.socket) -> None:
        """Drop the oldest pending connection if there are too many. A rank's handshake takes milliseconds."""
        with self._lock:
            self._pending[peer] = None
            while len(self._pending) > self._max_pending:
                oldest = next(iter(self._pending))
                del self._pending[oldest]
                _shut(oldest)


def _shut(peer: socket.socket) -> None:
    """End what is under way on it; its own thread closes it."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass


LANES: tuple[Lane, ...] = get_args(Lane)


class ExchangeAssembler:
    """Assembles the contributions of the ranks to one exchange, on the driver."""

    def __init__(self, world_size: int) -> None:
        self._waiting: dict[Lane, list[deque[str]]] = {lane: [deque() for _ in range(world_size)] for lane in LANES}

    def add(self, rank: int, given: Exchange) -> Exchanged | None:
        """The answer to all ranks that this completes, or None."""
        of_ranks = self._waiting[given.lane]
        of_ranks[rank].append(given.data_hex)
        if not all(of_ranks):
            return None
        return Exchanged(tuple(of_rank.popleft() for of_rank in of_ranks), given.lane)


class RankExchange:
    """Implements `World.exchange` and `World.exchange_aside` on a rank."""

    def __init__(self, send: Callable[[Exchange], None], lane: Lane) -> None:
        self._send = send
        self._lane: Lane = lane
        self._answers: queue.SimpleQueue[Exchanged] = queue.SimpleQueue()

    def __call__(self, data: bytes) -> list[bytes]:
        self._send(Exchange(data.hex(), self._lane))
        return [bytes.fromhex(each) for each in self._answers.get().data_hex_of_ranks]

    def answer(self, message: Exchanged) -> None:
        """Called by the thread that receives from the driver."""
        self._answers.put(message)


class StopPoint:
    """A rank's side. The training thread calls `may_begin`, and the thread that receives from the driver calls the
    rest.

    The driver sends `Hold`; each rank's listening thread answers at once with the last step that the rank has begun,
    and from then on the rank begins no other. The largest of the answers, which the driver sends to all, is a step that
    nobody has passed and that every rank can still reach: one that has begun it needs its peers in its collectives, and
    they begin it now. All stop behind it.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._begun = -1
        self._is_held = False
        self._last: int | None = None

    def may_begin(self, global_step: int) -> bool:
        """`World.may_begin`; waits while the ranks agree."""
        with self._changed:
            self._changed.wait_for(lambda: not self._is_held or self._last is not None)
            if self._last is not None and global_step > self._last:
                return False
            # A chief begins steps ahead of those that its loop comes to.
            self._begun = max(self._begun, global_step)
            return True

    def hold(self) -> int:
        """Begin no other step until `stop_after`. -> the last one that was begun, -1 for none; the same every time."""
        with self._changed:
            self._is_held = True
            return self._begun

    def stop_after(self, global_step: int) -> None:
        """All ranks continue to the end of this step, and no further."""
        with self._changed:
            self._last = global_step
            self._changed.notify_all()


class StopAgreement:
    """The driver's side: the answers of the ranks."""

    def __init__(self) -> None:
        self.is_asked = False
        self._begun: dict[int, int] = {}
        self._is_agreed = False

    def answer(self, rank: int, global_step: int) -> None:
        """`rank` has begun `global_step` last, and holds."""
        self._begun[rank] = global_step

    def agreed(self, at_work: set[int]) -> int | None:
        """The step to stop after, once: when all ranks that are still at work have answered."""
        if not self.is_asked or self._is_agreed or not at_work or not at_work <= self._begun.keys():
            return None
        self._is_agreed = True
        return max(self._begun.values())
