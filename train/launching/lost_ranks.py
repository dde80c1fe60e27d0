"""Handles lost ranks that the others can continue without (`Strategy.may_lose`, and all but the last worker of a
chief): they are reported, and are not a fault of the job.

Only once training has begun: a rank that never made a step has a wrong config or host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardmill.jobs.observer import WARNING
from train.contracts.world import Role
from train.launching.faults import FaultKind, RankFault

if TYPE_CHECKING:
    from train.launching.deadlines import RankState
    from train.reporting.observer import TrainObserver

# Those that are still there when the others have finished have this long to leave too.
LEAVE_SECONDS = 5.0


class LostRanks:
    """The optional ranks that were lost; called from the watchdog's main thread."""

    def __init__(self, ranks: Sequence[RankState], may_lose: frozenset[int], observer: TrainObserver) -> None:
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

    def takes(self, rank: RankState, fault: RankFault) -> bool:
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

    def _takes_worker(self, rank: RankState, fault: RankFault) -> bool:
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

    def progressed(self, rank: RankState) -> None:
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
