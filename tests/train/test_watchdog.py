"""The driver's ear: who may speak, what is heard, and which of several faults is told."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import train.launching.connection
import train.launching.rank_failures
import train.launching.watchdog
from shardmill.errors import TrainingError
from shardmill.jobs.observer import WARNING, SilentObserver
from shardmill.jobs.process import Terminated, raise_on_signals
from shardmill.values import Cursor
from tests.processes import in_own_process
from tests.train.launch_workers import result_of, watched_task
from tests.train.training import DriverRecorder
from train.contracts.task import WorkerTask
from train.contracts.values import BEFORE_CHECKPOINT, OUTPUT, StepReport, from_json
from train.contracts.world import Role, World
from train.launching import messages
from train.launching.connection import (
    ADDRESS_VARIABLE,
    MAX_PENDING,
    MAX_PENDING_PER_RANK,
    TOKEN_VARIABLE,
    VANISHED_SECONDS,
    Connection,
    ProtocolError,
    Received,
    call_driver,
    is_proof,
    new_token,
    proof_of,
)
from train.launching.deadlines import WatchedRank
from train.launching.messages import Abort, Challenge, Finished, Heartbeat, Hello, RankExit, Step
from train.launching.rank_failures import FaultKind, failure_of
from train.launching.watchdog import LostRanks, Watchdog
from train.reporting.observer import StepAssembler
from train.reporting.run_log import RunLog
from train.strategies.horovod import HOROVOD

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.needs("horovod")


@pytest.fixture
def watchdog():
    with Watchdog(watched_task(2), "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
        yield watchdog


def called(watchdog: Watchdog, rank: int, role: str = "rank") -> Connection:
    there = watchdog.environment()
    return call_driver(there[ADDRESS_VARIABLE], there[TOKEN_VARIABLE], role, rank, pid=2**22 + rank)[0]


def finish(watchdog: Watchdog, rank: int) -> None:
    called(watchdog, rank).send(Finished(result_of(watched_task(2), World(rank, 2))))
    watchdog.report_exit(rank, RankExit(0, ""))


def test_a_rank_gets_its_task_after_its_hello(watchdog):
    there = watchdog.environment()
    _, welcome = call_driver(there[ADDRESS_VARIABLE], there[TOKEN_VARIABLE], "rank", 0, pid=1)
    assert from_json(WorkerTask, welcome.task_json) == watched_task(2)
    assert welcome.worker == "none:none"


def test_strangers_are_not_heard(watchdog):
    address = watchdog.environment()[ADDRESS_VARIABLE]
    # Somebody who does not know the token, who talks nonsense, who says nothing, and a rank that cannot be.
    with pytest.raises(ProtocolError):
        call_driver(address, new_token(), "rank", 0, pid=1)
    host, port = address.split(":")
    nonsense = socket.create_connection((host, int(port)))
    nonsense.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100_000 + b"\n")
    silent = socket.create_connection((host, int(port)))
    with pytest.raises(ProtocolError):
        called(watchdog, 2)
    finish(watchdog, 0)
    finish(watchdog, 1)
    assert watchdog.watch().world_size == 2
    nonsense.close()
    silent.close()


def test_a_rank_accepts_no_driver_without_the_token():
    listener = socket.create_server(("127.0.0.1", 0))
    heard = []

    def pretend():
        peer = Connection(listener.accept()[0])
        peer.send(Challenge("0" * 32))
        heard.append(peer.receive())
        # Sends back what it got, which is all that it has.
        peer.send(heard[0])

    threading.Thread(target=pretend, daemon=True).start()
    token = new_token()
    with pytest.raises(ProtocolError, match="does not know this job's token"):
        call_driver(f"127.0.0.1:{listener.getsockname()[1]}", token, "rank", 0, pid=1)
    assert isinstance(heard[0], Hello) and token not in str(heard[0])
    # What a rank proves is of no use to one who wants to pose as the driver.
    assert proof_of(token, "rank", "0" * 32) != proof_of(token, "driver", "0" * 32)
    listener.close()


def test_a_proof_that_is_no_ascii_is_wrong():
    assert not is_proof(new_token(), "rank", "nonce", "\u00e9\ud800")


def connected(watchdog: Watchdog) -> socket.socket:
    host, port = watchdog.environment()[ADDRESS_VARIABLE].split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def is_open(caller: socket.socket) -> bool:
    caller.settimeout(0.01)
    try:
        while caller.recv(4096):
            pass
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def test_a_stranger_who_dribbles_has_one_deadline_for_the_whole_handshake(watchdog, monkeypatch):
    monkeypatch.setattr(train.launching.connection, "HANDSHAKE_TIMEOUT_SECONDS", 1.0)
    slow = connected(watchdog)
    hangs = time.monotonic() + 60
    while is_open(slow) and time.monotonic() < hangs:
        try:
            slow.sendall(b"x")
        except OSError:
            break
        time.sleep(0.1)
    assert time.monotonic() < hangs


def test_a_crowd_of_strangers_keeps_no_rank_out_and_holds_few_places(watchdog):
    crowd = [connected(watchdog) for _ in range(300)]
    finish(watchdog, 0)
    finish(watchdog, 1)
    assert watchdog.watch().world_size == 2
    assert sum(map(is_open, crowd)) <= MAX_PENDING + 2 * MAX_PENDING_PER_RANK
    for caller in crowd:
        caller.close()


@pytest.mark.starts("program")
def test_the_door_stays_open_after_file_descriptors_ran_out():
    command = [sys.executable, "-m", "tests.programs.watch_without_descriptors"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_closed_door_frees_its_port():
    with Watchdog(watched_task(1), "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
        host, port = watchdog.environment()[ADDRESS_VARIABLE].split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=5)


def test_ranks_that_do_not_start_are_named():
    task = watched_task(2, start_timeout_seconds=0.1)
    with Watchdog(task, "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
        connection = called(watchdog, 0)
        watchdog._handle(watchdog._inbox.get(timeout=60))
        with pytest.raises(TrainingError, match=r"1 of 2 ranks did not start within .* = 0.1: rank 1"):
            watchdog.watch()
        connection.close()


def test_a_deadline_that_has_passed_is_judged_by_all_that_has_come(monkeypatch):
    monkeypatch.setattr(train.launching.rank_failures, "GRACE_SECONDS", -1.0)
    task = watched_task(2, start_timeout_seconds=0.001)
    with Watchdog(task, "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
        for rank in range(2):
            watchdog._on_received(Received("rank", rank, Hello("rank", rank, "host", 7, "", ""), time.monotonic()))
            finished = Finished(result_of(watched_task(2), World(rank, 2)))
            watchdog._on_received(Received("rank", rank, finished, time.monotonic()))
            watchdog.report_exit(rank, RankExit(0, ""))
        time.sleep(0.01)
        assert watchdog.watch().world_size == 2


def test_when_it_fails_all_ranks_are_asked_to_end():
    with pytest.raises(TrainingError, match="rank 1 .* was killed"):
        with Watchdog(watched_task(2), "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
            survivor, victim = called(watchdog, 0), called(watchdog, 1)
            victim.close()
            watchdog.watch()
    assert isinstance(survivor.receive(), Abort)
    assert survivor.receive() is None


def test_a_rank_with_an_open_connection_that_says_nothing_is_silent():
    with Watchdog(watched_task(2, silent_seconds=1), "none:none", RunLog(SilentObserver()), "127.0.0.1") as watchdog:
        started = time.monotonic()
        connections = called(watchdog, 0), called(watchdog, 1)
        finish(watchdog, 0)
        with pytest.raises(TrainingError, match="rank 1 .* stopped sending heartbeats before its first step"):
            watchdog.watch()
        assert time.monotonic() - started > 1
        assert len(connections) == 2


def test_output_after_the_results_is_reported_and_no_end_of_a_process_is_a_fault_then(monkeypatch):
    monkeypatch.setattr(train.launching.watchdog, "LAST_WORDS_SECONDS", 60.0)
    observer = DriverRecorder()
    with Watchdog(watched_task(2), "none:none", observer, "127.0.0.1") as watchdog:
        for rank in range(2):
            called(watchdog, rank).send(Finished(result_of(watched_task(2), World(rank, 2))))

        def end() -> None:
            watchdog.report_exit(0, RankExit(0, ""))
            watchdog.report_launcher_failure("it was ended")
            watchdog.report_output(1, "last words")
            watchdog.report_exit(1, RankExit(1, "tail"))

        # As soon as `watch` has the results; it waits for both processes.
        wait = watchdog._receive_last_output

        def end_and_wait() -> None:
            threading.Thread(target=end).start()
            wait()

        monkeypatch.setattr(watchdog, "_receive_last_output", end_and_wait)
        assert watchdog.watch().world_size == 2
        assert (OUTPUT, {"rank": 1, "text": "last words"}) in observer.events
    assert not observer.named("rank_failed")


def test_what_all_ranks_gave_goes_to_all_and_announces_a_checkpoint_if_it_was_given_aside():
    observer = DriverRecorder()
    with Watchdog(watched_task(2), "none:none", observer, "127.0.0.1") as watchdog:
        ranks = [called(watchdog, rank) for rank in range(2)]
        for _ in ranks:
            # Its hello is told once its connection is among those that get answers.
            watchdog._handle(watchdog._inbox.get(timeout=60))
        for lane, announced in (("main", []), ("aside", [(BEFORE_CHECKPOINT, {"rank": 1})])):
            observer.events.clear()
            for rank in range(2):
                watchdog._handle(Received("rank", rank, messages.Exchange(f"0{rank}", lane), 0.0))
            assert [each.receive() for each in ranks] == [messages.Exchanged(("00", "01"), lane)] * 2
            assert observer.events == announced


def test_a_rank_whose_connection_has_closed_is_killed_and_not_silent_as_well(watchdog):
    hello = Hello("rank", 1, "host", 7, "", "")
    watchdog._handle(Received("rank", 1, hello, 1.0))
    assert [fault.rank for fault in watchdog._deadlines.missed(1e6) if fault.kind == FaultKind.SILENT] == [1]
    watchdog._handle(Received("agent", 1, None, 2.0))
    assert not watchdog._faults, "its agent has gone, which says nothing of the rank"
    watchdog._handle(Received("rank", 1, None, 2.0))
    assert not [fault for fault in watchdog._deadlines.missed(1e6) if fault.kind == FaultKind.SILENT]
    [fault] = watchdog._faults.values()
    assert (fault.rank, fault.kind, fault.where) == (1, FaultKind.KILLED, "host host, pid 7")


def begun(*roles: Role) -> list[WatchedRank]:
    """Ranks that have made a step, seen at 10 s."""
    return [
        WatchedRank(number, role, last_step=Cursor(0, 0), progress_seconds=10.0) for number, role in enumerate(roles)
    ]


def test_a_rank_that_the_others_can_do_without_is_away_until_it_is_back_or_lost():
    ranks, observer = begun(Role.MEMBER, Role.MEMBER, Role.MEMBER), DriverRecorder()
    lost = LostRanks(ranks, frozenset({1, 2}), observer)
    silent, killed = (ranks[1].fault(kind, 20.0, "it says nothing") for kind in (FaultKind.SILENT, FaultKind.KILLED))
    assert not lost.takes(ranks[0], silent) and lost.takes(ranks[1], silent) and lost.takes(ranks[1], silent)
    assert lost.is_away(1) and observer.named("rank_away") == [
        {"rank": 1, "kind": "silent", "where": "", "what": "it says nothing"}
    ]
    lost.progressed(ranks[1])
    assert lost.is_away(1), "that was before"
    ranks[1].progress_seconds = 21.0
    lost.progressed(ranks[1])
    assert not lost.is_away(1) and observer.named("rank_back") == [{"rank": 1}]
    failed = replace(
        ranks[2].fault(FaultKind.FAILED, 20.0), failure=failure_of(ValueError("boom"), HOROVOD.secondary_error)
    )
    assert lost.takes(ranks[1], killed) and lost.takes(ranks[1], killed) and lost.takes(ranks[2], failed)
    assert ranks[1].is_lost and [each["what"] for each in observer.named("rank_lost")] == [
        "it says nothing", "boom",
    ]  # fmt: skip


def test_who_has_ended_is_not_asked_when_to_stop(watchdog):
    rank = called(watchdog, 1)
    watchdog._handle(watchdog._inbox.get(timeout=60))
    watchdog._loops[0].is_lost = True
    watchdog._stop_ranks()
    assert isinstance(rank.receive(), messages.Hold)
    watchdog._handle(Received("rank", 1, messages.Begun(3), 0.0))
    watchdog._stop_ranks()
    assert isinstance(rank.receive(), messages.StopAfter)


@pytest.mark.parametrize(("returncode", "is_taken"), [(None, True), (-9, True), (-1, True), (0, False), (1, False)])
def test_a_worker_that_something_outside_killed_is_done_without_and_the_last_one_is_not(returncode, is_taken):
    ranks, observer = begun(Role.CHIEF, Role.WORKER, Role.WORKER), DriverRecorder()
    lost = LostRanks(ranks, frozenset(), observer)
    fault = replace(ranks[1].fault(FaultKind.KILLED, 20.0), returncode=returncode)
    assert lost.takes(ranks[1], fault) == ranks[1].is_lost == is_taken == bool(observer.named("rank_lost"))
    assert lost.takes(ranks[1], fault) == is_taken and len(observer.events) == is_taken
    if is_taken:
        assert "1 other(s) take over its work" in observer.named("rank_lost")[0][WARNING]
        assert not lost.takes(ranks[2], ranks[2].fault(FaultKind.KILLED, 21.0))


class AwayThenSigterm(DriverRecorder):
    """Asks the driver to stop when a silo is found to be away."""

    def event(self, name, fields) -> None:
        super().event(name, fields)
        if name == "rank_away":
            os.kill(os.getpid(), signal.SIGTERM)


def stops_while_a_silo_is_away() -> tuple[str, list[str], set[tuple[int, int]]]:
    """Three ranks by their messages alone; the last says nothing until the others have stopped."""
    raise_on_signals()
    task = watched_task(3, "local_sgd", silos=("a@1", "b@1", "c@1"), silent_seconds=1, stop_timeout_seconds=30)
    observer, stopped_after = AwayThenSigterm(), set()
    others_stopped = threading.Semaphore(0)

    def live(number: int, rank: Connection) -> None:
        if number == 2:
            for _ in range(2):
                others_stopped.acquire()
        while (message := rank.receive()) is not None:
            if isinstance(message, messages.Hold):
                rank.send(messages.Begun(number))
            elif isinstance(message, messages.StopAfter):
                stopped_after.add((number, message.global_step))
                rank.send(messages.Stopped("stopped in order"))
                others_stopped.release()

    with Watchdog(task, "none:none", observer, "127.0.0.1") as watchdog:
        ranks = [called(watchdog, number) for number in range(3)]
        for number, rank in enumerate(ranks):
            rank.send(Step(StepReport(number, 0, 0, 4, (0.5).hex())))
            threading.Thread(target=live, args=(number, rank), daemon=True).start()
        beating = threading.Event()

        def beat() -> None:
            while not beating.wait(0.2):
                for rank in ranks[:2]:
                    rank.send(Heartbeat())

        threading.Thread(target=beat, daemon=True).start()
        try:
            watchdog.watch()
        except Terminated as stopped:
            beating.set()
            return str(stopped), observer.names, stopped_after
    raise AssertionError("it did not stop")


@pytest.mark.starts("program")
def test_ranks_stop_in_order_while_a_silo_is_away_which_is_reported_when_it_wakes():
    said, events, stopped_after = in_own_process("none", stops_while_a_silo_is_away)
    # Where a machine is slow, the others are told as paused until they have stopped.
    told = [name for name in events if name != "rank_paused"]
    assert said == "terminated by SIGTERM; stopped in order" and told[-4:-1].count("rank_away") == 1, events
    assert stopped_after == {(0, 1), (1, 1), (2, 1)}


@pytest.mark.starts("program")
def test_a_host_that_vanishes_is_noticed_by_who_only_waits():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        own = socket.create_connection(listener.getsockname())
        connection = Connection(own)
        kept_alive = own.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        names = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (own.getsockopt(socket.IPPROTO_TCP, name) for name in names)
        connection.close()
    assert kept_alive and 0 < idle + interval * count <= VANISHED_SECONDS

    alone = ["unshare", "--map-root-user", "--net"]
    can_run = shutil.which("ip") and shutil.which("unshare")
    if not can_run or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no network of its own can be made here, so none can be cut")
    command = [*alone, sys.executable, "-m", "tests.programs.wait_for_a_vanished_host"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_a_global_step_comes_when_all_ranks_have_done_it():
    steps = StepAssembler(world_size=3)
    reports = [StepReport(rank, 0, 5, 9, (0.25).hex(), (f"a{rank}", f"b{rank}")) for rank in range(3)]
    early = StepReport(2, 0, 6, 9, (0.5).hex(), ("later",))
    assert [steps.add(each) for each in (reports[2], early, reports[0])] == [None, None, None]
    step = steps.add(reports[1])
    assert step is not None
    assert (step.epoch, step.step, step.num_steps, step.loss_hex) == (0, 5, 9, (0.25).hex())
    assert step.sample_ids == ("a0", "b0", "a1", "b1", "a2", "b2")
