"""Measures whole ETL jobs against their peers and the hardware limit: the same images to square, labelled JPEG q95
shards.

python benchmarks/etl_peers.py --images DIR [--workload photos|big|small] [--num-images N[,M]] [--rounds K] [--only a,b]

A round runs each contestant once, from the start of its process to its end; every other round in reverse order. Before
each, what others left to be written is on the disk: shardmill's shards are synced, and would wait for theirs. Results
go into a JSON file, which keeps those of other workloads and sizes, and from there onto a page. Peers are installed by
uv from their scripts in peers/, each into an environment of its own, and so is shardmill. Progress is on
standard error.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from tarfile import TarError

from contestants import CONTESTANTS, Contestant, Job, peer_version, prepare
from peers_page import page, print_tables
from results import Result, Results, hardware
from whole_process import CommandFailed, run_measured
from workloads import WORKLOADS, find_photos

from shardmill.errors import ShardmillError

QUALITY = 95


def main() -> None:
    arguments = _parse_arguments()
    workload = WORKLOADS[arguments.workload]
    sizes = tuple(arguments.num_images or workload.default_sizes)
    names = arguments.only or [name for name in CONTESTANTS if name not in arguments.without]
    results = Results.load(arguments.json)
    if arguments.scratch:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="etl-peers-", dir=arguments.scratch) as folder:
        scratch = arguments.scratch or Path(folder)
        photos = find_photos(arguments.images)
        for size in sizes if arguments.rounds else ():
            _say(f"{workload.name}: making {size:,} files, if they are not there")
            workload.files(photos, scratch, size)
        contestants = _prepared([CONTESTANTS[name] for name in names] if arguments.rounds else [])
        for number in range(arguments.rounds):
            for size in sizes:
                job = Job(workload.files(photos, scratch, size), Path(folder) / "out", workload.image_size, QUALITY)
                for contestant in contestants[:: -1 if number % 2 else 1]:
                    result = _run(contestant, job, size, arguments.time_limit)
                    results.add(workload.name, size, contestant.name, number, result)
                    _say(f"{workload.name} {size:,}, round {number + 1}: {contestant.name:12} {result.in_words(size)}")
                    results.save(arguments.json)
    print(hardware())
    print_tables(results.newest(), workload.name)
    if arguments.page:
        arguments.page.write_text(page(results.newest()), encoding="utf-8")


def _parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part.replace("_", "")) for part in text.split(",")]

    def names(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(CONTESTANTS)
        if unknown:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(CONTESTANTS)}")
        return text.split(",")

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path, help="a folder of photographs (JPEG)")
    parser.add_argument("--workload", choices=WORKLOADS, default="photos")
    parser.add_argument("--num-images", type=numbers, help="one size, or two for the slope between them")
    parser.add_argument("--rounds", type=int, default=3, help="0: only show what was measured before")
    parser.add_argument("--only", type=names, help=", ".join(CONTESTANTS))
    parser.add_argument("--without", type=names, default=[])
    parser.add_argument("--scratch", type=Path, help="keeps the images for the next call; otherwise they are made anew")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for one run of a contestant")
    parser.add_argument("--json", type=Path, default=Path("etl_peers.json"))
    parser.add_argument("--page", type=Path, help="write all results of the JSON file as a page")
    return parser.parse_args()


def _prepared(contestants: list[Contestant]) -> list[Contestant]:
    ready = []
    for contestant in contestants:
        try:
            _say(f"preparing {contestant.name}")
            prepare(contestant)
            ready.append(contestant)
        except subprocess.CalledProcessError as error:
            _say(f"{contestant.name} is left out: it could not be installed ({error})")
    return ready


def _run(contestant: Contestant, job: Job, num_images: int, time_limit: float) -> Result:
    shutil.rmtree(job.out, ignore_errors=True)
    os.sync()
    log = Path(tempfile.gettempdir()) / f"etl-peers-{contestant.name}.log"
    try:
        usage = run_measured(contestant.command(job), contestant.process_environment, time_limit, log)
        num_written = num_images if contestant.count is None else contestant.count(job)
        loop_seconds = json.loads(usage.output)["loop_seconds"] if contestant.count is None else None
    except (CommandFailed, ShardmillError, OSError, ValueError, KeyError, TarError) as error:
        return Result(version=peer_version(contestant.name), fault=f"{error}")
    finally:
        shutil.rmtree(job.out, ignore_errors=True)
    return Result(
        version=peer_version(contestant.name),
        fault="" if num_written == num_images else f"wrote {num_written:,} of {num_images:,} images",
        wall_seconds=usage.wall_seconds,
        loop_seconds=loop_seconds,
        cpu_seconds=usage.cpu_seconds,
        worker_peak_mb=usage.worker_peak_mb,
        total_peak_mb=usage.total_peak_mb,
    )


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
