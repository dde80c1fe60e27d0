"""Our defaults beside a plain Keras and a plain PyTorch script: the digits, one split, the same network, paired seeds.

python benchmarks/defaults.py [--seeds 3] [--num-train 1000] [--set KEY=VALUE]

Each contestant is a process of its own (`defaults_contestants.py`), in turns; times are those after the import of the
framework. `--set` changes ours, to look at another default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from results import hardware

from pipeline.demo.data import encode_digit, load_digits

CONTESTANT = Path(__file__).with_name("defaults_contestants.py")
CONTESTANTS = ("ours", "keras", "torch")
NUM_VALIDATION, NUM_TEST = 197, 600


@dataclass(frozen=True, slots=True)
class Trained:
    """What a contestant reports of one training."""

    accuracy: float
    """On the test split."""
    cpu_seconds: float
    wall_seconds: float


def write_digits(folder: Path, num_train: int) -> None:
    """Class folders below train/, val/ and test/, at random, the same in every call."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.labels))
    test, validation, rest = np.split(order, [NUM_TEST, NUM_TEST + NUM_VALIDATION])
    for split, indices in (("test", test), ("val", validation), ("train", rest[:num_train])):
        for index in indices.tolist():
            path = folder / split / str(digits.labels[index]) / f"{index:04d}.{'jpg' if index % 2 else 'png'}"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode_digit(digits, index))


def train(name: str, folder: Path, seed: int, settings: list[str]) -> Trained:
    """One contestant in a process of its own."""
    command = [sys.executable, str(CONTESTANT), name, str(folder), str(seed), *settings]
    environment = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{name}, seed {seed}: {done.stderr[-2000:]}")
    return Trained(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--num-train", type=int, default=1000, help="training images, at most 1000")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a setting of ours")
    parser.add_argument("--only", choices=CONTESTANTS, action="append", help="leave the others out")
    given = parser.parse_args()
    contestants = given.only or CONTESTANTS
    trained: dict[str, list[Trained]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory(prefix="shardmill-defaults-") as scratch:
        folder = Path(scratch)
        write_digits(folder / "images", given.num_train)
        etl = ["etl", str(folder / "images"), "--workdir", str(folder)]
        subprocess.run([sys.executable, "-m", "pipeline.cli", *etl], check=True, capture_output=True)
        for seed in range(given.seeds):
            # Who begins changes, because a machine becomes faster and slower.
            turn = seed % len(contestants)
            for name in (*contestants[turn:], *contestants[:turn]):
                trained[name].append(train(name, folder, seed, given.set if name == "ours" else []))
                print(f"{name}, seed {seed}: {trained[name][-1]}", file=sys.stderr)
    print(f"{hardware()}; {given.num_train} training images, {NUM_TEST} test images, {given.seeds} seeds")
    print_table(trained)


def print_table(trained: dict[str, list[Trained]]) -> None:
    """Means, and ours beside each other one in pairs of one seed."""
    print("| | test accuracy | standard error | CPU s | wall s | ours - it | standard error | ours / it, CPU | wall |")
    print("|---|---|---|---|---|---|---|---|---|")
    for name, runs in trained.items():
        accuracies = [each.accuracy for each in runs]
        times = [statistics.median(getattr(each, kind) for each in runs) for kind in ("cpu_seconds", "wall_seconds")]
        row = [name, f"{statistics.mean(accuracies):.4f}", f"{standard_error(accuracies):.4f}"]
        row += [f"{seconds:.1f}" for seconds in times]
        pairs = list(zip(trained.get("ours", []), runs, strict=False)) if name != "ours" else []
        if pairs:
            ahead = [ours.accuracy - other.accuracy for ours, other in pairs]
            row += [f"{statistics.mean(ahead):+.4f}", f"{standard_error(ahead):.4f}"]
            for kind in ("cpu_seconds", "wall_seconds"):
                ratios = [getattr(ours, kind) / getattr(other, kind) for ours, other in pairs]
                row.append(f"{statistics.median(ratios):.2f}")
        print(f"| {' | '.join(row + [''] * (9 - len(row)))} |")


def standard_error(values: list[float]) -> float:
    """Of the mean; 0 for one value."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0


if __name__ == "__main__":
    main()
