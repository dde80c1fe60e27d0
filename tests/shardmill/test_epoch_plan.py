"""The epoch plan: exactly once, equal steps, the same global batches at any world size, resumable anywhere, bounded."""

from __future__ import annotations

import dataclasses
import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmill.epoch_plan import (
    WINDOW_BUDGET_BYTES,
    EpochPlan,
    PlanSpec,
    num_streams_for,
    plan_epoch,
    streams_of_rank,
    window_bytes_within,
)
from shardmill.errors import UsageError
from shardmill.loader.reader import StepPlanner

plans = st.builds(
    lambda chunk_rows, streams, per_stream, window, seed, epoch, shuffle: plan_epoch(
        PlanSpec("layout", "train", seed, streams * per_stream, streams, window, shuffle), np.array(chunk_rows), epoch
    ),
    chunk_rows=st.lists(st.integers(1, 30), min_size=1, max_size=25),
    streams=st.integers(1, 12),
    per_stream=st.integers(1, 9),
    window=st.integers(1, 5),
    seed=st.integers(0, 2**63),
    epoch=st.integers(0, 1000),
    shuffle=st.booleans(),
)


def steps_of(plan: EpochPlan, streams: range, first_step: int = 0) -> list[list[tuple[int, int]]]:
    """Real rows of each step from `first_step` on, in batch order."""
    planner = StepPlanner(plan, streams)
    steps = []
    for step in range(first_step, plan.num_steps):
        rows = planner.rows_of_step(step)
        assert len(rows.weights_N) == len(streams) * plan.spec.rows_per_stream
        real = rows.weights_N > 0
        steps.append(list(zip(rows.chunks_N[real].tolist(), rows.rows_N[real].tolist(), strict=True)))
    return steps


def all_streams(plan: EpochPlan) -> range:
    return range(plan.spec.num_streams)


@given(plans, st.randoms(use_true_random=False))
def test_a_step_has_the_same_rows_in_whatever_order_steps_are_asked_for(plan: EpochPlan, random):
    in_order = steps_of(plan, all_streams(plan))
    steps = [random.randrange(plan.num_steps) for _ in range(6)]
    steps += [step for first in steps for step in range(first, min(first + 4, plan.num_steps))]
    planner = StepPlanner(plan, all_streams(plan))
    for step in steps:
        rows, alone = planner.rows_of_step(step), StepPlanner(plan, all_streams(plan)).rows_of_step(step)
        assert all(map(np.array_equal, rows, alone)), step
        real = rows.weights_N > 0
        assert list(zip(rows.chunks_N[real].tolist(), rows.rows_N[real].tolist(), strict=True)) == in_order[step]
        first = step * plan.spec.rows_per_stream
        has_one_window = all(
            plan.window_at(stream, first).stop >= first + plan.spec.rows_per_stream
            for stream in all_streams(plan)
            if first < plan.stream_rows(stream)
        )
        if has_one_window:
            assert set(rows.chunks_N[real].tolist()) <= planner.live_chunks()


@given(plans)
def test_every_row_occurs_exactly_once(plan: EpochPlan):
    seen = [row for step in steps_of(plan, all_streams(plan)) for row in step]
    chunks = zip(plan.chunk_order.tolist(), np.diff(plan.chunk_starts).tolist(), strict=True)
    expected = [(chunk, row) for chunk, num_rows in chunks for row in range(num_rows)]
    assert sorted(seen) == sorted(expected)


@given(plans, st.integers(1, 8))
def test_global_batches_do_not_depend_on_the_world_size(plan: EpochPlan, world_size: int):
    world_size = min(world_size, plan.spec.num_streams)
    alone = steps_of(plan, all_streams(plan))
    ranks = [steps_of(plan, streams_of_rank(rank, world_size, plan.spec.num_streams)) for rank in range(world_size)]
    assert {len(steps) for steps in ranks} == {plan.num_steps}
    for step, whole in enumerate(alone):
        assert [row for steps in ranks for row in steps[step]] == whole
        assert len(whole) == plan.num_rows_of_step(step)


