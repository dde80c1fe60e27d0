"""Work in parts: all of it or its first fault, several threads at once, and nothing of it once it is cancelled."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from shardmill.loader.shared_work import share

LONG_SECONDS = 60


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("num_parts", [1, 2, 7])
def test_the_last_part_finishes_the_work(num_threads: int, num_parts: int):
    done: list[int] = []
    with ThreadPoolExecutor(num_threads) as pool:
        assert share(pool, num_parts, done.append, lambda: sorted(done)).result() == list(range(num_parts))


def test_parts_are_worked_on_at_once():
    both = threading.Barrier(2)

    def meet(part: int) -> None:
        both.wait(LONG_SECONDS)

    with ThreadPoolExecutor(2) as pool:
        # A barrier that is broken, and with it the work, if one part waits for the other to end.
        assert share(pool, 2, meet, lambda: "both").result() == "both"


@pytest.mark.parametrize("num_parts", [1, 4])
def test_the_first_part_that_failed_is_the_fault(num_parts: int):
    is_later_done = threading.Event()

    def work(part: int) -> None:
        if part == 0 and num_parts > 1:
            is_later_done.wait(LONG_SECONDS)
        try:
            raise ValueError(f"part {part}")
        finally:
            if part == 3:
                is_later_done.set()

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="part 0"):
        share(pool, num_parts, work, lambda: pytest.fail("finished without its parts")).result()


@pytest.mark.parametrize("num_parts", [1, 2])
def test_what_finishing_raises_is_the_fault(num_parts: int):
    def finish() -> None:
        raise ValueError("at the end")

    with ThreadPoolExecutor(2) as pool, pytest.raises(ValueError, match="at the end"):
        share(pool, num_parts, lambda part: None, finish).result()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_cancelled_work_does_not_begin(num_parts: int):
    done, may_go_on = [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(may_go_on.wait, LONG_SECONDS)
        future = share(pool, num_parts, done.append, lambda: done.append(-1))
        assert future.cancel()
        may_go_on.set()
    assert not done
    with pytest.raises(CancelledError):
        future.result()


@pytest.mark.parametrize("num_parts", [1, 3])
def test_nobody_waits_for_work_that_a_closed_pool_has_given_up(num_parts: int):
    may_go_on = threading.Event()
    pool = ThreadPoolExecutor(1)
    pool.submit(may_go_on.wait, LONG_SECONDS)
    future = share(pool, num_parts, lambda part: None, lambda: None)
    pool.shutdown(wait=False, cancel_futures=True)
    try:
        with pytest.raises(CancelledError):
            future.result(LONG_SECONDS)
    finally:
        may_go_on.set()
