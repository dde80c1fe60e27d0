"""What exchanges of a sharded model cost: the seconds that a rank waits in them, and the bytes that it hands over."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass, field

import pytest

from tests.train.forked_ranks import launch_forked
from tests.train.multi_rank_workers import LATE_SECONDS
from tests.train.ranks import usually_of
from tests.train.training import task_of
from train.checkpoints.shards import WEIGHTS_PART, read_index
from train.reporting.observer import GlobalStep
from train.strategies import strategies_that_share

CONFIG = {"model": "tests.train.torch_models:tiny_vit", "num_streams": 12, "global_batch_size": 24, "epochs": 1}


@dataclass
class Seen:
    steps: list[GlobalStep] = field(default_factory=list)
    moved: list[dict] = field(default_factory=list)

    def step(self, step: GlobalStep) -> None:
        self.steps.append(step)

    def event(self, name: str, fields: dict) -> None:
        if name == "collectives":
            self.moved.append(dict(fields))


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(
    "strategy",
    usually_of({"hybrid", "pipeline_parallel"}, strategies_that_share()),
)
def test_a_rank_that_waits_for_a_late_one_says_so_and_bytes_are_counted_once(tiny_uri, tmp_path, strategy):
    seen = Seen()
    task = task_of(tiny_uri, tmp_path, num_workers=2, launcher="local", **{**CONFIG, "strategy": strategy})
    result = launch_forked(task, seen, "tests.train.multi_rank_workers:last_rank_is_late")
    # A busy machine makes one early step late; not half of them.
    waits = [step.reports[0].seconds["allreduce"] for step in seen.steps[1:]]
    assert statistics.median(waits) > 0.8 * LATE_SECONDS, waits
    for step in seen.steps[1:]:
        early, late = (report.seconds for report in step.reports)
        assert early["compute"] >= 0 and late["compute"] > LATE_SECONDS
    assert result.time_shares.allreduce > 0
    [moved] = seen.moved
    index = read_index(lambda file: (tmp_path / result.checkpoint / file).read_bytes())
    weight_bytes = 4 * sum(math.prod(shard.shape) for shard in index.whole(WEIGHTS_PART))
    if strategy == "torch_fsdp":
        # The last weights that were gathered are kept for the backward pass.
        assert weight_bytes < moved["all_gather_bytes"] <= 2.1 * weight_bytes
        assert weight_bytes <= moved["reduce_scatter_bytes"] <= 1.1 * weight_bytes
    if strategy == "zero1":
        assert weight_bytes <= moved["all_reduce_bytes"] < 1.1 * weight_bytes
        assert 0.9 * weight_bytes < moved["all_gather_bytes"] < 1.2 * weight_bytes
    if strategy == "tensor_parallel":
        # 24 rows of 64 tokens of 32 numbers, twice in each direction of both blocks; and the norm of the gradients.
        assert 0 <= moved["all_reduce_bytes"] - 2 * 4 * (4 * 24 * 64 * 32) < 100
        assert moved["num_calls"] < 12


def test_functions_that_wait_are_put_back():
    from torch import distributed as dist

    from train.backends.torch.collectives import blocked

    before = dist.Work.wait
    with pytest.raises(ZeroDivisionError), blocked() as found:
        assert dist.Work.wait is not before
        raise ZeroDivisionError
    assert dist.Work.wait is before and found.seconds == 0.0
