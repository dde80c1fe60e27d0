"""Measures what a later ETL run costs compared with a full one: nothing new, 1 % added, 1 % changed, 1 % removed.

python benchmarks/incremental.py --images DIR [--num-images N] [--rounds K] [--scratch DIR]

Whole jobs with the engine `local`, from the start of the process to its end. Each round makes a dataset of all images
anew and then runs the same command on the source as it was grown, changed and shrunk, so that each run is compared with
the full one of its round. The images are those of `etl_peers.py`; the source is a folder of hard links to them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from results import hardware
from whole_process import Usage, run_measured
from workloads import WORKLOADS, find_photos, with_comment

from shardmill.dataset.dataset import open_dataset

PHOTOS = WORKLOADS["photos"]
SHARE = 100
TIME_LIMIT_SECONDS = 1200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True, help="a folder of photographs (JPEG)")
    parser.add_argument("--num-images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, help="keeps the images for the next call")
    arguments = parser.parse_args()
    if arguments.scratch:
        arguments.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="incremental-", dir=arguments.scratch) as folder:
        images = PHOTOS.files(find_photos(arguments.images), arguments.scratch or Path(folder), arguments.num_images)
        rounds = [_round(images, Path(folder) / "round") for _ in range(arguments.rounds)]
    print(hardware())
    print(f"\n{arguments.num_images:,} images\n")
    print("| run | images read | seconds | rounds | of the full run's |\n|---|---|---|---|---|")
    for name in rounds[0]:
        seconds = [found[name][0].wall_seconds for found in rounds]
        shares = [found[name][0].wall_seconds / found["full"][0].wall_seconds for found in rounds]
        print(
            f"| {name} | {rounds[0][name][1]:,} | {statistics.median(seconds):.1f} | "
            f"{' '.join(f'{each:.1f}' for each in seconds)} | {statistics.median(shares):.1%} |"
        )


def _round(images: Path, folder: Path) -> dict[str, tuple[Usage, int]]:
    """-> by run: what it took, and how many images it has read."""
    source, work = folder / "source", folder / "work"
    shutil.copytree(images, source, copy_function=os.link)
    chosen = sorted(source.rglob("*.jpg"))[::SHARE]
    steps: dict[str, Callable[[], object]] = {
        "full": lambda: None,
        "nothing new": lambda: None,
        "1 % added": lambda: [_write(path.with_stem(f"{path.stem}-new"), path, "added") for path in chosen],
        "1 % changed": lambda: [_write(path, path, "changed") for path in chosen],
        "1 % removed": lambda: [path.unlink() for path in chosen],
    }
    found = {}
    for name, change in steps.items():
        change()
        subprocess.run(["sync"], check=True)
        found[name] = _run(source, work, name.replace(" ", "-").replace("%", "percent"))
        print(f"{name}: {found[name][0].wall_seconds:.1f} s, {found[name][1]:,} images read", file=sys.stderr)
    expected = len(list(source.rglob("*.jpg")))
    assert open_dataset(str(work / "dataset")).manifest.counts.accepted == expected
    shutil.rmtree(folder)
    return found


def _write(target: Path, original: Path, word: str) -> None:
    """A file of its own, and not through a hard link."""
    data = with_comment(original.read_bytes(), f"{word} {original.stem}")
    target.unlink(missing_ok=True)
    target.write_bytes(data)


def _run(source: Path, work: Path, run_id: str) -> tuple[Usage, int]:
    shardmill = Path(sys.executable).parent / "shardmill"
    settings = ("etl.engine=local", f"etl.image_size={PHOTOS.image_size}", "etl.jpeg_quality=95")
    chosen = [part for each in settings for part in ("--set", each)]
    command = [str(shardmill), "etl", str(source), "--workdir", str(work), "--run-id", run_id, "--json", *chosen]
    usage = run_measured(command, os.environ, TIME_LIMIT_SECONDS, work.parent / "log")
    etl = json.loads((work / "runs" / run_id / "summary.json").read_text())["etl"]
    return usage, round(etl["seconds"] * etl["images_per_second"])


if __name__ == "__main__":
    main()
