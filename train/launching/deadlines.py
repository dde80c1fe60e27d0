"""Tracks each rank's state and the deadlines that it has missed: pure, the clock is an argument.

A rank is late in one of three ways: not started, silent (no heartbeat), or stalled (its main thread makes no progress).
The limit of a stall depends on the activity: for activities that ranks repeat (a step, waiting for a batch) the usual
duration is known; all others get `progress_timeout_seconds`.

Why so many cases: one hung rank makes all others late, because they wait for it in a collective, and ending the wrong
rank would lose a healthy one. So a rank that announces that it waits is never a cause while another rank works; and
because collectives inside compiled code are not announced, a late rank is not ended while another rank makes no
progress but is within its limit (`has_time`), up to the late rank's untimed limit, so that a fault always ends. No rank
is named only if all ranks at work are late and waiting. Limits are relative to the slowest rank so far (`PATIENCE`),
because an absolute limit would end slow but healthy trainings; durations count only after `TRUSTED` repetitions,
because early ones include compilation or caches. The clock is the driver's: after it was suspended itself,
`restart_clocks` must run, or all ranks are "lost".
"""

from __future__ import annotations

from dataclasses import dataclass, field

from shardmill.values import Cursor
from train.config import TrainConfig
from train.contracts.activities import Activity
from train.contracts.values import TrainResult
from train.contracts.world import Role
from train.launching.messages import Heartbeat, Hello, Stopped, Timed
from train.launching.rank_failures import FaultKind, RankFault
from train.strategies import roles_of

# A rank may take this many times longer than any rank so far: a straggler is no fault.
PATIENCE = 10.0
# And this many times longer before a warning is logged.
NOTABLE = 2.0
# A rank must have finished an activity this often before its durations are used.
TRUSTED = 20
# The pauses of ranks that wait for each other are observed at times that differ by some heartbeats.
APART_SECONDS = 5.0


@dataclass(slots=True)
class WatchedRank:
    """One rank. Its connection's thread writes `seen_seconds`, the main thread the rest."""

    number: int
    role: Role = Role.MEMBER
    hello: Hello | None = None
    is_connected: bool = False
    result: TrainResult | None = None
    stopped: Stopped | None = None
    """Set when it has stopped together with the others: how far it came."""
    last_step: Cursor | None = None
    seen_seconds: float = 0.0
    progress_seconds: float = 0.0
    """When its last progress was seen."""
    reported_seconds: float = 0.0
    """`progress_seconds` at the beginning of the last pause that was reported."""
    doing: Heartbeat = field(default_factory=Heartbeat)
    is_lost: bool = False
    """Lost, and the others continue without it."""

    def fault(self, kind: FaultKind, seen_seconds: float, what: str = "") -> RankFault:
        """A fault of this rank."""
        return RankFault(kind, self.number, self.where, seen_seconds, what, self.last_step)

    @property
    def where(self) -> str:
        return f"host {self.hello.host}, pid {self.hello.pid}" if self.hello is not None else ""

    @property
    def is_done(self) -> bool:
        """Whether nothing more is expected from it."""
        return self.result is not None or self.stopped is not None or self.is_lost

    @property
    def is_at_work(self) -> bool:
        return self.is_connected and not self.is_done


