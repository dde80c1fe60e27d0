"""A task of Spark's whose process hardly runs, until Spark tries its work unit a second time beside it."""

from __future__ import annotations

import json
import os
import signal
import time
import urllib.request
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.processes import parent_of
from tests.services.lost_executor import until
from tests.services.marked import marked
from tests.services.spark_standalone import SparkCluster
from tests.services.spark_submit import Submitted

SLOWER_BY = 10
_SLICE_SECONDS = 0.02
# What a unit has published by the time its process is chosen: some of its shards, and far from all.
_FEW_SHARDS = 5
# Spark's pages are that late.
_PAGES_SECONDS = 0.3


@dataclass(frozen=True, slots=True)
class SlowedAttempt:
    """Slows one attempt at a work unit of an ETL that writes many shards a unit."""

    cluster: SparkCluster
    pages: str
    """The application's, over HTTP."""
    dataset: Path
    etl: Submitted

    def slow_down(self) -> list[dict[str, Any]]:
        """Until the ETL ends. Returns both attempts at the unit, as Spark's status API tells of them."""
        chosen: list[tuple[int, int]] = []
        until(lambda: chosen.extend(self._stopped()) or chosen, self.etl)
        [(unit, process)] = chosen
        # It stands still until a second attempt has published something, too, so that whichever is lost leaves files
        # behind. From then on it runs a tenth of the time.
        until(lambda: self._num_publishing(unit) == 2, self.etl)
        both = [task for task in self._tasks() if task["index"] == unit]
        with suppress(ProcessLookupError):  # Spark ends it when the other one is done
            while self.etl.process.poll() is None:
                os.kill(process, signal.SIGCONT)
                time.sleep(_SLICE_SECONDS)
                os.kill(process, signal.SIGSTOP)
                time.sleep(_SLICE_SECONDS * (SLOWER_BY - 1))
        return both

    def _stopped(self) -> list[tuple[int, int]]:
        """A unit that has published its first shards, with its process, which stands still; or nothing yet."""
        for task in self._tasks():
            process = self._unit_workers().get(task["executorId"])
            if task["status"] != "RUNNING" or process is None or not 0 < self._num_shards(task) <= _FEW_SHARDS:
                continue
            os.kill(process, signal.SIGSTOP)
            time.sleep(_PAGES_SECONDS)
            still = [each for each in self._tasks() if each["taskId"] == task["taskId"]]
            if [each["status"] for each in still] == ["RUNNING"] and self._num_shards(task) <= _FEW_SHARDS:
                return [(task["index"], process)]
            os.kill(process, signal.SIGCONT)
        return []

    def _num_publishing(self, unit: int) -> int:
        """Attempts that have published shards of one split; each has an id, which is the third part of their names."""
        found: dict[Path, set[str]] = defaultdict(set)
        for shard in self._shards(unit):
            found[shard.parent].add(shard.stem.split("-")[2])
        return max(map(len, found.values()))

    def _num_shards(self, task: dict[str, Any]) -> int:
        """Of the task's unit, in a build from nothing: there the place of a task is that of its unit."""
        return len(self._shards(task["index"]))

    def _shards(self, unit: int) -> list[Path]:
        return list(self.dataset.glob(f"shards/*/{unit:06d}-*"))

    def _tasks(self) -> list[dict[str, Any]]:
        """All attempts at tasks of the stage that runs."""
        try:
            [application] = self._ask("")
            name = application["id"]
            [stage, *_] = self._ask(f"/{name}/stages?status=active") or [None]
            if stage is None:
                return []
            return self._ask(f"/{name}/stages/{stage['stageId']}/{stage['attemptId']}/taskList?length=1000")
        except (OSError, json.JSONDecodeError):
            return []  # it is not there yet, starts up and says so in words, or has ended

    def _ask(self, path: str) -> list[dict[str, Any]]:
        with urllib.request.urlopen(f"{self.pages}/api/v1/applications{path}", timeout=10) as answer:
            return json.load(answer)

    def _unit_workers(self) -> dict[str, int]:
        """The process that runs an executor's units, by the executor's id."""
        processes, found = marked(self.cluster.mark), {}
        for process in self.cluster.processes("etl.engines.unit_worker"):
            above = process
            with suppress(OSError):
                while above in processes and "--executor-id" not in processes[above]:
                    above = parent_of(above)
            if above in processes:
                arguments = processes[above]
                found[arguments[arguments.index("--executor-id") + 1]] = process
        return found
