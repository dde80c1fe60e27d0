"""The driver's side of a training in other processes: hands out the task, hears every rank, ends all when one fails.

The open connection is a rank's sign of life: the kernel closes it when the process dies, however it dies. Heartbeats
find what keeps a connection open without living: a stopped process, a host that is gone.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardmill.values import Cursor
from train.faults import RANK_OF_KIND, FaultKind, RankFault, error_of, merged, root_cause
from train.observer import StepAssembler, TrainObserver
from train.values import TrainResult, WorkerTask
from train.wire import (
    ADDRESS_VARIABLE,
    TOKEN_VARIABLE,
    Abort,
    Connection,
    Event,
    Failure,
    Finished,
    Hello,
    Message,
    ProtocolError,
    RankExit,
    Step,
    answer_caller,
    new_token,
)

# After the first fault, faults of the same cause come within this time, and so does the cause of an echo.
GRACE_SECONDS = 1.0
ECHO_GRACE_SECONDS = 4.0
# Ranks that were told to end have this long; then those on this host are killed.
ABORT_SECONDS = 1.5
TICK_SECONDS = 0.1


@dataclass(slots=True)
class _Rank:
    """What the driver knows of a rank. Its connection's thread writes `seen_seconds`, the main thread the rest."""

    hello: Hello | None = None
    seen_seconds: float = 0.0
    last_step: Cursor | None = None
    result: TrainResult | None = None
    is_connected: bool = False


@dataclass(frozen=True, slots=True)
class _Said:
    role: str
    rank: int
    message: Message | None
    """None: the connection closed."""
    seen_seconds: float


