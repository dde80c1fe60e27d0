"""Weighs the share of a step that ranks spend in exchange, from a training's own first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardmill.jobs.observer import FieldValue
from train.planning.memory_fit import size_of
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import MIN_STEPS, NOTABLE_SHARE, StepSums


@dataclass(frozen=True, slots=True)
class ExchangeFacts:
    """All facts that the rules read; seconds of one step."""

    step_seconds: float
    """Mean over the ranks; with the exchange."""
    exchange_seconds: float
    """Exchange time of the last rank, which waited for none; only the part that computation did not hide."""
    num_ranks: int
    measured: str
    """Source of the measurement, in words."""

    @property
    def share(self) -> float:
        return self.exchange_seconds / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True, slots=True)
class ExchangeRule:
    """One row of the table in docs/auto.md; the first row that applies counts."""

    choice: str
    applies: Callable[[ExchangeFacts], bool]
    because: str


EXCHANGE_RULES = (
    ExchangeRule("exchange_small", lambda facts: facts.share < NOTABLE_SHARE, "a change would gain nothing"),
    ExchangeRule(
        "exchange_large",
        lambda facts: True,
        "unchanged: a step exchanges once, for any number of microbatches. These would help, but only you can choose "
        "them: fewer ranks (now {num_ranks}), or a new run with a larger train.global_batch_size or with "
        "train.local_sgd.local_steps",
    ),
)


@dataclass(frozen=True, slots=True)
class Weighed:
    """The decision of a rule."""

    choice: str
    reason: str
    """Reason with numbers, for people."""


def weigh(facts: ExchangeFacts) -> Weighed:
    """The first row that applies, and why."""
    rule = next(rule for rule in EXCHANGE_RULES if rule.applies(facts))
    exchange, step = 1000 * facts.exchange_seconds, 1000 * facts.step_seconds
    numbers = f"{exchange:.1f} ms of a step of {step:.1f} ms ({facts.share:.0%}), {facts.measured}"
    return Weighed(rule.choice, f"{numbers}: {rule.because.format(num_ranks=facts.num_ranks)}")


class FirstSteps(StepSums):
    """A sink that weighs the exchange when so many steps of several ranks are there that they say something."""

    def __init__(self, emit: Callable[[str, Mapping[str, FieldValue]], None]) -> None:
        super().__init__()
        self._emit = emit
        self._is_reported = False
        self._of_gradients = ""
        self.reason = ""
        """The finding; empty until it exists."""

    def step(self, step: GlobalStep) -> None:
        if self._is_reported:
            return
        super().step(step)
        num_steps = min((times.num_steps for times in self._ranks.values()), default=0)
        if num_steps < MIN_STEPS or len(self._ranks) == 1:
            return
        seconds = sum(times.total for times in self._ranks.values()) / len(self._ranks)
        measured = f"measured in {num_steps} of its first steps{self._of_gradients}"
        facts = ExchangeFacts(seconds / num_steps, self._exchange_seconds / num_steps, len(self._ranks), measured)
        found = weigh(facts)
        self._is_reported, self.reason = True, f"exchange: {found.reason}"
        self._emit("train.exchange", {"rank": 0, "choice": found.choice, "share": facts.share, "reason": self.reason})

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        super().event(name, fields)
        if name == "compression":
            sent, whole = (fields[each] for each in ("sent_bytes", "gradient_bytes"))
            assert isinstance(sent, int) and isinstance(whole, int)
            self._of_gradients = f", with {size_of(sent)} for {size_of(whole)} of gradients ({fields['compression']})"
        if name == "collectives":
            num_bytes = sum(
                each for field, each in fields.items() if field.endswith("_bytes") and isinstance(each, int)
            )
            self._of_gradients = f", in {fields['num_calls']} collectives over {size_of(num_bytes)}"
        if name == "restarted":
            # With fewer ranks.
            self._is_reported = False
