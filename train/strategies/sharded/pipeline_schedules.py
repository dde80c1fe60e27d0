"""The schedules of a pipeline, which are those of `torch.distributed.pipelining`: what they take, and what ranks keep.

`gpipe`: Huang et al., arXiv:1811.06965. `1f1b` and `interleaved_1f1b`: Narayanan et al., arXiv:2104.04473.
`zero_bubble`: Qi et al., arXiv:2401.10241, ZB-V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from shardmill.errors import UsageError
from shardmill.section import Section
from train.settings import EXECUTION

# As many microbatches for each rank leave a share of about 1/5 idle (arXiv:1811.06965, section 2.3).
MICROBATCHES_PER_RANK = 4


class PipelineOptions(Section):
    """Settings of the strategy `pipeline_parallel`."""

    schedule: Annotated[Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"], EXECUTION] = "1f1b"
    """The order in which ranks compute. `gpipe` keeps the activations of all microbatches, `1f1b` those of as many as
    there are stages; `interleaved_1f1b` and `zero_bubble` have two stages on each rank and wait less."""
    num_microbatches: Annotated[int, EXECUTION] = Field(default=0, ge=0)
    """Equal parts of a rank's share of a step; more of them wait less and compute slower. 0: the smallest divisor of
    the share that is at least four times the number of ranks, or else the largest."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """One of `torch.distributed.pipelining`."""

    name: str
    torch_class: str
    stages_per_rank: int = 1
    is_v: bool = False
    """Whether a rank's second stage lies as far from the end of the chain as its first from the beginning."""

    def rank_of_stage(self, num_ranks: int) -> tuple[int, ...]:
        """Of each stage its rank."""
        in_turn = tuple(range(num_ranks))
        if self.is_v:
            return (*in_turn, *reversed(in_turn))
        return in_turn * self.stages_per_rank

    def takes(self, num_microbatches: int, num_ranks: int) -> bool:
        """Whether PyTorch's schedule does."""
        if self.name == "1f1b":
            return num_microbatches >= num_ranks
        if self.name == "interleaved_1f1b":
            return num_microbatches % max(1, num_microbatches // num_ranks) == 0
        return True


GPIPE = Schedule("gpipe", "ScheduleGPipe")
_SCHEDULES = {
    each.name: each
    for each in (
        GPIPE,
        Schedule("1f1b", "Schedule1F1B"),
        Schedule("interleaved_1f1b", "ScheduleInterleaved1F1B", stages_per_rank=2),
        Schedule("zero_bubble", "ScheduleZBVZeroBubble", stages_per_rank=2, is_v=True),
    )
}


def schedule_named(name: str, num_ranks: int) -> Schedule:
    """One rank waits for no other: whatever the name, it has one stage."""
    return _SCHEDULES[name] if num_ranks > 1 else GPIPE


def num_microbatches_of(options: PipelineOptions, num_rows: int, num_ranks: int) -> int:
    """Into how many equal microbatches ranks divide `num_rows`. Raises UsageError if they cannot."""
    schedule = schedule_named(options.schedule, num_ranks)
    allowed = [
        number for number in range(1, num_rows + 1) if num_rows % number == 0 and schedule.takes(number, num_ranks)
    ]
    what = f"the {num_rows} rows of a rank's share of a step, and {options.schedule} on {num_ranks} ranks"
    if options.num_microbatches:
        if options.num_microbatches not in allowed:
            raise UsageError(
                f"train.pipeline_parallel.num_microbatches = {options.num_microbatches}",
                f"expected one of {', '.join(map(str, allowed)) or 'none'}: microbatches of one size, of {what}",
                "set it to one of these, or 0 to have it chosen, or change train.global_batch_size or the schedule",
            )
        return options.num_microbatches
    if not allowed:
        raise UsageError(
            f"train.pipeline_parallel.schedule = {options.schedule!r}: no number of microbatches fits {what}",
            "expected at least as many rows as ranks",
            "set train.pipeline_parallel.schedule = 'gpipe', raise train.global_batch_size, or lower "
            "train.accumulation_steps or train.mesh.pipeline",
        )
    enough = [number for number in allowed if number >= MICROBATCHES_PER_RANK * num_ranks]
    return enough[0] if enough else allowed[-1]


def schedule_of(schedule: Schedule, stages: Sequence[Any], num_microbatches: int, loss: Callable[..., Any]) -> Any:
    """PyTorch's, for the stages of one rank. The loss is a sum over microbatches: no gradient is divided."""
    import torch.distributed.pipelining as pipelining

    of_class = getattr(pipelining, schedule.torch_class)
    given = stages if schedule.stages_per_rank > 1 else stages[0]
    return of_class(given, num_microbatches, loss_fn=loss, scale_grads=False)


def most_kept(schedule: Schedule, num_ranks: int, num_microbatches: int, sizes: Sequence[float]) -> float:
    """The most that a rank keeps at a time of the activations of all its stages. `sizes`: of each stage, those of one
    microbatch; they are kept until no gradient needs them, that of the weights included.

    Counted, not listed: at any number of microbatches at once.
    """
    kept = _KEPT[schedule.name]
    stages: list[list[float]] = [[] for _ in range(num_ranks)]
    for rank, size in zip(schedule.rank_of_stage(num_ranks), sizes, strict=True):
        stages[rank].append(size)
    return max(
        sum(number * size for number, size in zip(numbers, stages[rank], strict=True))
        for rank in range(num_ranks)
        for numbers in kept(rank, num_ranks, num_microbatches)
    )


def _kept_by_gpipe(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """-> how many microbatches of each of its stages a rank has, at the moments at which it can have most."""
    yield (num_microbatches,)


def _kept_by_1f1b(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """As many as there are stages from the rank's own to the last one."""
    yield (min(num_microbatches, num_ranks - rank),)


def _kept_by_interleaved(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """Rounds of so many microbatches pass the rank's first stage, then its second, and the other way back: a forward
    pass before each backward pass. What is kept grows or shrinks evenly while neither changes its stage."""
    of_round = num_microbatches // max(1, num_microbatches // num_ranks)
    num_first = min(of_round + 2 * (num_ranks - 1 - rank), 2 * num_microbatches)
    ends = {num_first, 2 * num_microbatches}
    for number in range(num_first // of_round, num_first // of_round + 4):
        ends |= {number * of_round, number * of_round + 1}
    ends |= {num_first + 1 + number * of_round for number in range(3)}
    for forward in ends:
        if num_first <= forward <= 2 * num_microbatches:
            backward = max(0, forward - num_first - 1)
            first, last = _turns(forward, of_round), _turns(backward, of_round)
            yield first - (backward - last), forward - first - last


def _turns(number: int, of_round: int) -> int:
    """Of so many passes those through the stage that is first in turn."""
    return number // (2 * of_round) * of_round + min(number % (2 * of_round), of_round)


def _kept_by_zero_bubble(rank: int, num_ranks: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    """Before the first gradient of the second stage, and before the first one of the first stage: from then on each
    forward pass follows a backward pass of its stage."""

    def at_most(number: int) -> int:
        return min(number, num_microbatches)

    yield at_most(2 * num_ranks - rank - 1), at_most(rank + 1)
    yield at_most(2 * num_ranks - rank), at_most(num_ranks) - at_most(num_ranks - rank)


_KEPT = {
    "gpipe": _kept_by_gpipe,
    "1f1b": _kept_by_1f1b,
    "interleaved_1f1b": _kept_by_interleaved,
    "zero_bubble": _kept_by_zero_bubble,
}
