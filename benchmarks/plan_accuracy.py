"""Compares the images per second that `shardmill plan` predicts for a training with those that it reaches.

    .venv/bin/python benchmarks/plan_accuracy.py --images DIR [--rounds 3]

`DIR` holds photographs, named `..._CLASS.jpg` or in folders of classes; they are split by a hash into train and
validation. Every round plans and runs each model, one after the other, by the command line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

MODELS = {
    "small_cnn, 64 px": ("64", "small_cnn", "4"),
    "resnet50, 64 px": ("64", "resnet50", "2"),
    "torchvision resnet18, 96 px": ("96", "torchvision.models:resnet18", "3"),
    "small_cnn, 224 px": ("224", "small_cnn", "2"),
}
"""What is trained: image size, model, epochs."""
COPIES = 4


def shardmill(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "pipeline.cli", *words, "--json"]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def link_images(images: Path, folder: Path) -> None:
    """Each image `COPIES` times under two class names, so that an epoch has steps enough to be timed."""
    found = sorted(path for path in images.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    for number, path in enumerate(found):
        target = folder / f"class_{number % 2}"
        target.mkdir(parents=True, exist_ok=True)
        for copy in range(COPIES):
            (target / f"{number}_{copy}{path.suffix}").symlink_to(path.resolve())


def measure(name: str, folder: Path, number: int) -> tuple[float, float]:
    """-> predicted and measured images per second of the whole training."""
    image_size, model, epochs = MODELS[name]
    settings = [f"train.model={model}", f"train.epochs={epochs}", "train.num_workers=1"]
    words = [word for setting in settings for word in ("--set", setting)]
    dataset, workdir = str(folder / f"dataset-{image_size}"), str(folder / f"{name}-{number}")
    planned = shardmill("plan", dataset, "--workdir", workdir, *words)
    trained = shardmill("train", dataset, "--workdir", workdir, *words)
    return planned["images_per_second"], trained["sections"]["train"]["images_per_second"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmill-plan-") as temporary:
        folder = Path(temporary)
        link_images(arguments.images, folder / "images")
        for image_size in sorted({size for size, _, _ in MODELS.values()}):
            options = {
                "dataset.uri": folder / f"dataset-{image_size}",
                "etl.image_size": image_size,
                "source.follow_symlinks": "true",
            }
            words = [word for key, value in options.items() for word in ("--set", f"{key}={value}")]
            shardmill("etl", str(folder / "images"), "--workdir", str(folder / "etl"), *words)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in MODELS}
        for number in range(arguments.rounds):
            for name in MODELS:
                found[name].append(measure(name, folder, number))
        print(f"{'training':30} {'planned':>10} {'run':>10} {'ratio':>8}   images/s, medians of {arguments.rounds}")
        for name, pairs in found.items():
            planned, run = (statistics.median(pair[place] for pair in pairs) for place in (0, 1))
            ratio = statistics.median(pair[0] / pair[1] for pair in pairs)
            print(f"{name:30} {planned:10,.0f} {run:10,.0f} {ratio:8.2f}")


if __name__ == "__main__":
    main()
