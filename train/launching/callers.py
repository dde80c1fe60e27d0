"""The driver's door: takes calls from anybody, and lets in who proves to be a rank or a keeper of this job.

Whoever reaches the port can call. He gets one deadline for the whole handshake, one of a bounded number of places, and
no way to close the door for others: not by silence, not by calling often, not by using up file descriptors.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from train.launching.wire import Abort, Connection, Message, ProtocolError, answer_caller, message_adapter
from train.values import WorkerTask

NUM_STRANGERS = 64
NUM_STRANGERS_PER_RANK = 4
# After `accept` failed (no file descriptors left, mostly) the next try comes this much later.
RETRY_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Said:
    """Something that a rank or its keeper said."""

    role: str
    rank: int
    message: Message | None
    """None: the connection closed."""
    seen_seconds: float
    """On this process's monotonic clock."""


class Door:
    """Listens from its construction. `heard` gets everything that callers of this job say, from any thread."""

    def __init__(
        self, bind_host: str, token: str, task: WorkerTask, worker: str, heard: Callable[[Said], None]
    ) -> None:
        self._token = token
        self._task = task
        self._worker = worker
        self._heard = heard
        self._max_strangers = NUM_STRANGERS + NUM_STRANGERS_PER_RANK * task.config.num_workers
        self._lock = threading.Lock()
        self._strangers: dict[socket.socket, None] = {}
        """In the order in which they called."""
        self._connections: list[Connection] = []
        self._is_closed = False
        # Building it imports modules of pydantic, for which no file descriptor may be left when a rank calls.
        message_adapter()
        self._listener = socket.create_server((bind_host, 0), backlog=256)
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="watchdog-accept", daemon=True).start()

    def tell_all(self, message: Abort) -> None:
        """Everybody who was let in and is still there."""
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            try:
                connection.send(message)
            except OSError:
                pass

    def close(self) -> None:
        """Nobody comes in any more; who is in is sent away."""
        with self._lock:
            self._is_closed = True
            connections, strangers = list(self._connections), list(self._strangers)
        # Closing alone would not wake the thread that waits in `accept`, and the port would stay open under it.
        _shut(self._listener)
        self._listener.close()
        for connection in connections:
            connection.close()
        for stranger in strangers:
            _shut(stranger)

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(peer,), name="watchdog-rank", daemon=True).start()
            except (OSError, RuntimeError):
                # No file descriptor or no thread is left, or the caller hung up: later ones must still get through.
                if self._is_closed:
                    return
                time.sleep(RETRY_SECONDS)

    def _serve(self, peer: socket.socket) -> None:
        """The thread of one connection: from the handshake to its end."""
        self._make_room_for(peer)
        try:
            connection, hello = answer_caller(peer, self._token, self._task, self._worker)
        except (OSError, ProtocolError):
            # A port scanner, a rank of an older job: no concern of this one.
            peer.close()
            return
        finally:
            with self._lock:
                self._strangers.pop(peer, None)
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            self._connections.append(connection)
        self._heard(Said(hello.role, hello.rank, hello, time.monotonic()))
        while True:
            try:
                message = connection.receive()
            except ProtocolError:
                message = None
            self._heard(Said(hello.role, hello.rank, message, time.monotonic()))
            if message is None:
                return

    def _make_room_for(self, peer: socket.socket) -> None:
        """Too many strangers: the one who has said nothing for longest goes. A rank is one for milliseconds."""
        with self._lock:
            self._strangers[peer] = None
            while len(self._strangers) > self._max_strangers:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _shut(oldest)


def _shut(peer: socket.socket) -> None:
    """End what is under way on it; its own thread closes it."""
    try:
        peer.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
