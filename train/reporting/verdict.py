"""Finds the bottleneck of a training from the times of its steps: its share, and the setting that would change it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from train.reporting.rank_times import MIN_STEPS, NOTABLE_SHARE, RankTimes, StepSums, straggler_among
from train.strategies import less_work_in

if TYPE_CHECKING:
    from train.config import TrainConfig
    from train.contracts.world import RankDevices

# Threads that are idle for more of the time are not what a training waits for.
BUSY_SHARE = 0.5


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
            return _compute(share, on_gpus=any(each.devices for each in placement))
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


def _compute(share: float, *, on_gpus: bool) -> Verdict:
    # Sixteen bits save no time on CPUs, nor do more ranks on the same ones.
    fix = "more ranks, a faster device or train.mixed_precision" if on_gpus else "GPUs or more machines"
    return Verdict(
        "compute",
        f"compute-bound: {share:.0%} of the steps' time (mean of all ranks; no checkpoints, no evaluation) is the "
        f"model's own computation: {fix} would help",
    )
