"""Which rank is late, which caused it, which of several faults is told; the clock is a number here."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from shardmill.errors import IntegrityError
from shardmill.stores.local import LocalStore
from shardmill.values import Cursor
from tests.train.driver_process import ROOT
from train.config import TrainConfig
from train.contracts.activities import Activity, reading, waiting
from train.contracts.values import from_json
from train.launching.deadlines import PATIENCE, TRUSTED, UNTIMED, ActivityClock, Deadlines, heartbeat_of
from train.launching.messages import Failure, Heartbeat, Hello
from train.launching.rank_failures import FaultKind, RankFault, error_of, failure_of, is_cause_known, merged, root_cause
from train.launching.watchdog import ABORT_SECONDS, TICK_SECONDS
from train.settings import WatchConfig
from train.strategies.horovod import HOROVOD


def started(world_size: int, **limits: float) -> Deadlines:
    """All ranks said hello at 0 s, and a first step at 1 s."""
    watch = WatchConfig.model_validate({"silent_seconds": 1e9, **limits})
    deadlines = Deadlines(
        TrainConfig(num_workers=world_size, strategy="multi_worker_mirrored", launcher="local", watch=watch), 0.0
    )
    for rank in deadlines.ranks:
        rank.hello, rank.is_connected = Hello("rank", rank.number, f"host{rank.number}", 1, "", ""), True
        deadlines.progress(rank, 1.0)
        rank.last_step = Cursor(0, 0)
    return deadlines


def test_the_rank_that_holds_up_the_others_is_named():
    deadlines = started(4, progress_timeout_seconds=100)
    for rank in deadlines.ranks:
        # Rank 2 comes latest of all and then stands; the others have long been waiting for it.
        beat = Heartbeat(1, Activity("its own work")) if rank.number == 2 else Heartbeat(1, waiting("an allreduce"))
        deadlines.heartbeat(rank, beat, 2.0 + (rank.number == 2))
    assert deadlines.missed(103.0) == []
    (fault,) = deadlines.missed(104.0)
    assert (fault.kind, fault.rank) == (FaultKind.STALLED, 2)
    told = str(error_of(fault))
    assert "rank 2 (host host2, pid 1) hangs after step 0 of epoch 0: no progress for 101 s" in told
    assert "in its own work; rank 0, 1, 3 waiting in an allreduce" in told


def test_a_long_pause_is_reported_once_before_it_is_a_fault():
    deadlines = started(3, silent_seconds=60, progress_timeout_seconds=600)
    for rank in deadlines.ranks:
        rank.seen_seconds = 1e9
        beat = Heartbeat(1, Activity("reading a batch")) if rank.number == 1 else Heartbeat(1, waiting("an allreduce"))
        deadlines.heartbeat(rank, beat, 2.0)
    assert deadlines.paused(62.0) == []
    ((rank, sentence),) = deadlines.paused(63.0)
    assert rank.number == 1 and sentence == (
        "rank 1 (host host1, pid 1) has made no progress for 61 s in reading a batch (train.watch.silent_seconds = "
        "60); after 600 s it will be killed (train.watch.progress_timeout_seconds = 600)"
    )
    assert deadlines.paused(400.0) == deadlines.missed(602.0) == []
    assert [fault.rank for fault in deadlines.missed(603.0)] == [1]
    # It goes on. Where pauses are that long, only a much longer one is news.
    deadlines.progress(rank, 603.0)
    assert deadlines.paused(603.0 + 2 * 601) == []
    assert [rank.number for rank, _ in deadlines.paused(603.0 + 2 * 601 + 1)] == [1]


def test_a_rank_that_works_while_the_others_wait_may_take_as_long_as_it_moves():
    deadlines = started(2, progress_timeout_seconds=10)
    waits, working = deadlines.ranks
    deadlines.heartbeat(waits, Heartbeat(1, waiting("a gather")), 2.0)
    for second in range(2, 10_000, 5):
        deadlines.heartbeat(working, Heartbeat(second, Activity("the evaluation on test")), float(second))
        assert deadlines.missed(second + 4.0) == []


def test_ranks_that_all_wait_for_each_other_are_a_fault_of_none():
    deadlines = started(2, progress_timeout_seconds=10)
    for rank, place in zip(deadlines.ranks, ("an allreduce", "a barrier"), strict=True):
        deadlines.heartbeat(rank, Heartbeat(1, waiting(place)), 2.0)
    (fault,) = deadlines.missed(13.0)
    assert fault.rank == -1
    told = str(error_of(fault))
    assert "all ranks are waiting for each other" in told and "rank 0 waiting in an allreduce; rank 1" in told


def test_ranks_that_wait_for_one_that_has_finished_are_found():
    deadlines = started(2, progress_timeout_seconds=10)
    left, waits = deadlines.ranks
    left.is_connected = False
    deadlines.heartbeat(waits, Heartbeat(1, waiting("an allreduce")), 2.0)
    assert deadlines.missed(11.0) == []
    (fault,) = deadlines.missed(13.0)
    assert (fault.kind, fault.rank) == (FaultKind.STALLED, -1)
    assert "the only busy rank is waiting for others" in str(error_of(fault))


def test_neither_the_start_nor_waiting_makes_the_driver_patient():
    deadlines = started(2, progress_timeout_seconds=10)
    one, other = deadlines.ranks
    other.last_step = None
    deadlines.progress(other, 50.0)
    other.last_step = Cursor(0, 0)
    deadlines.heartbeat(one, Heartbeat(1, waiting("an allreduce")), 2.0)
    deadlines.progress(one, 50.0)
    one.doing = Heartbeat(1, Activity("its own work"))
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


STEP, READ = Activity("a step", repeats=True), Activity("reading a batch", repeats=True)
ALLREDUCE = waiting("an allreduce")
OFTEN = TRUSTED + UNTIMED


class Rank:
    """One as its process is: its own clock, and heartbeats each time it begins something."""

    def __init__(self, deadlines: Deadlines, number: int, now: float = 1.0) -> None:
        self.clock = ActivityClock(now)
        self.now = now
        self._deadlines, self._state = deadlines, deadlines.ranks[number]
        # Its heartbeats go on.
        self._state.seen_seconds = 1e9

    def begins(self, activity: Activity) -> None:
        self.clock.begin(activity, self.now)
        self._deadlines.heartbeat(self._state, heartbeat_of(self.clock), self.now)

    def takes(self, seconds: float, activity: Activity) -> None:
        self.begins(activity)
        self.now += seconds
        self.begins(Activity())

    def steps(self, num_steps: int, seconds: float) -> None:
        for _ in range(num_steps):
            self.takes(seconds, STEP)


def test_a_step_that_sleeps_is_named_and_ended_within_a_minute_by_the_defaults():
    deadlines = started(2, silent_seconds=TrainConfig().watch.silent_seconds)
    ranks = [Rank(deadlines, 0), Rank(deadlines, 1)]
    for rank in ranks:
        # The first one is traced.
        rank.takes(40.0, STEP)
        rank.steps(OFTEN, 0.2)
    ranks[0].begins(ALLREDUCE)
    ranks[1].begins(STEP)
    began = ranks[1].now
    for second in range(55):
        assert deadlines.missed(began + second) == deadlines.paused(began + second) == []
    (fault,) = deadlines.missed(began + 59)
    assert (fault.kind, fault.rank) == (FaultKind.STALLED, 1)
    told = str(error_of(fault))
    assert "rank 1 (host host1, pid 1) hangs after step 0 of epoch 0: no progress for 59 s" in told
    assert "silent_seconds = 55, the longest so far took 0.2 s; 55 s are allowed) in a step; rank 0" in told


@pytest.mark.parametrize("activity", [Activity("a trial of the export"), Activity(), STEP, READ])
def test_what_was_not_repeated_often_has_longer(activity: Activity):
    """A first step, a first evaluation, an export, a checkpoint: nobody knows yet what it takes."""
    deadlines = started(1, silent_seconds=60)
    rank = Rank(deadlines, 0)
    for _ in range(OFTEN - 1):
        rank.takes(0.1, activity)
    rank.begins(activity)
    assert deadlines.missed(rank.now + 599) == []
    ((_, sentence),) = deadlines.paused(rank.now + 61)
    assert "after 600 s it will be killed (train.watch.progress_timeout_seconds = 600)" in sentence
    assert len(deadlines.missed(rank.now + 601)) == 1


def test_a_straggler_is_spared_by_what_any_rank_took_for_the_same():
    deadlines = started(2, silent_seconds=60)
    fast, slow = Rank(deadlines, 0), Rank(deadlines, 1)
    for rank in (fast, slow):
        rank.steps(OFTEN, 20.0)
        for _ in range(OFTEN):
            rank.takes(1.0, READ)
    # Eight times as long as before; what the others waited for it tells nothing.
    slow.begins(STEP)
    fast.takes(170.0, ALLREDUCE)
    assert deadlines.missed(slow.now + 160.0) == []
    slow.takes(160.0, STEP)
    slow.begins(STEP)
    assert deadlines.missed(slow.now + 1599.0) == []
    # That a step takes so long is no reason to wait as long for a batch.
    slow.begins(READ)
    fast.begins(ALLREDUCE)
    assert [fault.rank for fault in deadlines.missed(slow.now + 61.0)] == [1]


class Retrying(LocalStore):
    deadline_seconds = 135.0


class Unknown(LocalStore):
    deadline_seconds = None


@pytest.mark.parametrize(
    ("store", "timeout_seconds", "limit_seconds"),
    [
        (LocalStore, 600, 60),
        # It fails at its deadline, with an error that says more than a timeout.
        (Retrying, 600, 165),
        # Whose package does not say how long it repeats.
        (Unknown, 600, 600),
        # What a person allows is all there is.
        (LocalStore, 30, 30),
        (Retrying, 100, 100),
    ],
)
def test_a_read_has_the_time_that_its_store_may_take(store, timeout_seconds, limit_seconds, tmp_path):
    deadlines = started(1, silent_seconds=60, progress_timeout_seconds=timeout_seconds)
    rank, read = Rank(deadlines, 0), reading("reading a batch", store(str(tmp_path)))
    for _ in range(OFTEN):
        rank.takes(0.1, read)
    rank.begins(read)
    assert deadlines.missed(rank.now + limit_seconds - 1) == []
    assert len(deadlines.missed(rank.now + limit_seconds + 1)) == 1


def test_a_rank_that_may_wait_unseen_for_one_with_time_left_is_not_blamed():
    """Inside a step, on a GPU's stream, for a rank whose storage repeats a request."""
    deadlines = started(2, silent_seconds=60)
    waits_unseen, reads = Rank(deadlines, 0), Rank(deadlines, 1)
    patient = Activity("reading a batch", repeats=True, may_take_seconds=165)
    for _ in range(OFTEN):
        waits_unseen.takes(0.1, STEP)
        reads.takes(0.1, patient)
    waits_unseen.begins(STEP)
    reads.begins(patient)
    assert deadlines.missed(reads.now + 160.0) == []
    assert [fault.rank for fault in deadlines.missed(reads.now + 166.0)] == [0, 1]
    # One that goes on has nothing to do with it.
    reads.now += 150
    reads.begins(patient)
    assert [fault.rank for fault in deadlines.missed(reads.now + 1.0)] == [0]


