"""Of an ETL on Spark, one attempt at a work unit that takes much longer than all others, until Spark tries it again."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardmill.failpoints import VARIABLE
from tests.processes import is_stopped
from tests.services.lost_executor import UNIT_WORKER, until
from tests.services.spark_standalone import SparkCluster
from tests.services.spark_submit import Submitted

SLOWER_BY = 10
_SLICE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class SlowedAttempt:
    """Slows one attempt at a work unit of an ETL that writes many shards a unit."""

    cluster: SparkCluster
    folder: Path
    """Of its own."""

    def settings(self) -> dict[str, str]:
        """Spark settings that stop the first process that has published a shard, and log all tasks."""
        (self.folder / "events").mkdir(parents=True)
        return {
            f"spark__executorEnv__{VARIABLE}": f"stop:shard_close@{self.folder}/stopped",
            "spark__eventLog__enabled": "true", "spark__eventLog__compress": "false",
            "spark__eventLog__dir": (self.folder / "events").as_uri(),
        }  # fmt: skip

    def slow_down(self, dataset: Path, etl: Submitted) -> list[dict[str, Any]]:
        """Until the ETL ends. Returns both attempts at the unit, as Spark's event log tells of them."""
        until(self._stopped, etl)
        [process] = self._stopped()
        # It is stopped until a second attempt has published something, too, so that whichever is lost leaves files
        # behind. From then on it runs a tenth of the time.
        until(lambda: _published_twice(dataset), etl)
        [unit] = _published_twice(dataset)
        with suppress(ProcessLookupError):  # Spark ends it when the other one is done
            while etl.process.poll() is None:
                os.kill(process, signal.SIGCONT)
                time.sleep(_SLICE_SECONDS)
                os.kill(process, signal.SIGSTOP)
                time.sleep(_SLICE_SECONDS * (SLOWER_BY - 1))
        etl.wait()
        return self._attempts(unit)

    def _stopped(self) -> list[int]:
        return [pid for pid in self.cluster.processes(UNIT_WORKER) if is_stopped(pid)]

    def _attempts(self, unit: int) -> list[dict[str, Any]]:
        """In the stage that has a speculative one. In a build from nothing the place of a task is that of its unit."""
        [log] = (self.folder / "events").rglob("events_*")
        started = [each for each in map(json.loads, log.read_text().splitlines()) if "TaskStart" in each["Event"]]
        [stage] = {each["Stage ID"] for each in started if each["Task Info"]["Speculative"]}
        infos = [each["Task Info"] for each in started if each["Stage ID"] == stage]
        return [info for info in infos if info["Index"] == unit]


def _published_twice(dataset: Path) -> set[int]:
    """Units of which two attempts have published shards of one split: their ids are the third part of the names."""
    found: defaultdict[tuple[Path, int], set[str]] = defaultdict(set)
    for shard in dataset.glob("shards/*/[0-9]*-*"):
        unit, _, attempt = shard.stem.split("-")[:3]
        found[shard.parent, int(unit)].add(attempt)
    return {unit for (_, unit), attempts in found.items() if len(attempts) == 2}
