"""The engine of one machine: a few processes that receive work units over pipes; no Spark, no JVM, no pickle."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import cache

from etl.engines import Engine, EngineSettings
from etl.engines.unit_runner import ForkServer, UnitRunner
from etl.listing.grouping import group_here
from etl.units.units import CopyUnit, UnitTask, WorkUnit, encode_task, encode_unit
from shardmill.dataset.build import UnitResult, decode_unit_result

# Processes for each worker: while one of them stores a unit, another decodes the next one. What a mapping stores is
# small, and each process would hold its model.
_PROCESSES_PER_WORKER, _MAPPING_PROCESSES_PER_WORKER = 2, 1

_server_of_build: Callable[[], ForkServer] | None = None


@contextmanager
def prepared(settings: EngineSettings) -> Iterator[None]:
    """Inside, all that `run_locally` does is done by forks of one process; it starts when there is work."""
    global _server_of_build
    with ExitStack() as stack:
        _server_of_build = cache(lambda: stack.enter_context(closing(ForkServer())))
        try:
            yield
        finally:
            _server_of_build = None


def run_locally(units: Sequence[WorkUnit | CopyUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Each unit's result as it finishes. Raises the first error that a unit raised, after ending all processes."""
    if not units:
        return
    waiting = deque(map(encode_unit, units))
    num_workers = settings.num_workers or len(os.sched_getaffinity(0))
    max_busy = num_workers * (_PROCESSES_PER_WORKER if task.mapping is None else _MAPPING_PROCESSES_PER_WORKER)
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        server = _server_of_build() if _server_of_build else stack.enter_context(closing(ForkServer()))
        idle: list[UnitRunner] = []
        busy: set[UnitRunner] = set()
        task_json = encode_task(task)
        while waiting or busy:
            num_decoding = sum(runner.is_decoding for runner in busy)
            if waiting and num_decoding < num_workers and len(busy) < max_busy:
                if not idle:
                    idle.append(UnitRunner(task_json, server.start_worker))
                    stack.callback(idle[-1].close)
                runner = idle.pop()
                runner.send(waiting.popleft())
                busy.add(runner)
                selector.register(runner.answers, selectors.EVENT_READ, runner)
                continue
            for key, _ in selector.select():
                runner: UnitRunner = key.data
                selector.unregister(key.fileobj)
                result = runner.receive()
                if result is None:
                    selector.register(runner.answers, selectors.EVENT_READ, runner)
                else:
                    settings.count_retries(int(runner.is_retried))
                    busy.remove(runner)
                    idle.append(runner)
                    yield decode_unit_result(result)


LOCAL = Engine(run_locally, group_here, run_locally, prepared)