def test_the_first_step_has_the_time_of_the_start_as_well():
    deadlines = started(1, progress_timeout_seconds=10, start_timeout_seconds=30)
    deadlines.ranks[0].last_step = None
    assert deadlines.missed(1.0 + 39) == []
    assert "before its first step" in str(error_of(deadlines.missed(1.0 + 41)[0]))


def test_a_driver_that_stood_still_blames_nobody():
    deadlines = started(2, progress_timeout_seconds=10)
    deadlines.restart_clocks(1000.0)
    assert deadlines.missed(1009.0) == []


def test_collectives_inside_a_step_do_not_make_it_many_steps():
    clock = ActivityClock(0.0)
    for second in range(UNTIMED):
        # The first steps compile, for 50 seconds each.
        clock.begin(STEP, 100.0 * second)
        for place in range(40):
            clock.begin(ALLREDUCE, 100.0 * second + place)
            clock.begin(STEP, 100.0 * second + place + 0.5)
        clock.begin(Activity(), 100.0 * second + 90)
    [timed] = clock.timed
    assert (timed.num_finished, timed.longest_seconds) == (0, 0.0)
    clock.begin(STEP, 1000.0)
    clock.begin(Activity(), 1002.0)
    [timed] = clock.timed
    assert (timed.num_finished, timed.longest_seconds) == (1, 2.0)


