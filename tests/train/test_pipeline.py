"""Pipelines: where a model is cut, in which order ranks compute, and what is refused before the ETL.

Their trainings: test_mesh.py and test_multi_rank.py.
"""

from __future__ import annotations

import itertools
import json
import random
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from shardmill.errors import UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import SparkConfig
from tests.lab.scale import exhaustive
from tests.train.forked_ranks import launch_forked
from tests.train.ranks import VIT, kill_on_ranks, train_on_ranks
from tests.train.training import DriverRecorder, task_of
from train.backends.model_spec import InputScale, ModelSpec
from train.backends.torch.chain import cut
from train.config import TrainConfig
from train.labels import LabelSpec
from train.models.user import source_sha256
from train.planning.build_model import build
from train.planning.memory_fit import decided
from train.planning.setup import resolve
from train.planning.trial_build import BuildTask
from train.strategies.sharded.pipeline_schedules import (
    PipelineOptions,
    Schedule,
    most_kept,
    num_microbatches_of,
    schedule_named,
    schedule_of,
)

MODELS, CHAINS = "tests.train.torch_models", "tests.train.sharded_models"
SPEC = ModelSpec(
    (16, 16, 3), LabelSpec.of_schema(RowSchema("png", (16, 16, 3), ("cat", "dog"))), InputScale((0.0,) * 3, (1.0,) * 3)
)


class Action(NamedTuple):
    """What a rank computes: `kind` is PyTorch's name of it."""

    kind: str
    stage: int
    microbatch: int


def orders(schedule: Schedule, num_ranks: int, num_microbatches: int) -> list[list[Action]]:
    """What each rank computes, in its order. Needs no ranks."""
    if schedule.stages_per_rank == 1:
        # PyTorch's own lists are wrong for the last rank of 1F1B; these are what its loops do.
        return [of_one_stage(schedule, rank, num_ranks, num_microbatches) for rank in range(num_ranks)]
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


def of_one_stage(schedule: Schedule, rank: int, num_ranks: int, num_microbatches: int) -> list[Action]:
    """Forward passes until the first gradient can be there, or all of them; then a backward pass before each."""
    num_first = num_microbatches if schedule.name == "gpipe" else min(num_microbatches, num_ranks - rank)
    order = [Action("FORWARD", rank, number) for number in range(num_first)]
    for number in range(num_microbatches):
        order.append(Action("FULL_BACKWARD", rank, number))
        if num_first + number < num_microbatches:
            order.append(Action("FORWARD", rank, num_first + number))
    return order


def config_of(**given: Any) -> TrainConfig:
    return TrainConfig(**{"strategy": "pipeline_parallel", "num_workers": 2, "launcher": "local", **given})


@pytest.mark.parametrize(
    ("name", "kept"),
    # Of one stage on each of 4 ranks, the first keeps 4 microbatches. Interleaved (Narayanan et al., 2.2), it keeps
    # 2 (P - 1) + (v - 1) P + 1 = 11 of half stages. ZB-V keeps as many bytes as 1F1B.
    [("gpipe", 16), ("1f1b", 4), ("interleaved_1f1b", 5.5), ("zero_bubble", 4)],
)
def test_the_activations_that_a_rank_keeps_are_those_of_its_schedule(name, kept):
    schedule = schedule_named(name, 4)
    sizes = [1 / schedule.stages_per_rank] * 4 * schedule.stages_per_rank
    assert most_kept(schedule, 4, 16, sizes) == pytest.approx(kept)


def kept_by_listing(actions: list[Action], sizes: list[float]) -> float:
    """The most that a rank has at a time."""
    signs = {"FORWARD": 1, "FULL_BACKWARD": -1, "BACKWARD_INPUT": 0, "BACKWARD_WEIGHT": -1}
    return max(itertools.accumulate(signs[each.kind] * sizes[each.stage] for each in actions))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_what_is_counted_without_listing_is_what_lists_say(name):
    """Stages of any sizes, fewer microbatches than ranks, and more."""
    rng = random.Random(0)
    for num_ranks, num_microbatches in itertools.product((2, 3, 5), (1, 2, 3, 7, 8, 9, 15, 24)):
        schedule = schedule_named(name, num_ranks)
        if schedule.takes(num_microbatches, num_ranks):
            sizes = [rng.choice((0.0, 1.0, 2.0, 9.0)) for _ in range(num_ranks * schedule.stages_per_rank)]
            listed = [kept_by_listing(actions, sizes) for actions in orders(schedule, num_ranks, num_microbatches)]
            assert most_kept(schedule, num_ranks, num_microbatches, sizes) == max(listed), (num_ranks, num_microbatches)
    # Lists of these would have a billion actions.
    schedule = schedule_named(name, 4)
    assert most_kept(schedule, 4, 2**28, [0.5] * 4 * schedule.stages_per_rank) >= 2


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
def test_every_stage_computes_every_microbatch_once(name):
    num_ranks, num_microbatches = 3, 6
    schedule = schedule_named(name, num_ranks)
    of_ranks = orders(schedule, num_ranks, num_microbatches)
    forward = [(each.stage, each.microbatch) for actions in of_ranks for each in actions if each.kind == "FORWARD"]
    assert sorted(forward) == list(itertools.product(range(num_ranks * schedule.stages_per_rank), range(6)))
    for rank, actions in enumerate(of_ranks):
        assert {schedule.rank_of_stage(num_ranks)[each.stage] for each in actions} == {rank}


