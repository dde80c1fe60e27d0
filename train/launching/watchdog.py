"""The driver's side of a training in other processes: sends the task, watches the ranks, ends all if one fails.

An open connection shows that a rank is alive: the kernel closes it when the process dies, for whatever reason.
Heartbeats detect dead ranks whose connection stays open (a stopped process, a lost host) and ranks that make no
progress; `train/launching/deadlines.py` explains their limits. It works in the other direction, too: a rank whose
connection to the driver ends exits, so a killed driver leaves no ranks behind.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from shardmill.errors import ShardmillError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import asked_to_end, stopping_in_order
from shardmill.values import Cursor
from train.contracts.task import WorkerTask
from train.contracts.values import BEFORE_CHECKPOINT, OUTPUT, TrainResult, to_json
from train.contracts.world import Role
from train.launching.connection import (
    ADDRESS_VARIABLE,
    TOKEN_VARIABLE,
    ExchangeAssembler,
    RankListener,
    Received,
    StopAgreement,
    answer_caller,
    new_token,
)
from train.launching.deadlines import Deadlines, WatchedRank
from train.launching.messages import (
    Abort,
    Begun,
    Event,
    Exchange,
    Failure,
    Finished,
    Heartbeat,
    Hello,
    Hold,
    Output,
    RankExit,
    Step,
    StopAfter,
    Stopped,
    Welcome,
)
from train.launching.rank_failures import FaultKind, RankFault, error_of_all, is_cause_known, merged, root_cause
from train.reporting.observer import StepAssembler, TrainObserver, report_stopping
from train.strategies import STRATEGIES

# Those that are still there when the others have finished have this long to leave too.
LEAVE_SECONDS = 5.0


class LostRanks:
    """The lost ranks that the others continue without (`Strategy.may_lose`, and all but the last worker of a chief).

    They are reported, and are not a fault of the job once training has begun: a rank that never made a step has a wrong
    config or host. Called from the watchdog's main thread.
    """

    def __init__(self, ranks: Sequence[WatchedRank], may_lose: frozenset[int], observer: TrainObserver) -> None:
        self._ranks = ranks
        self._loops = [rank for rank in ranks if rank.role.runs_loop]
        self._may_lose = may_lose
        self._observer = observer
        self._away_since: dict[int, float] = {}
        """Ranks that are silent or make no progress: when that was found."""
        self._others_done_seconds: float | None = None

    def may_lose(self, rank: int) -> bool:
        return rank in self._may_lose

    def is_away(self, rank: int) -> bool:
        """Whether the others currently continue without it."""
        return rank in self._away_since

    def takes(self, rank: WatchedRank, fault: RankFault) -> bool:
        """Whether the others continue in spite of `fault`. Told once."""
        if rank.role is Role.WORKER:
            return self._takes_worker(rank, fault)
        if rank.number not in self._may_lose or rank.last_step is None:
            return False
        if rank.is_done:
            # What it leaves behind when it ends.
            return True
        fields = {"rank": rank.number, "kind": str(fault.kind), "where": fault.where}
        if fault.kind in (FaultKind.SILENT, FaultKind.STALLED):
            if rank.number not in self._away_since:
                self._observer.event("rank_away", {**fields, "what": fault.what})
            self._away_since[rank.number] = fault.seen_seconds
        else:
            rank.is_lost = True
            what = fault.failure.what if fault.failure is not None else fault.what
            self._observer.event("rank_lost", {**fields, "what": what})
        return True

    def _takes_worker(self, rank: WatchedRank, fault: RankFault) -> bool:
        """A chief gives what a killed worker was doing to another, if there is one."""
        if rank.is_lost:
            return True
        ended_itself = fault.returncode is not None and fault.returncode >= 0
        if fault.kind is not FaultKind.KILLED or ended_itself:
            return False
        others = [each for each in self._ranks if each.role is Role.WORKER and each is not rank and not each.is_lost]
        if not others or any(each.last_step is None for each in self._loops):
            return False
        rank.is_lost = True
        warning = f"rank {rank.number}, a worker, is lost ({fault.where}): {len(others)} other(s) take over its work"
        fields = {"rank": rank.number, "kind": str(fault.kind), "where": fault.where, WARNING: warning}
        self._observer.event("rank_lost", fields)
        return True

    def progressed(self, rank: WatchedRank) -> None:
        """Report it if a rank that was away makes progress again."""
        if rank.progress_seconds > self._away_since.get(rank.number, float("inf")):
            del self._away_since[rank.number]
            self._observer.event("rank_back", {"rank": rank.number})

    def is_over(self, now: float) -> bool:
        """Whether nothing is left to wait for. Processes that serve others do so until they are ended."""
        if not all(rank.is_done for rank in self._loops if rank.number not in self._may_lose):
            return False
        if self._others_done_seconds is None:
            self._others_done_seconds = now
        return all(rank.is_done for rank in self._loops) or now - self._others_done_seconds > LEAVE_SECONDS


# After an abort, ranks have this long to end; then those on this host are killed.
ABORT_SECONDS = 1.5
# After the last step, processes have this long to end for what they still print to be received.
LAST_WORDS_SECONDS = 5.0
TICK_SECONDS = 0.1


class Watchdog:
    """Listens from its construction; `watch`, in the main thread, does the rest. Leaving its `with` ends all ranks."""

    def __init__(
        self,
        task: WorkerTask,
        worker: str,
        observer: TrainObserver,
        bind_host: str,
        advertised_host: str | None = None,
        token: str = "",
    ) -> None:
        """`token`: the secret that the launcher passes to its ranks by its own means; empty to make a new one."""
        self._task = task
        self._observer = observer
        self._token = token or new_token()
        self._inbox: queue.SimpleQueue[Received | RankFault] = queue.SimpleQueue()
        self._deadlines = Deadlines(task.config, time.monotonic())
        self._ranks = self._deadlines.ranks
        self._loops = [rank for rank in self._ranks if rank.role.runs_loop]
        # What they have done is what their chief has.
        self._serving = [rank for rank in self._ranks if not rank.role.runs_loop]
        self._faults: dict[int, RankFault] = {}
        self._exited: set[int] = set()
        """Ranks whose processes have ended, as those tell who started them."""
        may_lose = STRATEGIES[task.config.strategy].may_lose(task.config)
        self._lost_ranks = LostRanks(self._ranks, may_lose, observer)
        self._steps = StepAssembler(len(self._loops) - len(may_lose))
        self._exchanges = ExchangeAssembler(len(self._ranks))
        self._stop = StopAgreement()
        num_ranks = len(self._ranks)
        welcome = partial(Welcome, task_json=to_json(task).decode(), worker=worker)
        answer = partial(answer_caller, token=self._token, ranks=range(num_ranks), welcome=welcome)
        self._listener = RankListener(bind_host, answer, num_ranks, self._on_received)
        self._address = f"{advertised_host or bind_host}:{self._listener.port}"

    def __enter__(self) -> Watchdog:
        return self

    def __exit__(self, error_type: object, *_: object) -> None:
        if error_type is not None:
            self.abort()
        self._listener.close()
        while not self._inbox.empty():
            self._receive_output(self._inbox.get())

    def environment(self) -> dict[str, str]:
        """Return the variables with which a rank's process finds its driver and authenticates. Secret: never on a
        command line.
        """
        return {ADDRESS_VARIABLE: self._address, TOKEN_VARIABLE: self._token}

    def report_exit(self, rank: int, note: RankExit) -> None:
        """A launcher in this process saw the process of `rank` end. From any thread."""
        self._inbox.put(Received("agent", rank, note, time.monotonic()))

    def report_output(self, rank: int, text: str) -> None:
        """A launcher in this process read what the process of `rank` printed. From any thread."""
        self._inbox.put(Received("agent", rank, Output(text), time.monotonic()))

    def report_launcher_failure(self, what: str, output_tail: str = "") -> None:
        """Report that the launcher of the ranks failed as a whole. From any thread."""
        self._inbox.put(RankFault(FaultKind.LAUNCHER, -1, "", time.monotonic(), what, output_tail=output_tail))

    def watch(self) -> TrainResult:
        """Serve the ranks until all have finished; rank 0's result.

        Raises the first failing rank's own error: its class if that is a ShardmillError, TrainingError otherwise;
        Terminated, when a signal has come and all ranks have stopped at the same step.
        """
        with stopping_in_order(self._task.config.watch.stop_timeout_seconds) as request:
            ticked_seconds = time.monotonic()
            while not self._lost_ranks.is_over(time.monotonic()):
                self._handle_all()
                if request.is_made:
                    self._stop_ranks()
                now = time.monotonic()
                if now - ticked_seconds > self._task.config.watch.silent_seconds / 2:
                    self._deadlines.restart_clocks(now)
                ticked_seconds = now
                for rank, pause in self._deadlines.paused(now):
                    self._observer.event("rank_paused", {"rank": rank.number, "where": rank.where, WARNING: pause})
                for fault in self._deadlines.missed(now):
                    self._record_fault(fault)
                if self._faults and is_cause_known(self._faults.values(), now):
                    raise self._error()
            if len(self._loops) < len(self._ranks):
                # Those that serve others do so until they are ended.
                self.abort()
            stopped = [rank.stopped for rank in self._ranks if rank.stopped is not None]
            if stopped:
                raise asked_to_end(stopped[0].what)
        self._receive_last_output()
        result = self._ranks[0].result
        assert result is not None
        return result

    def _handle_all(self) -> None:
        """Handle what has come, or the first message of the next tick: deadlines are judged by all that is here."""
        for _ in range(max(1, self._inbox.qsize())):
            try:
                received = self._inbox.get(timeout=TICK_SECONDS)
            except queue.Empty:
                return
            self._handle(received)
            if self._lost_ranks.is_over(time.monotonic()):
                return

    def abort(self) -> None:
        """Make every rank end: by message first, and on this host by SIGKILL if it does not end in time."""
        self._listener.send_to_all(Abort())
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

    def _error(self) -> ShardmillError:
        # The exit of a process may be seen before its last reports are read from the connection.
        faults = [
            fault if fault.rank < 0 else replace(fault, last_step=self._ranks[fault.rank].last_step)
            for fault in self._faults.values()
        ]
        secondary = STRATEGIES[self._task.config.strategy].secondary_error
        cause = root_cause(faults, secondary)
        fields = {"rank": cause.rank, "kind": str(cause.kind), "where": cause.where}
        self._observer.event("rank_failed", fields)
        return error_of_all(faults, secondary)

    def _stop_ranks(self) -> None:
        """Ask all ranks to stop, and tell them after which step when all have answered."""
        if not self._stop.is_asked:
            self._stop.is_asked = True
            report_stopping(self._observer)
            self._listener.send_to_all(Hold())
        # One that is away may never answer; when it wakes, it finds both messages in its connection.
        answering = [rank for rank in self._loops if not rank.is_done and not self._lost_ranks.is_away(rank.number)]
        last = self._stop.agreed({rank.number for rank in answering})
        if last is not None:
            self._listener.send_to_all(StopAfter(last))

    def _is_ours(self, pid: int) -> bool:
        # A pid of another container, or a reused one, does not have this job's token in its environment.
        try:
            return self._token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False

    def _receive_last_output(self) -> None:
        """Receive the output of finished ranks from the agents that started them, until their processes have ended."""
        deadline_seconds = time.monotonic() + LAST_WORDS_SECONDS
        while any(rank.number not in self._exited for rank in self._ranks if not rank.is_lost):
            try:
                self._receive_output(self._inbox.get(timeout=max(0.0, deadline_seconds - time.monotonic())))
            except queue.Empty:
                return

    def _receive_output(self, received: Received | RankFault) -> None:
        """Of what comes when all is done: the end of a process is no longer a fault."""
        if isinstance(received, Received) and isinstance(received.message, Output):
            self._handle(received)
        elif isinstance(received, Received) and isinstance(received.message, RankExit):
            self._exited.add(received.rank)

    def _on_received(self, received: Received) -> None:
        """Runs in the connection's thread: while the main thread is busy, the rank must not count as silent."""
        if received.role == "rank":
            self._ranks[received.rank].seen_seconds = received.seen_seconds
        self._inbox.put(received)

    def _handle(self, received: Received | RankFault) -> None:
        if isinstance(received, RankFault):
            self._record_fault(received)
            return
        rank = self._ranks[received.rank]
        match received.message:
            case Hello(role="rank", host=host, pid=pid) as hello:
                rank.hello, rank.is_connected, rank.progress_seconds = hello, True, received.seen_seconds
                self._observer.event("rank_started", {"rank": received.rank, "host": host, "pid": pid})
                if self._stop.is_asked:
                    # It came after the others were asked; they only repeat their answer.
                    self._listener.send_to_all(Hold())
            case Heartbeat() as beat if received.role == "rank":
                self._deadlines.heartbeat(rank, beat, received.seen_seconds)
            case Step(report):
                self._deadlines.progress(rank, received.seen_seconds)
                for each in (rank, *self._serving):
                    each.last_step = Cursor(report.epoch, report.step)
                if not self._lost_ranks.may_lose(received.rank) and (step := self._steps.add(report)) is not None:
                    self._observer.step(step)
            case Event(name, fields):
                self._deadlines.progress(rank, received.seen_seconds)
                self._observer.event(name, {"rank": received.rank, **fields})
            case Exchange() as given:
                self._pass_on(given, rank, received.seen_seconds)
            case Begun(global_step):
                self._stop.answer(received.rank, global_step)
            case Finished() | Stopped() as last_words:
                if isinstance(last_words, Finished):
                    rank.result = last_words.result
                else:
                    rank.stopped = last_words
                # The exit of its process may have been seen before its result was read from the connection.
                self._faults.pop(received.rank, None)
            case Failure(collective=collective) as failure:
                kind = FaultKind.COLLECTIVE if collective else FaultKind.FAILED
                self._record_fault(replace(rank.fault(kind, received.seen_seconds), failure=failure))
            case Output(text):
                self._observer.event(OUTPUT, {"rank": received.rank, "text": text})
            case RankExit(returncode, output_tail):
                self._exited.add(received.rank)
                fault = rank.fault(FaultKind.KILLED, received.seen_seconds)
                self._record_fault(replace(fault, returncode=returncode, output_tail=output_tail))
            case None if received.role == "rank":
                rank.is_connected = False
                self._record_fault(rank.fault(FaultKind.KILLED, received.seen_seconds))
        self._lost_ranks.progressed(rank)

    def _pass_on(self, given: Exchange, rank: WatchedRank, seen_seconds: float) -> None:
        """To all, when the last rank has given its part."""
        if given.lane == "main":
            self._deadlines.progress(rank, seen_seconds)
        if (answer := self._exchanges.add(rank.number, given)) is not None:
            if given.lane == "aside":
                # All have stored their files; rank 0 waits for this answer with the checkpoint's marker.
                self._observer.event(BEFORE_CHECKPOINT, {"rank": rank.number})
            self._listener.send_to_all(answer)

    def _record_fault(self, fault: RankFault) -> None:
        is_known = fault.rank in self._faults
        if fault.rank >= 0 and not is_known and self._lost_ranks.takes(self._ranks[fault.rank], fault):
            return
        if fault.rank < 0 or not self._ranks[fault.rank].is_done:
            self._faults[fault.rank] = merged(self._faults.get(fault.rank), fault)
