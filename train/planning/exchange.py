"""Weighs the share of a step that ranks spend in exchange, from a training's own first steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardmill.jobs.observer import FieldValue
from train.planning.memory_fit import size_of
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import MIN_STEPS, NOTABLE_SHARE, StepSums


def weighed(step_seconds: float, exchange_seconds: float, num_ranks: int, measured: str) -> tuple[str, float, str]:
    """-> choice, share of the exchange in a step, and the reason for people.

    `step_seconds`: mean over the ranks, with the exchange. `exchange_seconds`: of the last rank, which waited for none,
    and only what computation did not hide. `measured`: how, in words.
    """
    share = exchange_seconds / step_seconds if step_seconds else 0.0
    numbers = f"{1000 * exchange_seconds:.1f} ms of a step of {1000 * step_seconds:.1f} ms ({share:.0%}), {measured}"
    if share < NOTABLE_SHARE:
        return "exchange_small", share, f"{numbers}: a change would gain nothing"
    return "exchange_large", share, (
        f"{numbers}: unchanged: a step exchanges once, for any number of microbatches. These would help, but only you "
        f"can choose them: fewer ranks (now {num_ranks}), or a new run with a larger train.global_batch_size or with "
        "train.local_sgd.local_steps"
    )  # fmt: skip


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
        of_exchange = self._exchange_seconds / num_steps
        choice, share, reason = weighed(seconds / num_steps, of_exchange, len(self._ranks), measured)
        self._is_reported, self.reason = True, f"exchange: {reason}"
        self._emit("train.exchange", {"rank": 0, "choice": choice, "share": share, "reason": self.reason})

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