@given(plans)
def test_resuming_at_every_step_gives_the_same_rest(plan: EpochPlan):
    whole = steps_of(plan, all_streams(plan))
    for first_step in range(plan.num_steps + 1):
        assert steps_of(plan, all_streams(plan), first_step) == whole[first_step:]


@given(plans)
def test_a_stream_looks_at_no_more_chunks_than_its_window(plan: EpochPlan):
    for stream in all_streams(plan):
        position = 0
        while position < plan.stream_rows(stream):
            window = plan.window_at(stream, position)
            assert window.start == position
            assert len(window.chunk_numbers) <= plan.spec.window_chunks
            assert set(window.chunks_N.tolist()) <= window.chunk_numbers
            position = window.stop


@given(plans)
def test_streams_differ_by_at_most_one_row_and_only_the_end_is_padded(plan: EpochPlan):
    lengths = [plan.stream_rows(stream) for stream in all_streams(plan)]
    assert sum(lengths) == plan.num_rows and max(lengths) - min(lengths) <= 1
    # Where a stream is one row short, its padding may begin in the last step but one and a single row earlier.
    for step in range(plan.num_steps - 2):
        assert plan.num_rows_of_step(step) == plan.spec.global_batch_size
    assert plan.num_rows_of_step(plan.num_steps - 1) >= 1


def test_epochs_and_seeds_give_different_orders_and_the_same_key_the_same_order():
    rows = np.full(40, 7)
    spec = PlanSpec("layout", "train", 5, 16, 8, 2)
    first = steps_of(plan_epoch(spec, rows, 0), range(8))
    assert first == steps_of(plan_epoch(spec, rows, 0), range(8))
    assert first != steps_of(plan_epoch(spec, rows, 1), range(8))
    assert first != steps_of(plan_epoch(dataclasses.replace(spec, seed=6), rows, 0), range(8))


def test_without_shuffle_rows_come_in_layout_order():
    plan = plan_epoch(PlanSpec("layout", "test", 0, 4, 1, 1, shuffle=False), np.array([3, 2, 4]), 0)
    rows = [row for step in steps_of(plan, range(1)) for row in step]
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (2, 3)]


def test_the_worked_example_of_the_module():
    order = np.array([2, 0, 1])
    rows = np.array([3, 2, 3])
    plan = EpochPlan(PlanSpec("layout", "train", 0, 4, 2, 1), 0, order, np.array([0, *np.cumsum(rows[order])]))
    windows = [[plan.window_at(0, 0), plan.window_at(0, 3)], [plan.window_at(1, 0), plan.window_at(1, 2)]]
    assert [[(w.start, len(w.rows_N)) for w in stream] for stream in windows] == [[(0, 3), (3, 1)], [(0, 2), (2, 2)]]
    assert plan.num_steps == 2


@pytest.mark.parametrize(
    "change",
    [
        {"layout_digest": "other"}, {"split": "test"}, {"seed": 2}, {"global_batch_size": 32}, {"num_streams": 4},
        {"window_chunks": 3}, {"shuffle": False},
    ],
)  # fmt: skip
def test_the_fingerprint_covers_whatever_changes_the_plan(change: dict):
    spec = PlanSpec("layout", "train", 1, 16, 8, 2)
    assert dataclasses.replace(spec, **change).fingerprint != spec.fingerprint


def test_a_batch_that_the_streams_do_not_divide_is_refused_with_the_numbers():
    with pytest.raises(UsageError, match=r"global_batch_size = 30 with num_streams = 8.*use a batch of 32"):
        PlanSpec("layout", "train", 0, 30, 8, 1)


@pytest.mark.parametrize("world_size", [0, 9])
def test_more_ranks_than_streams_are_refused(world_size: int):
    with pytest.raises(UsageError, match=f"{world_size} ranks for 8 streams.*expected 1 to 8"):
        streams_of_rank(0, world_size, 8)


