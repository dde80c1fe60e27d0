"""Who is late, who is to blame for it, and who only waits: the clock is a number here."""

from __future__ import annotations

import random

from shardmill.values import Cursor
from train.config import TrainConfig
from train.launching.deadlines import PATIENCE, Deadlines
from train.launching.faults import FaultKind, error_of
from train.launching.wire import Heartbeat, Hello


def started(world_size: int, **limits: float) -> Deadlines:
    """All ranks said hello at 0 s, and a first step at 1 s."""
    limits = {"silent_seconds": 1e9, **limits}
    config = TrainConfig(num_workers=world_size, strategy="horovod", launcher="local", **limits)
    deadlines = Deadlines(config, 0.0)
    for rank in deadlines.ranks:
        rank.hello, rank.is_connected = Hello("rank", rank.number, f"host{rank.number}", 1, "", ""), True
        deadlines.progress(rank, 1.0)
        rank.last_step = Cursor(0, 0)
    return deadlines


def test_the_rank_that_holds_up_the_others_is_named():
    deadlines = started(4, progress_timeout_seconds=100)
    for rank in deadlines.ranks:
        # Rank 2 comes latest of all and then stands; the others have long been waiting for it.
        beat = Heartbeat(1, "its own work") if rank.number == 2 else Heartbeat(1, "an allreduce", waits=True)
        deadlines.heartbeat(rank, beat, 2.0 + (rank.number == 2))
    assert deadlines.missed(103.0) == []
    (fault,) = deadlines.missed(104.0)
    assert (fault.kind, fault.rank) == (FaultKind.STALLED, 2)
    told = str(error_of(fault))
    assert "rank 2 (host host2, pid 1) hangs after step 0 of epoch 0: no progress for 101 s" in told
    assert "in its own work; rank 0, 1, 3 waiting in an allreduce" in told


def test_a_long_pause_is_told_once_before_it_is_a_fault():
    deadlines = started(3, silent_seconds=60, progress_timeout_seconds=600)
    for rank in deadlines.ranks:
        rank.seen_seconds = 1e9
        beat = Heartbeat(1, "reading a batch") if rank.number == 1 else Heartbeat(1, "an allreduce", waits=True)
        deadlines.heartbeat(rank, beat, 2.0)
    assert deadlines.paused(62.0) == []
    ((rank, sentence),) = deadlines.paused(63.0)
    assert rank.number == 1 and sentence == (
        "rank 1 (host host1, pid 1) has made no progress for 61 s in reading a batch (train.silent_seconds = 60); "
        "after 600 s it is ended (train.progress_timeout_seconds = 600)"
    )
    assert deadlines.paused(400.0) == deadlines.missed(602.0) == []
    assert [fault.rank for fault in deadlines.missed(603.0)] == [1]
    # It goes on. Where pauses are that long, only a much longer one is news.
    deadlines.progress(rank, 603.0)
    assert deadlines.paused(603.0 + 2 * 601) == []
    assert [rank.number for rank, _ in deadlines.paused(603.0 + 2 * 601 + 1)] == [1]


def test_a_rank_that_works_while_the_others_wait_may_take_as_long_as_it_moves():
    deadlines = started(2, progress_timeout_seconds=10)
    waiting, working = deadlines.ranks
    deadlines.heartbeat(waiting, Heartbeat(1, "a gather", waits=True), 2.0)
    for second in range(2, 10_000, 5):
        deadlines.heartbeat(working, Heartbeat(second, "the evaluation on test"), float(second))
        assert deadlines.missed(second + 4.0) == []


def test_ranks_that_all_wait_for_each_other_are_a_fault_of_none():
    deadlines = started(2, progress_timeout_seconds=10)
    for rank, place in zip(deadlines.ranks, ("an allreduce", "a barrier"), strict=True):
        deadlines.heartbeat(rank, Heartbeat(1, place, waits=True), 2.0)
    (fault,) = deadlines.missed(13.0)
    assert fault.rank == -1
    told = str(error_of(fault))
    assert "all ranks wait for each other" in told and "rank 0 waiting in an allreduce; rank 1 waiting in a" in told


def test_ranks_that_wait_for_one_that_has_finished_are_found():
    deadlines = started(2, progress_timeout_seconds=10)
    left, waiting = deadlines.ranks
    left.is_connected = False
    deadlines.heartbeat(waiting, Heartbeat(1, "an allreduce", waits=True), 2.0)
    assert deadlines.missed(11.0) == []
    (fault,) = deadlines.missed(13.0)
    assert (fault.kind, fault.rank) == (FaultKind.STALLED, -1)
    assert "the only rank at work waits for others" in str(error_of(fault))


def test_neither_the_start_nor_waiting_makes_the_driver_patient():
    deadlines = started(2, progress_timeout_seconds=10)
    one, other = deadlines.ranks
    other.last_step = None
    deadlines.progress(other, 50.0)
    other.last_step = Cursor(0, 0)
    deadlines.heartbeat(one, Heartbeat(1, "an allreduce", waits=True), 2.0)
    deadlines.progress(one, 50.0)
    one.doing = Heartbeat(1, "its own work")
    assert deadlines.missed(59.0) == []
    assert len(deadlines.missed(61.0)) == 2


def test_patience_grows_with_the_longest_pause_so_far():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    deadlines = started(3, progress_timeout_seconds=5)
    now, longest = 1.0, 0.0
    for _ in range(200):
        pause = rng.uniform(0, max(5.0, PATIENCE * longest))
        now += pause
        assert deadlines.missed(now) == []
        longest = max(longest, pause)
        for rank in deadlines.ranks:
            deadlines.progress(rank, now)
        if longest > 1e6:
            break
    assert len(deadlines.missed(now + PATIENCE * longest + 1)) == 3


def test_the_first_step_has_the_time_of_the_start_as_well():
    deadlines = started(1, progress_timeout_seconds=10, start_timeout_seconds=30)
    deadlines.ranks[0].last_step = None
    assert deadlines.missed(1.0 + 39) == []
    assert "before its first step" in str(error_of(deadlines.missed(1.0 + 41)[0]))


def test_a_driver_that_stood_still_blames_nobody():
    deadlines = started(2, progress_timeout_seconds=10)
    deadlines.restart_clocks(1000.0)
    assert deadlines.missed(1009.0) == []