@dataclass(slots=True)
class _Callers:
    """Connections, shared by the accepting threads and the main one."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    connections: list[Connection] = field(default_factory=list)
    is_closed: bool = False


class Watchdog:
    """Listens from its construction; `watch`, in the main thread, does the rest. Leaving its `with` ends all ranks."""

    def __init__(
        self, task: WorkerTask, worker: str, observer: TrainObserver, bind_host: str, advertised_host: str | None = None
    ) -> None:
        self._task = task
        self._worker = worker
        self._observer = observer
        self._token = new_token()
        self._listener = socket.create_server((bind_host, 0), backlog=256)
        self._address = f"{advertised_host or bind_host}:{self._listener.getsockname()[1]}"
        self._inbox: queue.SimpleQueue[_Said | RankFault] = queue.SimpleQueue()
        self._ranks = [_Rank() for _ in range(task.config.num_workers)]
        self._faults: dict[int, RankFault] = {}
        self._steps = StepAssembler(task.config.num_workers)
        self._callers = _Callers()
        threading.Thread(target=self._accept, name="watchdog-accept", daemon=True).start()

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is not None:
            self.abort()
        with self._callers.lock:
            self._callers.is_closed = True
            connections = list(self._callers.connections)
        self._listener.close()
        for connection in connections:
            connection.close()

    def environment(self) -> dict[str, str]:
        """What a rank's process needs to find its driver and to be believed. Secret: never on a command line."""
        return {ADDRESS_VARIABLE: self._address, TOKEN_VARIABLE: self._token}

    def report_exit(self, rank: int, note: RankExit) -> None:
        """A launcher in this process saw the process of `rank` end. From any thread."""
        self._inbox.put(_Said("keeper", rank, note, time.monotonic()))

    def report_launcher_failure(self, what: str, output_tail: str = "") -> None:
        """What should start the ranks failed as a whole. From any thread."""
        self._inbox.put(RankFault(FaultKind.LAUNCHER, -1, "", time.monotonic(), what, output_tail=output_tail))

    def watch(self) -> TrainResult:
        """Serve the ranks until all have finished; rank 0's result.

        Raises the first failing rank's own error: its class where that is a ShardmillError, TrainingError otherwise.
        """
        started_seconds = ticked_seconds = time.monotonic()
        while any(rank.result is None for rank in self._ranks):
            try:
                said = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                pass
            else:
                self._hear(said)
            now = time.monotonic()
            if now - ticked_seconds > self._task.config.silent_seconds / 2:
                # This process itself stood still (suspended, swapped out): it cannot tell who was silent meanwhile.
                for rank in self._ranks:
                    rank.seen_seconds = now
            ticked_seconds = now
            self._look_for_silence(now, started_seconds)
            if self._faults and self._is_cause_known(now):
                cause = root_cause(self._faults.values())
                self._observer.on_event(cause.rank, "rank_failed", {"kind": str(cause.kind), "where": cause.where})
                raise error_of(cause)
        result = self._ranks[0].result
        assert result is not None
        return result

    def abort(self) -> None:
        """Tell every rank to end, wait for it, and kill those of this host that do not."""
        with self._callers.lock:
            connections = list(self._callers.connections)
        for connection in connections:
            try:
                connection.send(Abort())
            except OSError:
                pass
        local_pids = [
            rank.hello.pid for rank in self._ranks if rank.hello is not None and rank.hello.host == socket.gethostname()
        ]
        deadline_seconds = time.monotonic() + ABORT_SECONDS
        while (left := [pid for pid in local_pids if self._is_ours(pid)]) and time.monotonic() < deadline_seconds:
            time.sleep(0.05)
        for pid in left:
            try:
                # SIGKILL ends a stopped process too.
                os.kill(pid, signal.SIGKILL)
            except OSError:
                pass

    def _is_ours(self, pid: int) -> bool:
        # A pid of another container, or one used again, does not have this job's token in its environment.
        try:
            return self._token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(peer,), name="watchdog-rank", daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        """The thread of one connection: from the handshake to its end."""
        try:
            connection, hello = answer_caller(peer, self._token, self._task, self._worker)
        except (OSError, ProtocolError):
            # A port scanner, a rank of an older job: no concern of this one.
            peer.close()
            return
        with self._callers.lock:
            if self._callers.is_closed:
                connection.close()
                return
            self._callers.connections.append(connection)
        self._inbox.put(_Said(hello.role, hello.rank, hello, time.monotonic()))
        while True:
            try:
                message = connection.receive()
            except ProtocolError:
                message = None
            now = time.monotonic()
            if hello.role == "rank":
                self._ranks[hello.rank].seen_seconds = now
            self._inbox.put(_Said(hello.role, hello.rank, message, now))
            if message is None:
                return

    def _hear(self, said: _Said | RankFault) -> None:
        if isinstance(said, RankFault):
            self._note(said)
            return
        rank = self._ranks[said.rank]
        match said.message:
            case Hello(role="rank", host=host, pid=pid) as hello:
                rank.hello, rank.is_connected, rank.seen_seconds = hello, True, said.seen_seconds
                self._observer.on_event(said.rank, "rank_started", {"host": host, "pid": pid})
            case Step(report):
                rank.last_step = Cursor(report.epoch, report.step)
                if (step := self._steps.add(report)) is not None:
                    self._observer.on_step(step)
            case Event(name, fields):
                self._observer.on_event(said.rank, name, fields)
            case Finished(result):
                rank.result = result
                # Its process may have been seen to end before its last words were read.
                self._faults.pop(said.rank, None)
            case Failure(collective=collective) as failure:
                kind = FaultKind.COLLECTIVE if collective else FaultKind.FAILED
                self._note(replace(self._fault(said.rank, kind, said.seen_seconds), failure=failure))
            case RankExit(returncode, output_tail):
                fault = self._fault(said.rank, FaultKind.KILLED, said.seen_seconds)
                self._note(replace(fault, returncode=returncode, output_tail=output_tail))
            case None if said.role == "rank":
                rank.is_connected = False
                self._note(self._fault(said.rank, FaultKind.KILLED, said.seen_seconds))

    def _note(self, fault: RankFault) -> None:
        if fault.rank < 0 or self._ranks[fault.rank].result is None:
            self._faults[fault.rank] = merged(self._faults.get(fault.rank), fault)

    def _fault(self, number: int, kind: FaultKind, seen_seconds: float, what: str = "") -> RankFault:
        rank = self._ranks[number]
        where = f"host {rank.hello.host}, pid {rank.hello.pid}" if rank.hello is not None else ""
        return RankFault(kind, number, where, seen_seconds, what, rank.last_step)

    def _look_for_silence(self, now: float, started_seconds: float) -> None:
        config = self._task.config
        for number, rank in enumerate(self._ranks):
            if rank.is_connected and rank.result is None and now - rank.seen_seconds > config.silent_seconds:
                silence = f"no sign of life for {now - rank.seen_seconds:.0f} s"
                what = f"{silence} (train.silent_seconds = {config.silent_seconds:g})"
                self._note(self._fault(number, FaultKind.SILENT, now, what))
        missing = [number for number, rank in enumerate(self._ranks) if rank.hello is None]
        if missing and now - started_seconds > config.start_timeout_seconds:
            names = ", ".join(map(str, missing))
            what = (
                f"{len(missing)} of {len(self._ranks)} ranks did not start within train.start_timeout_seconds = "
                f"{config.start_timeout_seconds:g}: rank {names}"
            )
            self._note(RankFault(FaultKind.ABSENT, -1, "", now, what))

    def _is_cause_known(self, now: float) -> bool:
        first_seconds = min(fault.seen_seconds for fault in self._faults.values())
        has_cause = any(RANK_OF_KIND[fault.kind] == 0 for fault in self._faults.values())
        return now - first_seconds > (GRACE_SECONDS if has_cause else ECHO_GRACE_SECONDS)
