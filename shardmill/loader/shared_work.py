"""Work that several threads of a pool do in parts: the thread that ends the last part finishes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Generic, TypeVar

Item = TypeVar("Item")


def share(pool: Executor, num_parts: int, work: Callable[[int], None], finish: Callable[[], Item]) -> Future[Item]:
    """Begin `work(part)` for each part, in any order and at once; the thread that ends the last one calls `finish`.

    The future has what `finish` returns, or what the first part that failed has raised. No thread waits for another, so
    a pool cannot come to a stop. Parts of a cancelled future that have not begun are left out; the future is
    cancelled if the pool is shut down without one of them.
    """
    if num_parts == 1:
        return pool.submit(_whole, work, finish)
    shared = _SharedWork(num_parts, work, finish)
    for part in range(num_parts):
        pool.submit(shared.do, part).add_done_callback(shared.without)
    return shared.future


def _whole(work: Callable[[int], None], finish: Callable[[], Item]) -> Item:
    work(0)
    return finish()


class _SharedWork(Generic[Item]):
    def __init__(self, num_parts: int, work: Callable[[int], None], finish: Callable[[], Item]) -> None:
        self.future: Future[Item] = Future()
        self._work = work
        self._finish = finish
        self._errors: list[BaseException | None] = [None] * num_parts
        self._num_left = num_parts
        self._lock = threading.Lock()

    def do(self, part: int) -> None:
        if not self.future.cancelled():
            try:
                self._work(part)
            except BaseException as error:
                self._errors[part] = error
        with self._lock:
            self._num_left -= 1
            is_last = not self._num_left
        # From here on it can no longer be cancelled.
        if is_last and self.future.set_running_or_notify_cancel():
            self._end()

    def without(self, part: Future[None]) -> None:
        """Cancel all if the pool has given up a part."""
        if part.cancelled():
            self.future.cancel()

    def _end(self) -> None:
        error = next(filter(None, self._errors), None)
        if error is not None:
            self.future.set_exception(error)
            return
        try:
            item = self._finish()
        except BaseException as raised:
            self.future.set_exception(raised)
        else:
            self.future.set_result(item)
