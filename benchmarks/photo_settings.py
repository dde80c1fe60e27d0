"""Measures `shardmill etl` of 12-megapixel photographs with one better setting after the other.

    .venv/bin/python benchmarks/photo_settings.py --images DIR --scratch DIR --rounds 3

Each row of CASES is a whole command in a folder of its own; a round runs each once, every other round in reverse order.
Prints the medians of processor time, time and memory, and the bytes of the dataset.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from results import hardware
from whole_process import Usage, run_measured
from workloads import WORKLOADS, find_photos

BEGIN = {"image_size": "640", "encoding": "png", "kernel": "wheels"}
CASES: tuple[tuple[str, dict[str, str]], ...] = (
    ("begin", {}),
    ("encoding", {"encoding": "jpeg"}),
    ("half", {"encoding": "jpeg", "image_size": "512"}),
    ("quarter", {"encoding": "jpeg", "image_size": "256"}),
    ("kernel", {"encoding": "jpeg", "image_size": "256", "kernel": "native"}),
)
TIME_LIMIT = 600.0


@dataclass(frozen=True)
class Measured:
    """One command."""

    usage: Usage
    dataset_bytes: int


def run(photos: Path, workdir: Path, settings: dict[str, str]) -> Measured:
    overrides = [part for name, value in settings.items() for part in ("--set", f"etl.{name}={value}")]
    command = [sys.executable, "-m", "pipeline.cli", "etl", str(photos), "--workdir", str(workdir), *overrides]
    usage = run_measured(command, os.environ, TIME_LIMIT, workdir.with_suffix(".log"))
    shards = (path for path in (workdir / "dataset" / "shards").rglob("*") if path.is_file())
    return Measured(usage, sum(path.stat().st_size for path in shards))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path, help="a folder of JPEGs, which are enlarged")
    parser.add_argument("--scratch", required=True, type=Path)
    parser.add_argument("--num-images", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    given.scratch.mkdir(parents=True, exist_ok=True)
    photos = WORKLOADS["big"].files(find_photos(given.images), given.scratch, given.num_images)
    found: defaultdict[str, list[Measured]] = defaultdict(list)
    for number in range(given.rounds):
        for name, settings in CASES[:: -1 if number % 2 else 1]:
            workdir = given.scratch / f"case-{name}"
            shutil.rmtree(workdir, ignore_errors=True)
            found[name].append(run(photos, workdir, BEGIN | settings))
            if name == CASES[-1][0]:
                found["again"].append(run(photos, workdir, BEGIN | settings))
            sys.stderr.write(f"round {number}, {name}: {found[name][-1]}\n")
    source_mb = sum(path.stat().st_size for path in photos.rglob("*.jpg")) / 1e6
    sys.stdout.write(f"{given.num_images} photos, {source_mb:.0f} MB; {hardware()}\n")
    sys.stdout.write("| case | CPU s (rounds) | begin / it | seconds | MB a worker | MB of the dataset |\n")
    begin = [each.usage.cpu_seconds for each in found["begin"]]
    for name, each in found.items():
        cpu = [one.usage.cpu_seconds for one in each]
        ratio = statistics.median(first / this for first, this in zip(begin, cpu, strict=True))
        seconds = statistics.median(one.usage.wall_seconds for one in each)
        worker_mb = statistics.median(one.usage.worker_peak_mb for one in each)
        rounds = " ".join(f"{one:.1f}" for one in sorted(cpu))
        sys.stdout.write(
            f"| {name} | {statistics.median(cpu):.1f} ({rounds}) | {ratio:.1f} | {seconds:.1f} | {worker_mb:.0f}"
            f" | {each[0].dataset_bytes / 1e6:.1f} |\n"
        )


if __name__ == "__main__":
    main()
