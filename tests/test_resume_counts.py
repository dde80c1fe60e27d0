"""The figures of `benchmarks/resume_conformance.py`, counted by hand: two ranks, epochs of six rows."""

from __future__ import annotations

from benchmarks.resume_counts import Counts, count, count_uninterrupted

WHOLE = [[[[0], [1], [2]], [[3], [4], [5]]]]
"""Rank 0 reads rows 0, 1 and 2, rank 1 reads 3, 4 and 5, in three steps."""


def test_a_run_that_resumes_exactly_differs_in_nothing_also_at_another_world_size() -> None:
    same = [[[[0]], [[3]]], [[[1], [2]], [[4], [5]]]]
    one_rank_after_two = [[[[0]], [[3]]], [[[1, 4], [5, 2]]]]
    assert count([same, one_rank_after_two], [WHOLE, WHOLE]) == Counts(0, 0, 0, 0)


def test_lost_rows_repeated_rows_and_rows_at_another_step_are_told_apart() -> None:
    # Step 0 again on rank 0 (row 0 twice), so that rows 1 and 2 are not reached; row 5 comes before row 4.
    wrong = [[[[0]], [[3]]], [[[0], [1]], [[5], [4]]]]
    # Lost: 2. Repeated: 0. Out of order: 1, 4 and 5.
    assert count([wrong], [WHOLE]) == Counts(lost=1, repeated=1, out_of_order=3, unequal=0)
    # Of each epoch by itself: a row that one epoch lacks is not made good by another, which has it twice.
    other = [[[[0], [1], [2]], [[3], [4], [5]]], [[[2]], [[0]]]]
    assert count([wrong, other], [WHOLE, WHOLE]) == Counts(lost=1, repeated=3, out_of_order=3, unequal=0)


def test_steps_that_one_rank_has_and_another_has_not_are_counted_in_each_run() -> None:
    # Two steps beside one, and after the resume one step beside none.
    uneven = [[[[0], [1]], [[3]]], [[[2]], []]]
    assert count([uneven], [WHOLE]) == Counts(lost=2, repeated=0, out_of_order=0, unequal=2)


def test_an_uninterrupted_run_is_compared_with_each_row_once() -> None:
    counts = count_uninterrupted([[[[[0], [1]], [[2], [0]]]]], num_rows=5)
    assert (counts.lost, counts.repeated, counts.unequal) == (2, 1, 0)
