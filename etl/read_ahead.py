"""Several reads at once: what is far away is waited for together, and handed on in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from shardmill.values import Rejection, SourceImage

Data = bytes | Rejection


def read_ahead(
    read: Callable[[SourceImage], Data], images: Iterable[SourceImage], num_threads: int
) -> Iterator[tuple[SourceImage, Data]]:
    """Each image with what `read` gives or raises, in order; at most `num_threads` of them wait in memory.

    With one thread, `read` runs in the caller's.
    """
    if num_threads == 1:
        yield from ((image, read(image)) for image in images)
        return
    waiting: deque[tuple[SourceImage, Future[Data]]] = deque()
    with ThreadPoolExecutor(num_threads, thread_name_prefix="read-ahead") as pool:
        try:
            for image in images:
                if len(waiting) == num_threads:
                    first, future = waiting.popleft()
                    yield first, future.result()
                waiting.append((image, pool.submit(read, image)))
            while waiting:
                first, future = waiting.popleft()
                yield first, future.result()
        finally:
            for _, future in waiting:
                future.cancel()
