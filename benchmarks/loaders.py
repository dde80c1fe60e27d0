"""Measures loaders against the hardware limit and their peers: images/s of shuffled batches of the same stored images.

python benchmarks/loaders.py --images DIR --scratch DIR [--workload full256,crop224,raw32,raw224] [--rounds K]
    [--only a,b] [--page docs/benchmarks/loaders.md]

A round runs each contestant once, every other round in reverse order. Each has a process of its own, which reads one
epoch to warm up and is then measured over whole epochs. Results go into a JSON file, which keeps those of other
workloads, and from there onto a page. The datasets, and copies of them in the formats of peers, stay in the scratch
folder for the next call. Peers are installed by uv from their scripts in loader_peers/, each into an environment of its
own; what cannot be installed or run is left out with a line that says why. Progress is on standard error.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from loader_contestants import CONTESTANTS, Contestant
from loader_data import WORKLOADS, Workload, find_photos
from loaders_page import page, print_tables
from results import Result, Results, hardware
from whole_process import CommandFailed, Usage, run_measured


def main() -> None:
    arguments = _parse_arguments()
    workloads = [WORKLOADS[name] for name in arguments.workload]
    contestants = [CONTESTANTS[name] for name in arguments.only if name not in arguments.without]
    results = Results.load(arguments.json)
    if arguments.rounds:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
        photos = find_photos(arguments.images)
        for workload in workloads:
            _say(f"{workload.name}: building its dataset, if it is not there")
            workload.build(photos, arguments.scratch)
        contestants = _installed(contestants)
    for workload in workloads if arguments.rounds else ():
        _measure(workload, contestants, results, arguments)
    print(hardware())
    for workload in workloads:
        print_tables(results, workload)
    if arguments.page:
        arguments.page.write_text(page(results), encoding="utf-8")


def _parse_arguments() -> argparse.Namespace:
    def some_of(known: dict) -> object:
        def names(text: str) -> list[str]:
            if unknown := set(text.split(",")) - set(known):
                raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: expected some of {', '.join(known)}")
            return text.split(",")

        return names

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", required=True, type=Path, help="a folder of photographs (JPEG)")
    parser.add_argument("--scratch", required=True, type=Path, help="keeps the datasets for the next call")
    parser.add_argument("--workload", type=some_of(WORKLOADS), default=list(WORKLOADS), help=", ".join(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5, help="0: only show what was measured before")
    parser.add_argument("--epochs", type=int, default=2, help="whole epochs to measure, at least")
    parser.add_argument("--seconds", type=float, default=4.0, help="seconds to measure, at least")
    parser.add_argument("--only", type=some_of(CONTESTANTS), default=list(CONTESTANTS), help=", ".join(CONTESTANTS))
    parser.add_argument("--without", type=some_of(CONTESTANTS), default=[])
    parser.add_argument("--time-limit", type=float, default=300.0, help="seconds for one run of a contestant")
    parser.add_argument("--json", type=Path, default=Path("docs/benchmarks/loaders.json"))
    parser.add_argument("--page", type=Path, help="write all results of the JSON file as a page")
    return parser.parse_args()


def _installed(contestants: list[Contestant]) -> list[Contestant]:
    ready = []
    for contestant in contestants:
        try:
            contestant.install()
            ready.append(contestant)
        except subprocess.CalledProcessError as error:
            _say(f"{contestant.name} is left out: it could not be installed ({error})")
    return ready


def _measure(
    workload: Workload, contestants: list[Contestant], results: Results, arguments: argparse.Namespace
) -> None:
    """All rounds of one workload; saved after each run."""
    ready = [each for each in contestants if workload.name in each.workloads and _converted(each, workload, arguments)]
    for number in range(arguments.rounds):
        for contestant in ready[:: -1 if number % 2 else 1]:
            result = _result(contestant, workload, arguments)
            results.add(workload.name, workload.num_images, contestant.name, number, result)
            words = result.in_words(workload.num_images)
            _say(f"{workload.name}, round {number + 1}: {contestant.name:18} {words} (seconds of an epoch)")
            results.save(arguments.json)


def _converted(contestant: Contestant, workload: Workload, arguments: argparse.Namespace) -> bool:
    """Whether what the contestant reads is there, if need be written now."""
    if not contestant.is_peer:
        return True
    try:
        _run(contestant, workload, arguments, convert=True)
    except CommandFailed as error:
        _say(f"{workload.name}: {contestant.name} is left out: it could not convert the images ({error})")
        return False
    return True


def _result(contestant: Contestant, workload: Workload, arguments: argparse.Namespace) -> Result:
    try:
        usage = _run(contestant, workload, arguments, convert=False)
        measured = json.loads(usage.output.strip().splitlines()[-1])
        per_epoch = measured["images"] / measured["epochs"]
        seconds_per_image = measured["seconds"] / measured["images"]
    except (CommandFailed, ValueError, KeyError, IndexError, ZeroDivisionError) as error:
        return Result(version=contestant.version, fault=f"{error}")
    # Some drop or repeat the rows of a last batch; more than one batch is another task.
    is_whole = abs(per_epoch - workload.num_images) < workload.num_images / 20
    return Result(
        version=contestant.version,
        fault="" if is_whole else f"read {per_epoch:,.0f} of {workload.num_images:,} images in an epoch",
        wall_seconds=usage.wall_seconds,
        loop_seconds=workload.num_images * seconds_per_image,
        cpu_seconds=usage.cpu_seconds,
        worker_peak_mb=usage.worker_peak_mb,
        total_peak_mb=usage.total_peak_mb,
    )


def _run(contestant: Contestant, workload: Workload, arguments: argparse.Namespace, *, convert: bool) -> Usage:
    command = contestant.command(
        workload, arguments.scratch.resolve(), arguments.epochs, arguments.seconds, convert=convert
    )
    logs = arguments.scratch / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{workload.name}-{contestant.name}.log"
    return run_measured(command, contestant.process_environment, arguments.time_limit, log)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
