"""Stores measurements of `etl_peers.py` or `loaders.py` in a JSON file, and computes medians and ratios from them."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, date, datetime
from pathlib import Path


@dataclass(frozen=True)
class Result:
    """One run of one contestant; nothing was measured if it failed."""

    version: str = ""
    fault: str = ""
    """Why it failed, or how many images are missing."""
    wall_seconds: float | None = None
    loop_seconds: float | None = None
    """Of a limit: without the start of its processes. Of a loader: of one epoch, once it is warm."""
    cpu_seconds: float = 0.0
    worker_peak_mb: float = 0.0
    total_peak_mb: float = 0.0
    call: str = ""
    """When the call of the benchmark began that measured it; empty in files of before it was stored."""
    round: int = 0
    hardware: str = ""
    """Where it was measured."""

    @property
    def seconds(self) -> float | None:
        """What counts: the loop of a limit or a loader, everybody else's whole process."""
        return self.wall_seconds if self.loop_seconds is None else self.loop_seconds

    def in_words(self, num_images: int) -> str:
        if self.seconds is None:
            return f"failed: {self.fault}"
        rate = f"{self.seconds:7.1f} s, {num_images / self.seconds:6,.0f} images/s, cpu {self.cpu_seconds:6.1f} s"
        return f"{rate}, {self.total_peak_mb:,.0f} MB" + (f", {self.fault}" if self.fault else "")


@dataclass
class Results:
    """(workload, size) -> contestant -> one result for each round.

    A call of the benchmark adds its rounds to those of earlier calls. Ratios compare what ran in the same round of the
    same call. Once all contestants of a call were measured again, it is forgotten.
    """

    runs: dict[tuple[str, int], dict[str, list[Result]]] = field(default_factory=dict)
    hardware: str = ""
    measured_on: str = ""
    call: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    @classmethod
    def load(cls, path: Path) -> Results:
        """What is in the file; nothing if there is none yet."""
        if not path.exists():
            return cls()
        document = json.loads(path.read_text())
        runs = {
            (entry["workload"], entry["num_images"]): {
                name: [Result(**{"round": number, **each}) for number, each in enumerate(rounds)]
                for name, rounds in entry["contestants"].items()
            }
            for entry in document["runs"]
        }
        return cls(runs, document["hardware"], document["measured_on"])

    def save(self, path: Path) -> None:
        entries = [
            {
                "workload": workload,
                "num_images": size,
                "contestants": {name: [asdict(each) for each in rounds] for name, rounds in contestants.items()},
            }
            for (workload, size), contestants in sorted(self.runs.items())
        ]
        self.hardware, self.measured_on = hardware(), date.today().isoformat()
        document = {"hardware": self.hardware, "measured_on": self.measured_on, "runs": entries}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    def add(self, workload: str, size: int, contestant: str, number: int, result: Result) -> None:
        """Of round `number` of this call."""
        contestants = self.runs.setdefault((workload, size), {})
        contestants.setdefault(contestant, []).append(
            replace(result, call=self.call, round=number, hardware=hardware())
        )
        needed = {rounds[-1].call for rounds in contestants.values()}
        for name, rounds in contestants.items():
            contestants[name] = [each for each in rounds if each.call in needed]

    def calls(self, workload: str, size: int) -> list[str]:
        """The newest first."""
        contestants = self.runs.get((workload, size), {})
        return sorted({each.call for rounds in contestants.values() for each in rounds}, reverse=True)

    def hardware_of(self, call: str) -> str:
        """Where a call was measured."""
        return next(
            each.hardware for named in self.runs.values() for rounds in named.values() for each in rounds
            if each.call == call
        )  # fmt: skip

    def of_call(self, call: str) -> Results:
        """What was measured in one call."""
        return self._chosen(lambda rounds: call)

    def newest(self) -> Results:
        """For each contestant what was measured last; there are no ratios between contestants of different calls."""
        return self._chosen(lambda rounds: rounds[-1].call)

    def _chosen(self, call_of: Callable[[list[Result]], str]) -> Results:
        runs = {
            key: {
                name: chosen
                for name, rounds in contestants.items()
                if (chosen := [each for each in rounds if each.call == call_of(rounds)])
            }
            for key, contestants in self.runs.items()
        }
        return Results(runs, self.hardware, self.measured_on)

    def sizes(self, workload: str) -> list[int]:
        return sorted(size for name, size in self.runs if name == workload)

    def seconds(self, workload: str, size: int, contestant: str) -> list[float]:
        """Of each round that ended well."""
        return list(self._by_round(workload, size, contestant).values())

    def ratio(self, workload: str, size: int, ours: str, other: str) -> float | None:
        """How many times as fast as the other ours is: the median of the rounds' ratios. None if one has no figure."""
        own, theirs = (self._by_round(workload, size, name) for name in (ours, other))
        ratios = [theirs[place] / seconds for place, seconds in own.items() if place in theirs]
        return statistics.median(ratios) if ratios else None

    def _by_round(self, workload: str, size: int, contestant: str) -> dict[tuple[str, int], float]:
        rounds = self.runs.get((workload, size), {}).get(contestant, [])
        return {(each.call, each.round): each.seconds for each in rounds if each.seconds is not None and not each.fault}

    def slope(self, workload: str, contestant: str) -> float | None:
        """Images a second between the smallest and the largest size: what is left without the start."""
        sizes = [size for size in self.sizes(workload) if self.seconds(workload, size, contestant)]
        if len(sizes) < 2:
            return None
        first, last = (statistics.median(self.seconds(workload, size, contestant)) for size in (sizes[0], sizes[-1]))
        return (sizes[-1] - sizes[0]) / (last - first) if last > first else None

    def fastest(self, workload: str, size: int, contestants: tuple[str, ...]) -> str | None:
        """The one with the least median time."""
        medians = {
            name: statistics.median(seconds) for name in contestants if (seconds := self.seconds(workload, size, name))
        }
        return min(medians, key=lambda name: medians[name]) if medians else None


def hardware() -> str:
    """Processors, memory, kernel and Python in one line."""
    cpus = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in cpus if line.startswith("model name")), platform.machine())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{cores} x {model}, {memory:.0f} GiB, Linux {platform.release()}, Python {platform.python_version()}"
