"""Finds the bottleneck of a training from the times of its steps: its share, and the setting that would change it; and
the share of the exchange between ranks, from the first of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shardmill.words import size_of
from train.reporting.rank_times import MIN_STEPS, NOTABLE_SHARE, RankTimes, StepSums, straggler_among
from train.strategies import less_work_in

if TYPE_CHECKING:
    from shardmill.jobs.observer import FieldValue
    from train.config import TrainConfig
    from train.contracts.world import RankDevices
    from train.reporting.observer import GlobalStep

# Threads that are idle for more of the time are not what a training waits for.
BUSY_SHARE = 0.5
# Of steps: shorter ones are over before a larger machine is found.
LONG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence for the person who wants the next training to be faster."""

    bound: Literal["input", "communication", "straggler", "compute"]
    sentence: str


class StepTimes(StepSums):
    """A sink that judges at the end."""

    def verdict(self, config: TrainConfig, placement: Sequence[RankDevices] = ()) -> Verdict | None:
        """Return the verdict; None if there were too few steps."""
        ranks = self._ranks
        if min((times.num_steps for times in ranks.values()), default=0) < MIN_STEPS:
            return None
        straggler = straggler_among(ranks, self._hosts, less_work_in(config))
        if straggler is not None:
            return Verdict("straggler", str(straggler))
        seconds = statistics.mean(times.total for times in ranks.values()) or 1.0
        input_share = statistics.mean(times.input_wait for times in ranks.values()) / seconds
        exchange_share = self._exchange_seconds / seconds
        if max(input_share, exchange_share) < NOTABLE_SHARE:
            share = statistics.mean(times.compute for times in ranks.values()) / seconds
            is_long = seconds >= LONG_SECONDS
            return _compute(share, is_long=is_long, on_gpus=any(each.devices for each in placement))
        if input_share >= exchange_share:
            return _input(input_share, list(ranks.values()), config)
        seconds_per_step = self._exchange_seconds / next(iter(ranks.values())).num_steps
        return _communication(exchange_share, seconds_per_step, len(ranks), config)


def _input(share: float, ranks: list[RankTimes], config: TrainConfig) -> Verdict:
    threads = config.reading.threads
    wall = sum(times.total for times in ranks)
    fetch, decode = (sum(getattr(times, part) for times in ranks) / wall / threads for part in ("fetch", "decode"))
    reader = f"train.reading.threads (now {threads})"
    waiting = f"{share:.0%} of a step is waiting for its batch"
    if max(fetch, decode) < BUSY_SHARE:
        return Verdict(
            "input",
            f"input-bound: {waiting}, though storage kept only {fetch:.0%} of the reader's threads busy and decoding "
            f"only {decode:.0%}: each epoch starts with an empty queue, which dominates short epochs",
        )
    if decode >= fetch:
        cause, busy = "decode", f"decoding kept {decode:.0%} of the reader's threads busy, storage {fetch:.0%}"
        fix = f'raise {reader} if there are idle cores, or store decoded images with etl.encoding = "raw"'
    else:
        cause, busy = "storage", f"storage kept {fetch:.0%} of the reader's threads busy, decoding {decode:.0%}"
        fix = f"raise {reader}, or move the dataset closer to the ranks"
    return Verdict("input", f"input-bound: {cause}; {waiting}; {busy}: {fix}")


def _communication(share: float, seconds: float, world_size: int, config: TrainConfig) -> Verdict:
    return Verdict(
        "communication",
        f"communication-bound: {share:.0%} of a step ({1000 * seconds:.1f} ms) is the exchange between ranks, and no "
        f"rank was late: raise train.global_batch_size (now {config.global_batch_size}) for fewer exchanges, or use "
        f"fewer ranks (now {world_size})",
    )


def _compute(share: float, *, is_long: bool, on_gpus: bool) -> Verdict:
    # Sixteen bits save no time on CPUs, nor do more ranks on the same ones.
    fix = "more ranks, a faster device or train.mixed_precision" if on_gpus else "GPUs or more machines"
    return Verdict(
        "compute",
        f"compute-bound: {share:.0%} of the steps' time (mean of all ranks; no checkpoints, no evaluation) is the "
        "model's own computation" + f": {fix} would help" * is_long,
    )


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