def test_time_in_a_debugger_is_no_measure():
    clock = ActivityClock(0.0)
    for second in range(UNTIMED + 1):
        clock.begin(STEP, float(second))
        clock.begin(Activity(), second + 0.5)
    clock.begin(STEP, 10.0)
    clock.restart(1800.0)
    clock.begin(Activity(), 1801.0)
    [timed] = clock.timed
    assert timed.longest_seconds == 1.0


def test_a_window_that_must_be_filled_has_its_time():
    assert reading("a batch", LocalStore("."), most_bytes=2_000_000_000).may_take_seconds == 200.0


HOROVODS_SECONDARY = HOROVOD.secondary_error
SECONDARY = RuntimeError("HorovodInternalError: [gloo/transport/tcp/pair.cc:598] Connection closed by peer")


def fault(kind: FaultKind, rank: int, seen_seconds: float, error: Exception | None = None, **more) -> RankFault:
    failure = failure_of(error, HOROVODS_SECONDARY) if error is not None else None
    return RankFault(kind, rank, "host a, pid 1", seen_seconds, failure=failure, **more)


@pytest.mark.parametrize(
    ("faults", "rank"),
    [
        pytest.param([fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.KILLED, 1, 1.1)], 1,
                     id="killed after its secondary error"),
        pytest.param([fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.FAILED, 2, 1.2, ValueError("x"))],
                     2, id="own error after its secondary error"),
        pytest.param([fault(FaultKind.FAILED, 2, 1.2, ValueError("x")),
                      fault(FaultKind.FAILED, 1, 1.1, ValueError("y"))], 1, id="the first of two own errors"),
        pytest.param([fault(FaultKind.LAUNCHER, -1, 1.0), fault(FaultKind.KILLED, 1, 2.0)], 1,
                     id="the launcher knows less"),
        pytest.param([fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY), fault(FaultKind.LAUNCHER, -1, 1.5)], -1,
                     id="but more than a secondary error"),
        pytest.param([fault(FaultKind.KILLED, 0, 1.0, returncode=-signal.SIGABRT,
                            output_tail="terminate called after throwing an instance of 'gloo::IoException'"),
                      fault(FaultKind.KILLED, 1, 1.1, returncode=-signal.SIGKILL)], 1,
                     id="a survivor that Gloo aborted"),
        pytest.param([fault(FaultKind.COLLECTIVE, 1, 1.1, SECONDARY), fault(FaultKind.COLLECTIVE, 0, 1.0, SECONDARY)],
                     0, id="secondary errors alone"),
    ],
)  # fmt: skip
def test_the_cause_is_chosen(faults, rank):
    assert root_cause(faults, HOROVODS_SECONDARY).rank == rank
    assert root_cause(reversed(faults), HOROVODS_SECONDARY).rank == rank


