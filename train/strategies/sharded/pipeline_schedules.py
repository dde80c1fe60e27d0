"""The schedules of a pipeline: in which order its ranks compute microbatches, and how long they wait for each other.

Their orders are those of `torch.distributed.pipelining`; nothing here needs PyTorch but `schedule_of` and `orders`.

`gpipe`: Huang et al., arXiv:1811.06965. `1f1b` and `interleaved_1f1b`: Narayanan et al., arXiv:2104.04473.
`zero_bubble`: Qi et al., arXiv:2401.10241, ZB-V.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from shardmill.errors import UsageError
from shardmill.section import Section
from train.settings.kinds import EXECUTION

# As many microbatches for each rank leave a share of about 1/5 idle (arXiv:1811.06965, section 2.3).
MICROBATCHES_PER_RANK = 4
MOST_LISTED_FOR_RANK = 8


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


class Action(NamedTuple):
    """What a rank computes: `kind` is a key of `DURATIONS`."""

    kind: str
    stage: int
    microbatch: int


def orders(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """What each rank computes, in its order. Needs no ranks."""
    if schedule.stages_per_rank == 1:
        # PyTorch's own lists are wrong for the last rank of 1F1B; these are what its loops do.
        return [_of_one_stage(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
    rank_of_stage = schedule.rank_of_stage(num_ranks)
    stages = [
        SimpleNamespace(
            stage_index=stage, num_stages=len(rank_of_stage), group_size=num_ranks, group_rank=0, submod=None
        )
        for stage, rank in enumerate(rank_of_stage)
        if rank == 0
    ]
    made = schedule_of(schedule, stages, num_microbatches, lambda outputs, places: None)
    return [
        [Action(each.computation_type.name, each.stage_index, each.microbatch_index) for each in actions if each]
        for _, actions in sorted(made.pipeline_order.items())
    ]


def _of_one_stage(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Forward passes until the first gradient can be there, or all of them; then a backward pass before each."""
    num_first = num_microbatches if schedule.name == "gpipe" else min(num_microbatches, num_ranks - rank)
    order = [Action("FORWARD", rank, number) for number in range(num_first)]
    for number in range(num_microbatches):
        order.append(Action("FULL_BACKWARD", rank, number))
        if num_first + number < num_microbatches:
            order.append(Action("FORWARD", rank, num_first + number))
    return order


DURATIONS = {"FORWARD": 1, "FULL_BACKWARD": 2, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1}
"""Of one stage, whose backward pass takes as long as two forward passes: the gradients of inputs, and of weights."""


def idle_share(of_ranks: Sequence[Sequence[Action]], costs: Sequence[float] = ()) -> float:
    """The share of all ranks' time in which they wait, if sending costs nothing. `costs`: of each stage; empty if all
    are alike.

    With one such stage on each of P ranks and M microbatches it is (P - 1) / (M + P - 1).
    """
    last = max(action.stage for actions in of_ranks for action in actions)

    def duration(action: Action) -> float:
        return DURATIONS[action.kind] * (costs[action.stage] if costs else 1)

    ready: dict[tuple[str, int, int], float] = {}
    """(what it is, its stage, microbatch) -> when it is there: activations of a stage, or the gradient of its input."""
    now, waiting = [0.0] * len(of_ranks), [list(reversed(actions)) for actions in of_ranks]
    while any(waiting):
        num_waiting = sum(map(len, waiting))
        for rank, actions in enumerate(waiting):
            while actions and ((needed := _needed(actions[-1], last)) is None or needed in ready):
                kind, stage, number = action = actions.pop()
                now[rank] = max(now[rank], ready[needed] if needed else 0.0) + duration(action)
                if kind != "BACKWARD_WEIGHT":
                    ready["activations" if kind == "FORWARD" else "gradient", stage, number] = now[rank]
        assert sum(map(len, waiting)) < num_waiting, "ranks that wait for each other"
    busy = sum(duration(action) for actions in of_ranks for action in actions)
    return 1 - busy / (len(of_ranks) * max(now))


def idle_share_of(schedule: Schedule, num_ranks: int, num_microbatches: int, costs: Sequence[float]) -> float:
    """`idle_share` of stages of these costs. Of many microbatches the first are listed; the others take as long as the
    last of these do (off by less than 0.01, where the schedule is not steady by then)."""
    listed = [number * num_ranks for number in (MOST_LISTED_FOR_RANK - 2, MOST_LISTED_FOR_RANK)]
    if num_microbatches <= listed[-1]:
        return idle_share(orders(schedule, num_ranks, num_microbatches), costs)
    # Of a rank, on average.
    busy = sum(DURATIONS[kind] for kind in ("FORWARD", "FULL_BACKWARD")) * sum(costs) / num_ranks
    ends = [number * busy / (1 - idle_share(orders(schedule, num_ranks, number), costs)) for number in listed]
    pace = (ends[1] - ends[0]) / (listed[1] - listed[0])
    return 1 - num_microbatches * busy / (ends[1] + (num_microbatches - listed[1]) * pace)


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


def _needed(action: Action, last: int) -> tuple[str, int, int] | None:
    """What must be there before a rank can compute it, beside what the rank has computed itself."""
    kind, stage, number = action
    if kind == "BACKWARD_WEIGHT" or (kind == "FORWARD" and stage == 0):
        return None
    if kind == "FORWARD":
        return "activations", stage - 1, number
    return ("activations", last, number) if stage == last else ("gradient", stage + 1, number)