def test_a_chain_is_cut_where_the_most_expensive_part_is_cheapest():
    rng = random.Random(0)
    for _ in range(50):
        costs = [rng.randrange(1, 20) for _ in range(rng.randrange(4, 9))]
        num_parts = rng.randrange(1, 5)

        def worst(firsts: Any, costs: list[int] = costs) -> int:
            bounds = [*firsts, len(costs)]
            return max(sum(costs[first:end]) for first, end in itertools.pairwise(bounds))

        every = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), num_parts - 1)]
        firsts = cut(costs, num_parts)
        assert tuple(firsts) in every and worst(firsts) == min(map(worst, every))


def test_the_number_of_microbatches_is_chosen_or_refused():
    assert num_microbatches_of(PipelineOptions(), 24, 2) == 8
    assert num_microbatches_of(PipelineOptions(), 6, 3) == 6
    assert num_microbatches_of(PipelineOptions(num_microbatches=12), 24, 2) == 12
    with pytest.raises(UsageError, match=r"num_microbatches = 5; expected one of 2, 3, 4, 6, 8, 12, 24: .* 24 rows"):
        num_microbatches_of(PipelineOptions(num_microbatches=5), 24, 2)
    with pytest.raises(UsageError, match=r"num_microbatches = 2; expected one of 4, .* 1f1b on 4 ranks"):
        num_microbatches_of(PipelineOptions(num_microbatches=2), 12, 4)
    assert num_microbatches_of(PipelineOptions(schedule="gpipe", num_microbatches=2), 12, 4) == 2


REFUSED = {
    f"{MODELS}:stateful": (2, r"1 norm over the batch \(BatchNorm2d in block 2 of 6\).* use nn.GroupNorm"),
    f"{MODELS}:routed": (
        2,
        r"a Routed: no nn.Sequential, and without a method stages\(\).* train.strategy = 'torch_fsdp'",
    ),
    f"{CHAINS}:Skipping": (2, r"what stages\(\) returns computes outputs that differ by .* correct stages\(\)"),
    f"{CHAINS}:tied_chain": (3, r"uses 1.weight in stage 1 and in stage 2 of 3; .* only one rank holds them"),
    f"{CHAINS}:counting": (
        2,
        r"the buffer 'num_images' of a Counting, in block 2 of 3, changes in training; .* keep no running state",
    ),
    f"{MODELS}:tiny_vit": (6, r"a chain of 5 blocks with weights, and the pipeline has 6 stages; .* at most 5 stages"),
}


@pytest.mark.parametrize("model", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_where_it_is_tried(model):
    """By a process of its own, before the ETL (test_launching.py)."""
    num_workers, said = REFUSED[model]
    config = resolve(config_of(model=model, num_workers=num_workers, global_batch_size=24), SparkConfig()).config
    with pytest.raises(UsageError, match=said):
        build(BuildTask(decided(config, 1, to_bfloat16=False), SPEC, source_sha256(config.model)))


@pytest.mark.drill
@pytest.mark.parametrize("name", ["gpipe", "zero_bubble", exhaustive("1f1b"), exhaustive("interleaved_1f1b")])
def test_ranks_compute_in_the_listed_order(tiny_uri, tmp_path, name):
    config = {**VIT, "epochs": 1, "strategy": "pipeline_parallel", "num_workers": 2, "launcher": "local",
              "pipeline_parallel": {"schedule": name, "num_microbatches": 6}}  # fmt: skip
    watcher = DriverRecorder()
    result = launch_forked(
        task_of(tiny_uri, tmp_path, **config), watcher, "tests.train.multi_rank_workers:every_rank_reports_its_order"
    )
    expected = orders(schedule_named(name, 2), 2, 6)
    for rank, actions in enumerate(expected):
        told = json.loads((tmp_path / f"order/rank-{rank}.json").read_text())
        assert told == [list(each) for each in actions] * result.num_steps
    [fields] = watcher.named("pipeline")
    assert fields["microbatches"] == 6


@pytest.mark.drill
@pytest.mark.parametrize("schedule", ["zero_bubble", exhaustive("gpipe")])
def test_a_pipeline_resumes_exactly_at_its_layout(tiny_uri, tmp_path, schedule):
    """With averages of weights, blocks that are computed twice, frozen blocks, and half of the rows in each copy."""
    config = {**VIT, "strategy": "pipeline_parallel", "mesh": {"data": 2}, "ema_decay": 0.9,
              "pipeline_parallel": {"schedule": schedule}, "freeze": ("embedding*",),
              "memory": {"activation_checkpointing": "on"}}  # fmt: skip
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", 4, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 4, config, killed_at=7)
    result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", 4, config)
    assert result.resumed_from is not None and result.weights_sha256 == fresh.weights_sha256
    assert killed.losses | resumed.losses == undisturbed.losses