def test_a_dead_rank_is_known_within_seconds_in_whatever_order_its_end_is_seen():
    """Well within 10 s: what is left of them is for the driver to look, and for the other ranks to end."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(1000):
        dead, *survivors = chance.sample(range(8), 1 + chance.randrange(1, 4))
        # The kernel closes its connection; who started it tells its exit; the others lose it in the middle of a sum.
        signs = [fault(FaultKind.KILLED, dead, chance.uniform(0, 2))]
        signs += [fault(FaultKind.KILLED, dead, chance.uniform(0, 2), returncode=-signal.SIGKILL)]
        signs += [fault(FaultKind.COLLECTIVE, rank, chance.uniform(0, 30), SECONDARY) for rank in survivors]
        signs += [fault(FaultKind.LAUNCHER, -1, chance.uniform(0, 30))] * chance.randrange(2)
        now, seen = 0.0, {}
        while not (seen and is_cause_known(seen.values(), now)):
            now += TICK_SECONDS
            for sign in signs:
                if now - TICK_SECONDS <= sign.seen_seconds < now:
                    seen[sign.rank] = merged(seen.get(sign.rank), sign)
            assert now < 10 - ABORT_SECONDS - 2.0
        assert root_cause(seen.values(), HOROVODS_SECONDARY).rank == dead


def test_two_sights_of_one_end_become_one():
    lost = fault(FaultKind.KILLED, 1, 1.0, last_step=Cursor(2, 7))
    seen = fault(FaultKind.KILLED, 1, 1.3, returncode=-signal.SIGSEGV)
    assert "was killed by SIGSEGV after step 7 of epoch 2" in str(error_of(merged(lost, seen)))
    told = fault(FaultKind.FAILED, 1, 1.4, ValueError("boom"))
    both = merged(merged(lost, seen), told)
    assert both.seen_seconds == 1.0
    assert "ValueError: boom" in str(error_of(both))


def test_an_error_of_ours_keeps_its_class_and_parts():
    found = IntegrityError("shard a is short", "expected 10 bytes", "run verify")
    error = error_of(fault(FaultKind.FAILED, 3, 1.0, found))
    assert isinstance(error, IntegrityError)
    assert str(error) == "shard a is short (rank 3, host a, pid 1); expected 10 bytes; run verify"


def test_a_traceback_is_a_note_and_the_line_names_its_place():
    try:
        raise ValueError("boom\nin two lines")
    except ValueError as error:
        told = error_of(fault(FaultKind.FAILED, 0, 1.0, error))
    assert "\n" not in str(told)
    assert "ValueError: boom in two lines (" in str(told) and "test_deadlines.py:" in str(told)
    assert "Traceback (most recent call last)" in told.__notes__[0]


GRAPH_ERROR = """Graph execution error:

