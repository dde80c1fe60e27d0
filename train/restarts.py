"""Resumes with fewer ranks from the last complete checkpoint after some ranks were lost.

The epoch plan gives the same global batches at every world size, so the training stays the one that was begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import asked_to_end, was_signalled
from shardmill.jobs.spark import spark_for_retries
from shardmill.values import Cursor
from shardmill.words import counted
from train.contracts.values import TrainResult
from train.contracts.world import Role
from train.launching.rank_failures import RankLost
from train.reporting.observer import TrainObserver

if TYPE_CHECKING:
    from train.planning.plan import TrainingPlan


@dataclass(frozen=True, slots=True)
class Restart:
    """One restart of a training after it had lost ranks."""

    cause: str
    """The error's first part, which names rank and host."""
    last_step: Cursor | None
    """Last step of the lost rank; None if it had not finished its first."""
    lost_ranks: tuple[int, ...]
    world_size: int
    """Number of ranks with which it continued."""


@dataclass(frozen=True, slots=True)
class Launched:
    """A training that has finished, after however many attempts."""

    result: TrainResult
    restarts: tuple[Restart, ...]


# Around all attempts, not each: where they have to share a Spark context, it must outlive the one that failed.
@spark_for_retries()
def launch_until_done(
    launch: Callable[[TrainingPlan], TrainResult],
    plan: TrainingPlan,
    observer: TrainObserver,
    check: Callable[[TrainingPlan], object],
) -> Launched:
    """`launch(plan)`; after a loss of ranks without those, up to `train.max_restarts` times.

    `check` raises UsageError if a training cannot run with so few ranks; fewer are tried then, because ranks that hold
    a model together need not divide it by any number. Raises what `launch` raises; of a fault that comes again at the
    same step, the first.
    """
    first_at: dict[Cursor | None, RankLost] = {}
    restarts: list[Restart] = []
    while True:
        try:
            return Launched(launch(plan), tuple(restarts))
        except RankLost as lost:
            first = first_at.setdefault(lost.last_step, lost)
            if first is not lost:
                # Another restart would meet it a third time.
                repeated = RankLost(f"{first.what} (and again after a restart: {lost.what})", first.expected, first.fix)
                for note in getattr(first, "__notes__", ()):
                    repeated.add_note(note)
                raise repeated from lost
            if was_signalled():
                # A signal may have come when the ranks were leaving already.
                raise asked_to_end("the ranks had ended already") from lost
            if len(restarts) == plan.config.max_restarts:
                raise
            try:
                smaller = _without(plan, lost.ranks, check)
            except UsageError as refusal:
                lost.add_note(f"it could not continue with {refusal}")
                raise lost from refusal
            before, num_ranks = plan.config.num_workers, smaller.config.num_workers
            restarts.append(Restart(lost.what, lost.last_step, tuple(sorted(lost.ranks)), num_ranks))
            number = f"restart {len(restarts)} of at most {plan.config.max_restarts}"
            how = f"resumes from the last complete checkpoint, {before} -> {num_ranks} ranks ({number})"
            fields = {"rank": min(lost.ranks, default=-1), "restart": len(restarts), "world_size": num_ranks}
            observer.event("restarted", {**fields, WARNING: f"{lost.what}; {how}"})
            plan = smaller


def _without(plan: TrainingPlan, lost_ranks: frozenset[int], check: Callable[[TrainingPlan], object]) -> TrainingPlan:
    """The plan for the ranks that are left, or for as many of them as can hold the model; at least one, because the
    driver's own host is there. A lost chief or server is replaced: `train.num_workers` does not count them.

    Raises UsageError, which names the numbers of ranks that are allowed.
    """
    roles, num_before = plan.setup.roles, plan.config.num_workers
    num_lost = sum(roles[rank] in (Role.MEMBER, Role.WORKER) for rank in lost_ranks)
    most = max(1, num_before - num_lost)
    refusals: list[UsageError] = []
    for num_ranks in range(most, 0, -1):
        try:
            smaller = plan.after_loss(num_ranks)
            check(smaller)
        except UsageError as refusal:
            refusals.append(refusal)
        else:
            return smaller
    allowed = ", ".join(str(each) for each in range(most + 1, num_before + 1) if _divides(plan, each))
    raise UsageError(
        f"{counted(most, 'rank')}{' or fewer' if most > 1 else ''}: {refusals[0]}",
        f"it can have these numbers of ranks: {allowed}",
    )


def _divides(plan: TrainingPlan, num_ranks: int) -> bool:
    """Whether so many ranks can, with the sizes of `train.mesh` that were set."""
    try:
        plan.after_loss(num_ranks)
    except UsageError:
        return False
    return True
