"""Compares the step times of the ranks and names the straggler, if any, during and after the training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.jobs.observer import WARNING, FieldValue
from train.reporting.observer import STEP_SECONDS, GlobalStep

if TYPE_CHECKING:
    from train.contracts.world import RankDevices

# Fewer say nothing: the first steps compile, fill caches and wait for the first window.
MIN_STEPS = 10
# A rank whose own work in a step takes so many times the median of the others holds them up.
STRAGGLER_FACTOR = 1.3
# What takes a smaller share of a step than this is not worth a change of settings.
NOTABLE_SHARE = 0.2
# How long a running training is watched before it is judged; a pause of a second is no straggler.
WATCH_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RankTimes:
    """Seconds of one rank, summed over `num_steps` steps; `fetch` and `decode` are summed over the reader's threads."""

    num_steps: int = 0
    input_wait: float = 0.0
    compute: float = 0.0
    allreduce: float = 0.0
    checkpoint: float = 0.0
    fetch: float = 0.0
    decode: float = 0.0

    def plus(self, seconds: Mapping[str, float]) -> RankTimes:
        """Add one more step."""
        return RankTimes(
            self.num_steps + 1,
            self.input_wait + seconds.get("input_wait", 0.0),
            self.compute + seconds.get("compute", 0.0),
            self.allreduce + seconds.get("allreduce", 0.0),
            self.checkpoint + seconds.get("checkpoint", 0.0),
            self.fetch + seconds.get("fetch", 0.0),
            self.decode + seconds.get("decode", 0.0),
        )

    @property
    def own(self) -> float:
        """A step's seconds that do not depend on other ranks."""
        return (self.input_wait + self.compute) / max(1, self.num_steps)

    @property
    def total(self) -> float:
        """Total time of the steps; checkpoints come between them."""
        return self.input_wait + self.compute + self.allreduce


@dataclass(frozen=True, slots=True)
class RankRow:
    """A rank's line in a run's summary."""

    rank: int
    host: str
    num_steps: int
    seconds: dict[str, float]
    """Sums over these steps by part, in the order of `STEP_SECONDS`."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank for which the others wait; as text, a sentence for people."""

    rank: int
    host: str
    own_seconds: float
    """Time of a step's own part."""
    usual_seconds: float
    """Median of the others."""
    mostly: str
    less_work: str
    """What gives it less."""

    def __str__(self) -> str:
        return (
            f"straggler: rank {self.rank}{f' on host {self.host}' if self.host else ''} takes "
            f"{self.own_seconds / self.usual_seconds:.1f}x as long as the others for its own part of a step "
            f"({1000 * self.own_seconds:.1f} ms against {1000 * self.usual_seconds:.1f} ms), mostly {self.mostly}, "
            f"and they wait for it: check which other processes run there, {self.less_work}"
        )


def straggler_among(ranks: Mapping[int, RankTimes], hosts: Mapping[int, str], less_work: str) -> Straggler | None:
    """The slowest of `ranks`, if it is that much slower that the others' steps are notably longer for it.

    `less_work`: that of the strategy.
    """
    slowest = max(ranks, key=lambda rank: ranks[rank].own)
    others = [times.own for rank, times in ranks.items() if rank != slowest]
    if not others:
        return None
    times, usual = ranks[slowest], statistics.median(others)
    seconds = statistics.mean(each.total for each in ranks.values()) or 1.0
    late_share = (times.own - usual) * times.num_steps / seconds
    if times.own <= STRAGGLER_FACTOR * usual or late_share <= NOTABLE_SHARE:
        return None
    mostly = "waiting for its batches" if times.input_wait > times.compute else "computing"
    return Straggler(slowest, hosts.get(slowest, ""), times.own, usual, mostly, less_work)


class StepSums:
    """A sink of `RunLog` that adds up what the ranks report with each step of one call."""

    def __init__(self) -> None:
        self._ranks: dict[int, RankTimes] = {}
        self._hosts: dict[int, str] = {}
        self._exchange_seconds = 0.0
        self._is_first = True

    def step(self, step: GlobalStep) -> None:
        # The first step of a call compiles the model.
        if self._is_first:
            self._is_first = False
            return
        for report in step.reports:
            self._ranks[report.rank] = self._ranks.get(report.rank, RankTimes()).plus(report.seconds)
        # The last rank to arrive waits for none: its time is the exchange itself, what the others have more is waiting.
        self._exchange_seconds += min(report.seconds.get("allreduce", 0.0) for report in step.reports)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "rank_started":
            self._hosts[int(fields["rank"] or 0)] = str(fields["host"])
        if name == "restarted":
            # Other ranks have the numbers now.
            self._ranks, self._hosts, self._exchange_seconds, self._is_first = {}, {}, 0.0, True

    def close(self) -> None:
        return

    def rows(self, placement: Sequence[RankDevices]) -> tuple[RankRow, ...]:
        """Rows in rank order, for the ranks that reported; `placement` contains their hosts."""
        hosts = {each.rank: each.host for each in placement}
        return tuple(
            RankRow(rank, hosts.get(rank, ""), times.num_steps, {part: getattr(times, part) for part in STEP_SECONDS})
            for rank, times in sorted(self._ranks.items())
        )


class StragglerWatch(StepSums):
    """Warns of a rank when it begins to hold the others up, once."""

    def __init__(
        self,
        warn: Callable[[str, Mapping[str, FieldValue]], None],
        less_work: str,
        watch_seconds: float = WATCH_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        self._warn = warn
        self._less_work = less_work
        self._watch_seconds = watch_seconds
        self._clock = clock
        self._since = clock()
        self._named = -1

    def step(self, step: GlobalStep) -> None:
        super().step(step)
        if not self._ranks:
            self._since = self._clock()
            return
        num_steps = max(times.num_steps for times in self._ranks.values())
        if num_steps < MIN_STEPS or self._clock() - self._since < self._watch_seconds:
            return
        straggler = straggler_among(self._ranks, self._hosts, self._less_work)
        if straggler is not None and straggler.rank != self._named:
            self._warn("train.straggler", {"rank": straggler.rank, "step": step.step, WARNING: str(straggler)})
        self._named = straggler.rank if straggler is not None else -1
        self._ranks, self._since = {}, self._clock()

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        super().event(name, fields)
        if name == "restarted":
            self._named = -1