class Deadlines:
    """All ranks of a training, and how long they may take."""

    def __init__(self, config: TrainConfig, now: float) -> None:
        self.ranks = [WatchedRank(number, role) for number, role in enumerate(roles_of(config))]
        self._limits = config.watch
        self._started_seconds = now
        self._longest_pause_seconds = 0.0
        self._longest_of: dict[str, float] = {}
        """The longest duration of each repeated activity on any rank, in seconds, by its name."""

    def heartbeat(self, rank: WatchedRank, beat: Heartbeat, now: float) -> None:
        """Record what the rank does now; a new activity counts as progress."""
        if beat.num_calls != rank.doing.num_calls:
            self.progress(rank, now)
        rank.doing = beat
        for each in beat.timed:
            self._longest_of[each.what] = max(self._longest_of.get(each.what, 0.0), each.longest_seconds)

    def progress(self, rank: WatchedRank, now: float) -> None:
        # Neither the start nor waiting for another rank is a measure of how long a step may take.
        if rank.last_step is not None and not rank.doing.activity.waits:
            self._longest_pause_seconds = max(self._longest_pause_seconds, now - rank.progress_seconds)
        rank.progress_seconds = max(rank.progress_seconds, now)

    def restart_clocks(self, now: float) -> None:
        """Count all deadlines from `now`: the driver itself was suspended, and cannot know which rank was silent."""
        for rank in self.ranks:
            rank.seen_seconds = rank.progress_seconds = now

    def missed(self, now: float) -> list[RankFault]:
        """The faults of all ranks that are past a deadline at `now`."""
        return [*self._absent(now), *self._silent(now), *self._stalled(now)]

    def paused(self, now: float) -> list[tuple[WatchedRank, str]]:
        """Ranks that delay the others for long but have no fault yet, each with a sentence; a pause is reported
        once."""
        late = [
            rank
            for rank in self.ranks
            # Until its first step a rank builds and compiles, which has no usual duration.
            if rank.is_at_work and rank.last_step is not None and not rank.doing.activity.waits
            # Its heartbeats still come: without them it is silent soon.
            if self._notable_seconds(rank) < min(now, rank.seen_seconds) - rank.progress_seconds
            if now - rank.progress_seconds <= self._limit_seconds(rank)
            if rank.reported_seconds != rank.progress_seconds
        ]
        for rank in late:
            rank.reported_seconds = rank.progress_seconds
        return [(rank, self._paused(rank, now)) for rank in late]

    def _notable_seconds(self, rank: WatchedRank) -> float:
        longest_seconds = self._longest_seconds(rank)
        longest_seconds = self._longest_pause_seconds if longest_seconds is None else longest_seconds
        return max(self._limits.silent_seconds, NOTABLE * longest_seconds)

    def _paused(self, rank: WatchedRank, now: float) -> str:
        return (
            f"rank {rank.number} ({rank.where}) has made no progress for {now - rank.progress_seconds:.0f} "
            f"s{_while(rank)} (train.watch.silent_seconds = {self._limits.silent_seconds:g}); after "
            f"{self._limit_seconds(rank):.0f} s it will be killed ({self._limit_words(rank)})"
        )

    def _absent(self, now: float) -> list[RankFault]:
        limit_seconds = self._limits.start_timeout_seconds
        missing = [rank.number for rank in self.ranks if rank.hello is None]
        if not missing or now - self._started_seconds <= limit_seconds:
            return []
        what = (
            f"{len(missing)} of {len(self.ranks)} ranks did not start within train.watch.start_timeout_seconds = "
            f"{limit_seconds:g}: rank {', '.join(map(str, missing))}"
        )
        return [RankFault(FaultKind.ABSENT, -1, "", now, what)]

    def _silent(self, now: float) -> list[RankFault]:
        limit_seconds = self._limits.silent_seconds
        return [
            rank.fault(
                FaultKind.SILENT,
                now,
                f"no heartbeat for {now - rank.seen_seconds:.0f} s (train.watch.silent_seconds = {limit_seconds:g})",
            )
            for rank in self.ranks
            if rank.is_at_work and now - rank.seen_seconds > limit_seconds
        ]

    def _stalled(self, now: float) -> list[RankFault]:
        """Ranks that delay the others. Those that wait for them in a collective are late too, but are not the cause."""
        at_work = [rank for rank in self.ranks if rank.is_at_work]
        waiting = [rank for rank in at_work if rank.doing.activity.waits]
        late = [rank for rank in at_work if now - rank.progress_seconds > self._limit_seconds(rank)]
        # Not every collective is announced (for example sums of moments inside a graph, or on a GPU's stream). While
        # another rank makes no progress but has time left, the late rank may be waiting for it.
        has_time = any(
            now - rank.progress_seconds > APART_SECONDS and rank not in late and rank not in waiting for rank in at_work
        )
        causes = [
            rank
            for rank in late
            if rank not in waiting
            if not has_time or now - rank.progress_seconds > self._untimed_limit_seconds(rank)
        ]
        if causes:
            behind_it = f"; {_named(waiting)}" if waiting else ""
            return [
                rank.fault(FaultKind.STALLED, now, f"{self._pause(rank, now)}{_while(rank)}{behind_it}")
                for rank in causes
            ]
        if late and len(late) == len(at_work):
            # No rank is missing, so the cause is the network between them, or the rendezvous that gave them their
            # addresses.
            wait = (
                "all ranks are waiting for each other" if len(late) > 1 else "the only busy rank is waiting for others"
            )
            what = f"{wait}, {self._pause(late[0], now)}: {_named(late)}"
            return [RankFault(FaultKind.STALLED, -1, "", now, what)]
        return []

    def _limit_seconds(self, rank: WatchedRank) -> float:
        longest_seconds = self._longest_seconds(rank)
        if longest_seconds is None:
            return self._untimed_limit_seconds(rank)
        enough_seconds = max(self._limits.silent_seconds, rank.doing.activity.may_take_seconds)
        return max(min(enough_seconds, self._limits.progress_timeout_seconds), PATIENCE * longest_seconds)

    def _untimed_limit_seconds(self, rank: WatchedRank) -> float:
        limit_seconds = max(self._limits.progress_timeout_seconds, PATIENCE * self._longest_pause_seconds)
        # Before its first step a rank builds and compiles its model and reads a checkpoint back.
        return limit_seconds + (self._limits.start_timeout_seconds if rank.last_step is None else 0.0)

    def _longest_seconds(self, rank: WatchedRank) -> float | None:
        """The longest duration of this rank's activity on any rank; None unless it is repeated and was finished
        often."""
        what = rank.doing.activity.what
        num_finished = next((each.num_finished for each in rank.doing.timed if each.what == what), 0)
        return self._longest_of[what] if rank.doing.activity.repeats and num_finished >= TRUSTED else None

    def _pause(self, rank: WatchedRank, now: float) -> str:
        pause_seconds, limit_seconds = now - rank.progress_seconds, self._limit_seconds(rank)
        return f"no progress for {pause_seconds:.0f} s ({self._limit_words(rank)}; {limit_seconds:.0f} s are allowed)"

    def _limit_words(self, rank: WatchedRank) -> str:
        longest_seconds = self._longest_seconds(rank)
        if longest_seconds is None:
            return f"train.watch.progress_timeout_seconds = {self._limits.progress_timeout_seconds:g}"
        longest = f"the longest so far took {longest_seconds:.1f} s"
        return f"train.watch.silent_seconds = {self._limits.silent_seconds:g}, {longest}"


