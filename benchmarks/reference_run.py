"""A small run whose results must never change: digests of a dataset, of trained weights and of the steps.

    .venv/bin/python benchmarks/reference_run.py --shardmill .venv/bin/shardmill

Run it before and after a change that must not change results, on the same machine, and compare the two outputs. It uses
nothing but the command line, so that it also runs on trees in which every module has another name.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image

CLASSES = ("bars", "disc", "noise")
IMAGES_PER_CLASS = 40
# Times would differ between two equal runs; today `steps.jsonl` has none.
VOLATILE_FIELDS = {"seconds", "time"}
# With batch norm and dropout, whose states differ from rank to rank.
MODEL = """
import keras


def build(image_shape, num_classes):
    inputs = keras.Input(image_shape)
    x = keras.layers.Conv2D(8, 3, strides=2, activation="gelu")(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Dropout(0.2)(keras.layers.Flatten()(x))
    return keras.Model(inputs, keras.layers.Dense(num_classes, dtype="float32")(x))
"""
ETL = ("spark.master=local[2]", "etl.image_size=24", 'etl.formats=["parquet","tfrecord"]')
TRAIN = (
    "train.epochs=2",
    "train.global_batch_size=24",
    "train.num_streams=6",
    "train.record_samples=true",
    "train.augment.random_crop_padding=2",
    "train.augment.random_flip=true",
    "train.checkpoint_every_steps=2",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shardmill", default=str(Path(sys.executable).with_name("shardmill")))
    program = str(Path(parser.parse_args().shardmill).absolute())
    with tempfile.TemporaryDirectory(prefix="shardmill-reference-") as folder:
        os.chdir(folder)
        write_images(Path("images"))
        Path("reference_model.py").write_text(MODEL)
        sys.stdout.write(json.dumps(reference(program), indent=1) + "\n")


def write_images(root: Path) -> None:
    """Three classes of generated 40 x 30 pictures, and one file that is none."""
    rng = np.random.default_rng(7)
    rows, columns = np.mgrid[0:30, 0:40]
    for name in CLASSES:
        (root / name).mkdir(parents=True)
        for number in range(IMAGES_PER_CLASS):
            pixels = rng.integers(0, 60, (30, 40, 3))
            if name == "bars":
                pixels[(columns + number) % 8 < 4] += 150
            elif name == "disc":
                pixels[(rows - 15) ** 2 + (columns - 20) ** 2 < (6 + number % 6) ** 2] += 150
            kind = "png" if number % 2 else "jpg"
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number:02d}.{kind}")
    (root / "noise" / "broken.png").write_bytes(b"\x89PNG\r\n\x1a\nno picture")


def reference(program: str) -> dict[str, object]:
    """Everything that must stay as it is, by name."""
    found: dict[str, object] = {}
    shardmill(program, "etl", "images", "--run-id", "etl", *ETL)
    for model in ("small_cnn", "reference_model:build"):
        for world_size in (1, 2, 3):
            for format in ("parquet", "tfrecord"):
                if format == "tfrecord" and (model, world_size) != ("small_cnn", 2):
                    continue
                run_id = f"{model.partition('_')[0]}-{world_size}-{format}"
                ranks = ("single", "inline") if world_size == 1 else ("horovod", "local")
                settings = (
                    f"train.model={model}",
                    f"train.num_workers={world_size}",
                    f"train.strategy={ranks[0]}",
                    f"train.launcher={ranks[1]}",
                    f"train.format={format}",
                )
                shardmill(program, "train", "work/dataset", "--run-id", run_id, "--fresh", *TRAIN, *settings)
                summary = json.loads(Path(f"work/runs/{run_id}/summary.json").read_text())
                found["dataset"] = {key: summary["dataset"][key] for key in ("content_digest", "layout_digest")}
                found[run_id] = {
                    "weights_sha256": summary["train"]["weights_sha256"],
                    "final_loss_hex": summary["train"]["final_loss_hex"],
                    "num_steps": summary["train"]["steps"],
                    "steps_sha256": steps_sha256(Path(f"work/runs/{run_id}/steps.jsonl")),
                    "evaluation": summary["evaluation"],
                }
    return found


def shardmill(program: str, command: str, target: str, *arguments: str) -> None:
    """Run one command; what it prints goes to stderr."""
    flags, settings = [], []
    for argument in arguments:
        if "=" in argument:
            settings += ["--set", argument]
        else:
            flags.append(argument)
    line = [program, command, target, "--workdir", "work", "--json", *flags, *settings]
    subprocess.run(line, check=True, stdout=sys.stderr)


def steps_sha256(path: Path) -> str:
    """Over `steps.jsonl` without fields that differ between equal runs."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    stable = [{name: value for name, value in line.items() if name not in VOLATILE_FIELDS} for line in lines]
    return hashlib.sha256(json.dumps(stable, sort_keys=True).encode()).hexdigest()


if __name__ == "__main__":
    main()
