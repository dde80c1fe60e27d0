"""The driver's listening socket: authenticates connections, and keeps those of this job's ranks and agents.

Anyone who reaches the port can connect. A connection has one deadline for the whole handshake and takes one of a
bounded number of pending places. It cannot keep ranks out: not by silence, not by connecting often, not by using up
file descriptors.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from train.launching.connection import Connection, ProtocolError, message_adapter
from train.launching.messages import Hello, Message

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
    """Listens from its construction. `on_received` is called with every message, from the connection's thread."""

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