Detected at node model_1/layer_1/GatherV2 defined at (most recent call last):
  File "{root}/train/rank/worker.py", line 192, in _train_steps

  File "{folder}/my_model.py", line 12, in call

indices = 7 is not in [0, 2)
\t [[{{{{node model_1/layer_1/GatherV2}}}}]] [Op:__inference_gradients_196]"""
TRACED_ERROR = """in user code:

    File "{folder}/my_model.py", line 12, in call  *
        return a + b

    ValueError: Dimensions must be equal
"""
CALLED_ERROR = """ValueError: the layer exploded
Traceback (most recent call last):

  File "{folder}/my_model.py", line 12, in explode
    raise ValueError("the layer exploded")
    ^^^^^^^^

ValueError: the layer exploded
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GRAPH_ERROR, "indices = 7 is not in [0, 2)"),
        (TRACED_ERROR, "Dimensions must be equal"),
        (CALLED_ERROR, "the layer exploded"),
    ],
)
def test_of_what_tensorflow_writes_into_an_error_the_cause_and_the_place_are_reported(text, said, tmp_path):
    """The texts are those of TensorFlow 2.18."""
    told = str(error_of(fault(FaultKind.FAILED, 0, 1.0, ValueError(text.format(folder=tmp_path, root=ROOT)))))
    assert told.startswith(
        f"rank 0 (host a, pid 1) failed before its first step: ValueError: {said} ({tmp_path}/my_model.py:12); "
    )


def test_the_place_is_the_users_own_line_and_not_where_a_library_raised(tmp_path):
    """Whatever lies in between: our loop calls the user's model, which calls a library, which calls others."""
    (tmp_path / "my_model.py").write_text("import json\n\ndef build(text):\n    return json.loads(text)\n")
    namespace = {}
    exec(compile((tmp_path / "my_model.py").read_text(), tmp_path / "my_model.py", "exec"), namespace)
    try:
        namespace["build"]("no JSON")
    except ValueError as error:
        told = str(error_of(fault(FaultKind.FAILED, 0, 1.0, error)))
    assert f"({tmp_path}/my_model.py:4)" in told
    # Nothing of the user's in it: where it was raised.
    with ThreadPoolExecutor(1) as executor:
        ours = executor.submit(from_json, Failure, b"no JSON").exception()
    assert ours is not None and "/pydantic/" in failure_of(ours).place


def test_what_horovod_says_of_another_rank_is_a_secondary_error_however_it_is_wrapped():
    assert failure_of(SECONDARY, HOROVODS_SECONDARY).collective
    try:
        try:
            raise SECONDARY
        except RuntimeError as inner:
            raise ValueError("step failed") from inner
    except ValueError as outer:
        assert failure_of(outer, HOROVODS_SECONDARY).collective
    assert not failure_of(ValueError("connection to the database refused"), HOROVODS_SECONDARY).collective
