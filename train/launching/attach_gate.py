"""Rank 0's side of an attached job: the other processes of the same command wait at its gate until it starts them.

A process that is there has proved the job's token, which all of them got by their environment; see connection.py.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial

from shardmill.jobs.process import request_stop
from train.launching.connection import (
    HANDSHAKE_TIMEOUT_SECONDS,
    MAX_HANDSHAKE_BYTES,
    Connection,
    ProtocolError,
    answer_caller,
    is_proof,
    proof_of,
)
from train.launching.listener import RankListener, Received
from train.launching.messages import Admitted, Begin, Challenge, Ended, Hello, Stop

# At its end rank 0 waits so long for processes that have not come yet, to tell them; they start when it does.
LATE_SECONDS = 20.0
# Without a word so long, a process that waits for rank 0 looks like one that hangs.
PATIENCE_SECONDS = 10.0


class Gate:
    """Listens from its construction; every process that comes receives what has been sent so far."""

    def __init__(self, host: str, port: int, token: str, world_size: int) -> None:
        """Raises OSError if it cannot listen there."""
        self._world_size = world_size
        self._changed = threading.Condition()
        self._begin: Begin | None = None
        self._present: dict[int, str] = {}
        """Rank -> host of the processes that are connected."""
        self._seen: set[int] = set()
        """The ranks of all that have been."""
        self._on_lost: Callable[[str], None] | None = None
        answer = partial(answer_caller, token=token, ranks=range(1, world_size), welcome=Admitted)
        self._listener = RankListener(host, answer, world_size, self._on_received, port)

    def begin(self, address: str, nonce: str, on_lost: Callable[[str], None]) -> None:
        """Let every process start its rank. `on_lost` is called, from any thread, for each lost one."""
        with self._changed:
            self._begin, self._on_lost = Begin(address, nonce), on_lost
        self._listener.send_to_all(self._begin)

    def end(self, exit_code: int, line: str) -> None:
        """Tell every process how the job ended, also those that are a little late, and close."""
        with self._changed:
            self._begin, self._on_lost = None, None
            self._changed.wait_for(lambda: len(self._seen) == self._world_size - 1, LATE_SECONDS)
        self._listener.send_to_all(Ended(exit_code, line))
        self._listener.close()

    def _on_received(self, received: Received) -> None:
        """Runs in the connection's thread."""
        message = received.message
        if isinstance(message, Hello):
            with self._changed:
                self._present[received.rank] = message.host
                self._seen.add(received.rank)
                self._changed.notify_all()
                begin = self._begin
            if begin is not None:
                # Whoever was there already has received it: a process that receives it twice starts one rank.
                self._listener.send_to_all(begin)
        elif isinstance(message, Stop) and message.why:
            self._lost(message.why)
        elif isinstance(message, Stop):
            # Whichever process a scheduler asks to end: the job ends as if it had asked rank 0's.
            request_stop()
        elif message is None:
            with self._changed:
                host = self._present.pop(received.rank, "")
            self._lost(f"the process of rank {received.rank} on host {host} has ended")

    def _lost(self, why: str) -> None:
        with self._changed:
            on_lost = self._on_lost
        if on_lost is not None:
            on_lost(why)


def call_gate(address: str, token: str, rank: int, until_seconds: float) -> Connection:
    """Wait for rank 0 at `host:port` and introduce this process. Raises OSError or ProtocolError at `until_seconds`."""
    report_seconds = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return _call_gate(address, token, rank, until_seconds)
        except (OSError, ProtocolError) as error:
            # Rank 0 may start a little later; another job may still hold the port.
            now = time.monotonic()
            if now > until_seconds:
                raise
            if now > report_seconds:
                left = f"for {until_seconds - now:.0f} s more"
                sys.stderr.write(f"shardmill: rank {rank} waits {left} for rank 0 at {address}: {error}\n")
                sys.stderr.flush()
                report_seconds = now + PATIENCE_SECONDS * 6
            time.sleep(0.2)


def _call_gate(address: str, token: str, rank: int, until_seconds: float) -> Connection:
    host, _, port = address.rpartition(":")
    connection = Connection(socket.create_connection((host, int(port)), timeout=HANDSHAKE_TIMEOUT_SECONDS))
    until_seconds = min(until_seconds, time.monotonic() + HANDSHAKE_TIMEOUT_SECONDS)
    try:
        challenge = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
        if not isinstance(challenge, Challenge):
            raise ProtocolError(f"{address} is not a process of this job")
        nonce = secrets.token_hex(16)
        proof = proof_of(token, "attached", challenge.nonce)
        connection.send(Hello("attached", rank, socket.gethostname(), os.getpid(), nonce, proof))
        admitted = connection.receive(MAX_HANDSHAKE_BYTES, until_seconds)
        if not isinstance(admitted, Admitted) or not is_proof(token, "driver", nonce, admitted.proof):
            raise ProtocolError(f"{address} does not know this job's token, or refused rank {rank}")
        connection.set_timeout(None)
    except BaseException:
        connection.close()
        raise
    return connection