def test_the_windows_of_a_rank_share_its_budget_and_up_to_eight_ranks_begin_alike():
    def of_a_stream(num_ranks: int) -> int:
        return window_bytes_within(640, [streams_of_rank(rank, num_ranks, 64) for rank in range(num_ranks)])

    assert {of_a_stream(num_ranks) for num_ranks in range(1, 9)} == {10}
    assert [of_a_stream(num_ranks) for num_ranks in (9, 16, 64)] == [80, 160, 640]
    # As documented; another number would change the order of rows of all that begins from then on.
    assert window_bytes_within(WINDOW_BUDGET_BYTES, [range(8)]) == 32_000_000


def test_a_billion_rows_are_planned_in_a_moment():
    chunk_rows = np.full(1_000_000, 160)
    plan = plan_epoch(PlanSpec("layout", "train", 0, 4096, 1024, 4), chunk_rows, 3)
    rows = StepPlanner(plan, streams_of_rank(7, 256, 1024)).rows_of_step(plan.num_steps - 1)
    assert rows.weights_N.sum() == plan.num_rows_of_step(plan.num_steps - 1, streams_of_rank(7, 256, 1024))


def digest(*arrays: np.ndarray) -> str:
    return hashlib.sha256(b"".join(each.astype("<i8").tobytes() for each in arrays)).hexdigest()[:16]


def test_the_plan_of_many_chunks_is_what_it_was():
    """Order and starts of an earlier release, in which datasets and checkpoints were made."""
    chunk_rows = np.arange(300_000) % 97 + 1
    plan = plan_epoch(PlanSpec("layout", "train", 5, 64, 8, 3), chunk_rows, 2)
    assert [digest(plan.chunk_order), digest(plan.chunk_starts)] == ["be4fc7e6f53e4078", "20cad839841d67c2"]


@pytest.mark.parametrize(
    ("seed", "epoch", "stream", "position", "start", "expected"),
    [
        (5, 2, 0, 0, 0, "05dea9db1d698617"),
        (5, 2, 7, 0, 0, "c3eb679ef51a2cbd"),
        (5, 2, 7, 9000, 8990, "cff7b21e27e2dca6"),
        (5, 3, 7, 9000, 8968, "dca27a0e0141fc4a"),
        (6, 2, 0, 0, 0, "8571c40c333d1d26"),
        (2**63, 0, 3, 17000, 16940, "ada08f67e234525a"),
    ],
)
def test_the_rows_inside_a_window_are_those_of_earlier_releases(
    seed: int, epoch: int, stream: int, position: int, start: int, expected: str
):
    """A key of the shuffle that changed would give a resumed training other rows under the same fingerprint."""
    plan = plan_epoch(PlanSpec("layout", "train", seed, 64, 8, 3), np.arange(3000) % 97 + 1, epoch)
    window = plan.window_at(stream, position)
    assert (window.start, digest(window.chunks_N, window.rows_N)) == (start, expected)


def test_plans_without_a_selection_keep_the_name_that_they_had_before_there_was_one():
    spec = PlanSpec("layout", "train", 5, 64, 8, 3)
    assert spec.fingerprint == "c7ca41fd8e0060d3163bac8dfe6ea38f7ccbb428aaeb6693896d3e0b15935be3"
    assert dataclasses.replace(spec, selection="a").fingerprint != spec.fingerprint


@pytest.mark.parametrize(
    ("global_batch_size", "world_size", "expected"),
    [(64, 1, 8), (64, 8, 8), (64, 9, 16), (64, 16, 16), (90, 8, 9), (90, 9, 9), (90, 10, 10), (4, 1, 4), (64, 99, 64)],
)
def test_streams_are_as_many_as_up_to_eight_ranks_share(global_batch_size: int, world_size: int, expected: int):
    assert num_streams_for(global_batch_size, world_size) == expected
