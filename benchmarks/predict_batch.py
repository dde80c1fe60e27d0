"""Measures `shardmill predict --out` against a bare loop of the same decoding and model on the same cores.

python benchmarks/predict_batch.py [--images DIR] [--num-images N,M] [--model NAME] [--image-size N] [--rounds K]
  [--only a,b]

A round runs each contestant once for each number of images, from the start of its process to its end; every other round
in reverse order. Speeds are slopes between medians of seconds: images more, by seconds more, because both numbers load
frameworks, models and JVMs alike. Photographs of DIR are copied; without one, images of noise are made.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import cv2
import numpy as np
from peer_script import find_uv
from results import hardware
from workloads import find_photos, with_comment

CORES = len(os.sched_getaffinity(0))
LOOP = Path(__file__).with_name("predict_loop.py")
CLASSES = 3


def main() -> None:
    arguments = _parse_arguments()
    few, many = arguments.num_images
    with tempfile.TemporaryDirectory(prefix="predict-batch-", dir=arguments.scratch) as folder:
        scratch = Path(folder)
        photos = [path.read_bytes() for path in find_photos(arguments.images)] if arguments.images else list(_noise())
        for number in (few, many):
            _write(photos, scratch / f"images-{number}", number)
        models = _train(photos, scratch, arguments)
        names = arguments.only or list(CONTESTANTS)
        seconds: dict[tuple[str, int], list[float]] = {}
        for number in range(arguments.rounds):
            for name in names[:: -1 if number % 2 else 1]:
                for size in (few, many):
                    started = time.perf_counter()
                    CONTESTANTS[name](models, scratch / f"images-{size}", scratch / f"out-{name}-{size}-{number}")
                    seconds.setdefault((name, size), []).append(time.perf_counter() - started)
                    sys.stderr.write(f"round {number + 1}: {name} {size}: {seconds[name, size][-1]:.1f} s\n")
    _print(names, few, many, seconds)


def _parse_arguments() -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="a folder of photographs (JPEG)")
    parser.add_argument("--num-images", type=numbers, default=[1000, 4000], help="two numbers")
    parser.add_argument("--model", default="small_cnn", help="train.model")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", type=lambda text: text.split(","), help=", ".join(CONTESTANTS))
    parser.add_argument("--scratch", type=Path)
    return parser.parse_args()


def _noise() -> Iterator[bytes]:
    """JPEGs of 500 x 375 with the detail of a photograph, about 60 KB each."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        coarse = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        image = cv2.resize(coarse, (500, 375), interpolation=cv2.INTER_CUBIC).astype(np.int16)
        image += rng.integers(-12, 13, image.shape, dtype=np.int16)
        yield cv2.imencode(".jpg", np.clip(image, 0, 255).astype(np.uint8))[1].tobytes()


def _write(photos: Sequence[bytes], folder: Path, number: int) -> None:
    for place in range(number):
        target = folder / f"class_{place % CLASSES}" / f"{place:06d}.jpg"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(with_comment(photos[place % len(photos)], f"copy {place}"))


def _train(photos: Sequence[bytes], scratch: Path, arguments: argparse.Namespace) -> Path:
    """A models folder with a promoted export, after one epoch of a few images."""
    _write(photos, scratch / "few", 120)
    settings = (f"etl.image_size={arguments.image_size}", "train.epochs=1", f"train.model={arguments.model}")
    options = [part for each in settings for part in ("--set", each)]
    _shardmill("run", scratch / "few", "--workdir", scratch / "work", *options)
    _shardmill("promote", f"{scratch}/work/models@1")
    return scratch / "work" / "models"


def _ours(engine: str) -> Callable[[Path, Path, Path], None]:
    def run(models: Path, images: Path, out: Path) -> None:
        settings = ("--set", f"spark.master=local[{CORES}]", "--set", f"etl.num_workers={CORES}")
        _shardmill("predict", models, images, "--out", out, "--engine", engine, *settings, "--workdir", f"{out}-work")

    return run


def _bare(models: Path, images: Path, out: Path) -> None:
    command = [sys.executable, str(LOOP), str(models), str(images)]
    started = [
        subprocess.Popen([*command, str(place), str(CORES)], stdout=subprocess.DEVNULL) for place in range(CORES)
    ]
    statuses = [process.wait() for process in started]
    assert not any(statuses), statuses


def _udf(models: Path, images: Path, out: Path) -> None:
    command = [sys.executable, str(LOOP), str(models), str(images), "0", str(CORES), "--spark"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def _daft(models: Path, images: Path, out: Path) -> None:
    # Over this environment: it has the model's framework.
    overlay = [find_uv(), "run", "--frozen", "--no-sync", "--with", "daft==0.7.26", "--project", str(LOOP.parents[1])]
    loop = ["python", str(LOOP), str(models), str(images), "0", str(CORES), "--daft"]
    environment = {**os.environ, "PYTHONPATH": str(LOOP.parents[1]), "DO_NOT_TRACK": "true"}
    subprocess.run([*overlay, *loop], check=True, stdout=subprocess.DEVNULL, env=environment)


BARE = "bare loop"
CONTESTANTS = {
    BARE: _bare,
    "shardmill local": _ours("local"),
    "shardmill spark": _ours("spark"),
    "predict_batch_udf": _udf,
    "Daft": _daft,
}


def _shardmill(*arguments: object) -> None:
    command = [str(Path(sys.executable).parent / "shardmill"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-2000:]}")


def _print(names: Sequence[str], few: int, many: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    print(hardware())
    medians = {key: statistics.median(rounds) for key, rounds in seconds.items()}
    speeds = {name: (many - few) / (medians[name, many] - medians[name, few]) for name in names}
    print(f"\n| | s for {few:,} | s for {many:,} | images a second | of the bare loop's | of its time for {many:,} |")
    print("|---|---|---|---|---|---|")
    for name in names:
        times = " | ".join(_range(seconds[name, size]) for size in (few, many))
        share = f"{speeds[name] / speeds[BARE]:.2f}" if BARE in speeds else ""
        whole = f"{medians[name, many] / medians[BARE, many]:.2f}" if BARE in speeds else ""
        print(f"| {name} | {times} | {speeds[name]:.0f} | {share} | {whole} |")


def _range(rounds: Sequence[float]) -> str:
    return f"{statistics.median(rounds):.1f} ({min(rounds):.1f} to {max(rounds):.1f})"


if __name__ == "__main__":
    main()
