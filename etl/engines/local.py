"""The engine of one machine: a few processes that take work units from pipes; no Spark, no JVM, no pickle."""

from __future__ import annotations

import os
import selectors
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from etl.engines import Engine, EngineSettings
from etl.engines.unit_json import encode_task, encode_unit
from etl.engines.unit_runner import UnitRunner
from etl.grouping import group_here
from etl.units import UnitTask, WorkUnit
from shardmill.dataset.unit_result import UnitResult, decode_unit_result


def run_locally(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    """Each unit's result as it finishes. Raises the first error that a unit raised, after ending all processes."""
    task_json, waiting = encode_task(task), deque(map(encode_unit, units))
    num_workers = min(settings.num_workers or len(os.sched_getaffinity(0)), len(units))
    with ExitStack() as stack, selectors.DefaultSelector() as selector:
        for _ in range(num_workers):
            runner = UnitRunner(task_json)
            stack.callback(runner.close)
            runner.send(waiting.popleft())
            selector.register(runner.answers, selectors.EVENT_READ, runner)
        while selector.get_map():
            for key, _ in selector.select():
                runner: UnitRunner = key.data
                selector.unregister(key.fileobj)
                result = runner.receive()
                if result is not None:
                    yield decode_unit_result(result)
                    if not waiting:
                        continue
                    runner.send(waiting.popleft())
                selector.register(runner.answers, selectors.EVENT_READ, runner)


LOCAL = Engine(run_locally, group_here)
