"""Whether several ranks that `auto` chose are worth their exchange: a few steps of all, before the first real one.

Nobody knows a network before it is used. The real ranks compute and exchange steps of made-up images, all see the same
figures, and either begin, as if nothing had been, or leave together for the driver to go on with one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from shardmill.values import Cursor
from train.activities import Activity, during
from train.backends.backend import made_up_batch, model_spec
from train.checkpoints.state import dump_arrays
from train.freezing import hold_still
from train.progress import Progress
from train.stopwatch import Stopwatch
from train.strategies.options import num_named_ranks
from train.values import FewerRanks, Trial, from_json, to_json

if TYPE_CHECKING:
    from train.choosing.memory import Memory
    from train.config import TrainConfig
    from train.session import Session

NUM_STEPS = 5
"""The first compiles what the training goes on to use; of the others the median counts."""
RESTART_SECONDS = 15.0
"""What beginning once more may take (docs/benchmarks/training.md); one rank must save more than that."""


@dataclass(frozen=True, slots=True)
class TrialFacts:
    """All that the rules look at; seconds of one step."""

    num_ranks: int
    step_seconds: float
    """Until the last rank is done."""
    exchange_seconds: float
    """Of the rank that came last, and waited for none; only what the computation did not hide."""
    num_steps: int
    """Of the whole training."""
    may_go_on_alone: bool
    """One rank is known to have the memory."""

    @property
    def alone_seconds(self) -> float:
        """At most, of a rank that computes for all of them and exchanges nothing: not all grows with the batch."""
        return self.num_ranks * (self.step_seconds - self.exchange_seconds)

    @property
    def saved_seconds(self) -> float:
        """By one rank in the whole training; negative if it would be slower."""
        return self.num_steps * (self.step_seconds - self.alone_seconds)


@dataclass(frozen=True, slots=True)
class TrialRule:
    """One row of the table in docs/training/auto.md; the first row that applies counts."""

    choice: str
    applies: Callable[[TrialFacts], bool]
    because: str
    is_alone: bool = False


# No number between one and all is looked at. In a ring over equal links each of m ranks sends (m - 1) / m of twice the
# gradients (Patarasuk and Yuan, 2009) and computes 1 / m of the batch: a step is linear in 1 / m, so an end is best.
TRIAL_RULES = (
    TrialRule("ranks_pay", lambda facts: facts.saved_seconds <= 0, "so {num_ranks} are faster"),
    TrialRule(
        "soon_over",
        lambda facts: facts.saved_seconds < RESTART_SECONDS,
        "which in {num_steps:,} steps would not save the time that beginning once more takes",
    ),
    TrialRule(
        "memory_unknown",
        lambda facts: not facts.may_go_on_alone,
        "but nobody knows whether it has the memory: set train.num_workers = 1, or say how much there is by "
        "train.memory_budget_bytes",
    ),
    TrialRule("one_is_faster", lambda facts: True, "so it continues with one", is_alone=True),
)


@dataclass(frozen=True, slots=True)
class Tried:
    """What a rule says."""

    choice: str
    is_alone: bool
    reason: str
    """With the numbers, for people."""


def judge(facts: TrialFacts) -> Tried:
    """The first row that applies, and why."""
    rule = next(rule for rule in TRIAL_RULES if rule.applies(facts))
    step, exchange, alone = (1000 * each for each in (facts.step_seconds, facts.exchange_seconds, facts.alone_seconds))
    because = rule.because.format(num_ranks=facts.num_ranks, num_steps=facts.num_steps)
    reason = (
        f"trial: a step of {facts.num_ranks} ranks took {step:.1f} ms, of it {exchange:.1f} ms for the exchange, and "
        f"one rank would take {alone:.1f} ms at most, {because}"
    )
    return Tried(rule.choice, rule.is_alone, reason)


@dataclass(frozen=True, slots=True)
class TrialSteps:
    """What each step took on one rank."""

    total_seconds: tuple[float, ...]
    exchange_seconds: tuple[float, ...]


def trial_of(asked: TrainConfig, chosen: TrainConfig, memory: Memory, check: Callable[[TrainConfig], object]) -> Trial:
    """What the ranks of `chosen` are to try. `check` raises UsageError for a number that cannot train."""
    is_asked = asked.num_workers or num_named_ranks(asked) or asked.launcher == "attach"
    # PowerSGD's start adds what a rank still has to give to what it has: a trial could not be undone.
    if is_asked or chosen.num_workers == 1 or chosen.compression == "powersgd":
        return "none"
    alone = chosen.model_copy(update={"num_workers": 1})
    try:
        check(alone)
    except UsageError:
        return "none"
    return "decides" if memory.fits(alone) else "told"


def try_ranks(session: Session) -> None:
    """Before the first step, on all ranks, if the driver left the question open.

    What the steps have changed is as before when it returns. Raises FewerRanks, on all ranks alike.
    """
    task, member = session.task, session.member
    if task.trial == "none" or task.config.num_workers == 1:
        return
    before = {name: dump_arrays(arrays) for name, arrays in session.writer.copy_state().items()}
    with during(session.reporter, Activity("a trial of the ranks")):
        mine = _steps(session)
    member.start(before, member.world_size, "what was there before the trial")
    facts = facts_of(
        [from_json(TrialSteps, each) for each in member.gather_bytes(to_json(mine))],
        num_steps=task.config.epochs * session.epochs.num_steps,
        may_go_on_alone=task.trial == "decides",
    )
    tried = judge(facts)
    numbers = {"step_seconds": facts.step_seconds, "exchange_seconds": facts.exchange_seconds}
    session.event("trial", {"choice": tried.choice, **numbers, "reason": tried.reason})
    if tried.is_alone:
        member.barrier()
        member.close()
        raise FewerRanks(1, tried.reason)


def facts_of(ranks: list[TrialSteps], num_steps: int, *, may_go_on_alone: bool) -> TrialFacts:
    """Of the same steps on all ranks."""
    totals = [max(of_step) for of_step in zip(*(each.total_seconds for each in ranks), strict=True)]
    exchanges = [min(of_step) for of_step in zip(*(each.exchange_seconds for each in ranks), strict=True)]
    step_seconds, exchange_seconds = statistics.median(totals[1:]), statistics.median(exchanges[1:])
    return TrialFacts(len(ranks), step_seconds, exchange_seconds, num_steps, may_go_on_alone)


def _steps(session: Session) -> TrialSteps:
    config, member = session.task.config, session.member
    hold_still(member.learner, config, Cursor(0, 0))
    num_rows = len(session.streams) * config.global_batch_size // config.num_streams
    batch = made_up_batch(model_spec(session.dataset.manifest, config), num_rows)
    total: list[float] = []
    exchange: list[float] = []
    stopwatch = Stopwatch()
    for _ in range(NUM_STEPS):
        done = member.train_step(batch, config.global_batch_size, session.learning_rate(Progress()))
        total.append(stopwatch.lap())
        exchange.append(done.allreduce_seconds)
    return TrialSteps(tuple(total), tuple(exchange))
