"""Resumes with fewer ranks from the last complete checkpoint after some ranks were lost.

The epoch plan gives the same global batches at every world size, so the training stays the one that was begun.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.jobs.observer import WARNING
from shardmill.jobs.process import Terminated, was_signalled
from shardmill.jobs.spark import spark_for_retries
from shardmill.values import Cursor
from shardmill.words import counted
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.contracts.world import Role
from train.launching.rank_failures import RankLost
from train.reporting.observer import TrainObserver
from train.strategies import find_strategy, mesh_of, roles_of

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
    check: Callable[[TrainConfig], object],
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
            _stop_if_asked()
            if len(restarts) == plan.config.max_restarts:
                raise
            try:
                smaller = _without(plan, lost.ranks, check)
            except UsageError as refusal:
                lost.add_note(f"it could not continue with {refusal}")
                raise lost from refusal
            num_ranks = smaller.config.num_workers
            restarts.append(Restart(lost.what, lost.last_step, tuple(sorted(lost.ranks)), num_ranks))
            _report(restarts, plan.config, smaller.config, observer)
            plan = smaller


def _stop_if_asked() -> None:
    """SIGTERM may have come when the ranks were leaving already."""
    if was_signalled():
        raise Terminated("terminated by SIGTERM; the ranks had ended already")


def _without(plan: TrainingPlan, lost_ranks: frozenset[int], check: Callable[[TrainConfig], object]) -> TrainingPlan:
    """The plan for the ranks that are left, or for as many of them as can hold the model; at least one, because the
    driver's own host is there. A lost chief or server is replaced: `train.num_workers` does not count them.

    Raises UsageError, which names the numbers of ranks that are allowed.
    """
    roles, num_before = roles_of(plan.config), plan.config.num_workers
    num_lost = sum(roles[rank] in (Role.MEMBER, Role.WORKER) for rank in lost_ranks)
    most = max(1, num_before - num_lost)
    refusals: list[UsageError] = []
    for num_ranks in range(most, 0, -1):
        smaller = plan.after_loss(num_ranks)
        try:
            _check_layout(smaller.config)
            check(smaller.config)
        except UsageError as refusal:
            refusals.append(refusal)
        else:
            return smaller
    allowed = ", ".join(
        str(each) for each in range(most + 1, num_before + 1) if _has_layout(plan.after_loss(each).config)
    )
    raise UsageError(
        f"{counted(most, 'rank')}{' or fewer' if most > 1 else ''}: {refusals[0]}",
        f"it can have these numbers of ranks: {allowed}",
    )


def _check_layout(config: TrainConfig) -> None:
    """Raises UsageError if so many ranks cannot divide the training, with the sizes of `train.mesh` that were set."""
    find_strategy(config.strategy, config.num_workers)
    mesh_of(config)


def _has_layout(config: TrainConfig) -> bool:
    try:
        _check_layout(config)
    except UsageError:
        return False
    return True


def _report(restarts: list[Restart], before: TrainConfig, after: TrainConfig, observer: TrainObserver) -> None:
    last = restarts[-1]
    ranks = f"{before.num_workers} -> {after.num_workers} ranks"
    number = f"restart {len(restarts)} of at most {before.max_restarts}"
    fields = {"rank": min(last.lost_ranks, default=-1), "restart": len(restarts), "world_size": after.num_workers}
    warning = f"{last.cause}; resumes from the last complete checkpoint, {ranks} ({number})"
    observer.event("restarted", {**fields, WARNING: warning})