def _while(rank: WatchedRank) -> str:
    return f" in {rank.doing.activity.what}"


def _named(ranks: list[WatchedRank]) -> str:
    """`rank 0, 2 waiting in allreduce; rank 1 waiting in barrier`."""
    numbers_of: dict[str, list[str]] = {}
    for rank in ranks:
        numbers_of.setdefault(rank.doing.activity.what, []).append(str(rank.number))
    return "; ".join(f"rank {', '.join(numbers)} waiting in {what}" for what, numbers in numbers_of.items())


UNTIMED = 4
"""Number of first repetitions of an activity that are not timed, because frameworks trace and compile in them."""


class ActivityClock:
    """A rank's current activity and the times of repeated ones, for its heartbeats.

    One thread at a time begins activities; any thread may read.
    """

    def __init__(self, now: float) -> None:
        self.num_begun = 0
        self.current = Activity()
        self._began_seconds = now
        self._timed: dict[str, Timed] = {}

    def begin(self, activity: Activity, now: float) -> Activity:
        """-> the one that has ended with it."""
        ended, seconds = self.current, now - self._began_seconds
        if ended.repeats:
            before = self._timed.get(ended.what, Timed(ended.what, -UNTIMED))
            longest_seconds = max(before.longest_seconds, seconds) if before.num_finished >= 0 else 0.0
            # Waiting for other ranks interrupts it: a step with a hundred collectives is one step.
            num_finished = before.num_finished + (not activity.waits)
            # Another one, not the same one changed: a thread may be reading that.
            self._timed = {**self._timed, ended.what: Timed(ended.what, num_finished, longest_seconds)}
        self.current, self._began_seconds = activity, now
        self.num_begun += 1
        return ended

    def restart(self, now: float) -> None:
        """Restart the time of the current activity, because the time so far was not representative."""
        self._began_seconds = now

    @property
    def timed(self) -> tuple[Timed, ...]:
        return tuple(self._timed.values())


def heartbeat_of(clock: ActivityClock) -> Heartbeat:
    """Return a heartbeat from a rank's clock, from any thread."""
    current, timed = clock.current, clock.timed
    # Read last: an activity that has begun meanwhile must not be judged by the pause before it.
    return Heartbeat(clock.num_begun, current, timed)
