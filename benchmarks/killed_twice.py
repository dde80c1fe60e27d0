"""Draws docs/killed-twice.svg: the losses of one training that was killed twice, on those of one that was not.

    .venv/bin/python -m benchmarks.killed_twice           # train (some minutes), check, and draw
    .venv/bin/python -m benchmarks.killed_twice --draw    # draw what docs/killed-twice.json has

A training of the digits runs on 1 rank to its end. The same one begins again in another folder on 1 rank, which
SIGKILL ends together with its driver; goes on with 8 ranks, which are killed too; and ends on 3. Before it draws, this
compares the losses of all steps and counts what each epoch has read.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.results import hardware
from pipeline.demo.data import write_demo_images
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import FieldValue
from train.config import TrainConfig
from train.reporting.observer import GlobalStep
from train.training import train_model
from train.tree import TrainTree

DOCS = Path(__file__).resolve().parent.parent / "docs"
RANKS = (1, 8, 3)
KILL_BEHIND = (45, 90)
"""Steps of the whole training behind which the first and the second attempt are killed; checkpoints are every tenth."""
EPOCHS, GLOBAL_BATCH_SIZE = 4, 48
TOLERANCE = 1e-5
"""Relative difference of a loss: float32 gradients are added in another order (docs/benchmarks/world_size_drift.md)."""
COLORS = ("#2f6fde", "#e8833a", "#2a9d76")
INK, MUTED, WHOLE = "#1d2733", "#6b7785", "#cfd6de"


class Printer:
    """The observer of a training's process: each step is a line on stdout as soon as all ranks have done it."""

    def step(self, step: GlobalStep) -> None:
        line = {"epoch": step.epoch, "step": step.step, "loss": step.loss_hex, "sample_ids": step.sample_ids}
        sys.stdout.write(f"{json.dumps(line)}\n")
        sys.stdout.flush()

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        return


def train(dataset: str, models: str, num_ranks: int) -> None:
    """What an attempt's process runs; nothing in it differs between attempts but the number of ranks."""
    config = TrainConfig(
        strategy="torch_ddp", launcher="local", num_workers=num_ranks, model="benchmarks.drift_models_torch:smooth",
        backend="torch", epochs=EPOCHS, global_batch_size=GLOBAL_BATCH_SIZE, num_streams=24, learning_rate=3e-3,
        checkpoint_every_steps=10, record_samples=True,
    )  # fmt: skip
    train_model(TrainTree(dataset=DatasetConfig(uri=dataset), models=ModelsConfig(uri=models), train=config), Printer())


def attempt(dataset: str, models: Path, num_ranks: int, kill_behind: int | None = None) -> Iterator[dict[str, Any]]:
    """The steps of one attempt, which is killed behind that step of the whole training if there is one."""
    command = [sys.executable, "-m", "benchmarks.killed_twice", "--train", dataset, str(models), str(num_ranks)]
    # Its ranks are of its process group.
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        steps_of_epoch = -(-open_dataset(dataset).manifest.splits["train"].num_rows // GLOBAL_BATCH_SIZE)
        for line in process.stdout:
            step = json.loads(line)
            step["number"] = step["epoch"] * steps_of_epoch + step["step"] + 1
            yield step
            if step["number"] == kill_behind:
                os.killpg(process.pid, signal.SIGKILL)
                break
    expected = 0 if kill_behind is None else -signal.SIGKILL
    assert process.returncode == expected, f"{num_ranks} ranks ended with {process.returncode}"


def measure(folder: Path) -> dict[str, Any]:
    """Both trainings, step by step, and what was compared."""
    write_demo_images(folder / "images")
    settings = ("--set", "etl.engine=local", "--set", "etl.image_size=16")
    etl = ["etl", str(folder / "images"), "--workdir", str(folder), *settings]
    subprocess.run([sys.executable, "-m", "pipeline.cli", *etl], check=True, capture_output=True)
    dataset = f"{folder / 'dataset'}@1"
    whole = list(attempt(dataset, folder / "whole", 1))
    attempts = [
        list(attempt(dataset, folder / "killed", ranks, kill_behind))
        for ranks, kill_behind in itertools.zip_longest(RANKS, KILL_BEHIND)
    ]
    return {
        "measured": f"{datetime.now(UTC):%Y-%m-%d}, {hardware()}",
        **compare(whole, attempts, open_dataset(dataset).manifest.splits["train"].num_rows),
        "whole": [float.fromhex(step["loss"]) for step in whole],
        "attempts": [
            {"ranks": ranks, "first": steps[0]["number"], "losses": [float.fromhex(step["loss"]) for step in steps]}
            for ranks, steps in zip(RANKS, attempts, strict=True)
        ],
    }


def compare(whole: list[dict[str, Any]], attempts: list[list[dict[str, Any]]], num_rows: int) -> dict[str, Any]:
    """Ends the process if the killed training is not the whole one.

    Of a step that was done twice, the later attempt's counts: its checkpoint did not have the first one."""
    killed = {step["number"]: step for steps in attempts for step in steps}
    assert sorted(killed) == [step["number"] for step in whole], "steps are missing"
    differences = [
        abs(float.fromhex(killed[step["number"]]["loss"]) / float.fromhex(step["loss"]) - 1) for step in whole
    ]
    assert max(differences) <= TOLERANCE, f"a loss differs by {max(differences):.1e}, more than {TOLERANCE:.0e}"
    for step in whole:
        rows = killed[step["number"]]["sample_ids"]
        assert sorted(rows) == sorted(step["sample_ids"]), f"step {step['number']} has other rows"
    for epoch in range(EPOCHS):
        rows = Counter(each for step in killed.values() if step["epoch"] == epoch for each in step["sample_ids"])
        assert len(rows) == num_rows and set(rows.values()) == {1}, f"epoch {epoch}: rows are missing or repeated"
    return {
        "num_rows": num_rows,
        "epochs": EPOCHS,
        "steps": len(whole),
        "repeated_steps": sum(map(len, attempts)) - len(whole),
        "largest_difference": max(differences),
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """The whole training below, wide and grey; each attempt on it in the colour of its number of ranks."""
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "shardmill", "font.family": "sans-serif"})
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    steps = range(1, found["steps"] + 1)
    axes.plot(steps, found["whole"], color=WHOLE, linewidth=7, solid_capstyle="round")
    left = 0
    for color, each in zip(COLORS, found["attempts"], strict=True):
        first, last = each["first"], each["first"] + len(each["losses"]) - 1
        axes.plot(range(first, last + 1), each["losses"], color=color, linewidth=1.6, marker="o", markersize=2.4)
        words = f"{each['ranks']} rank{'s' if each['ranks'] > 1 else ''}"
        # Between the dashed lines: a resumed attempt begins before the kill.
        place, left = ((left + last) / 2, 0.96), last
        axes.text(*place, words, transform=_top(axes), color=color, fontsize=12, weight="bold", ha="center", va="top")
    for each, following in itertools.pairwise(found["attempts"]):
        killed = each["first"] + len(each["losses"]) - 1
        axes.axvline(killed, color=INK, linewidth=0.9, linestyle=(0, (4, 3)))
        axes.axvspan(following["first"] - 0.5, killed, color=WHOLE, alpha=0.45, linewidth=0)
        words = f" kill -9 after step {killed};\n resumes at step {following['first']}"
        axes.text(killed, 0.82, words, transform=_top(axes), fontsize=9, color=INK, va="top")
    axes.set_xlim(-1, found["steps"] + 2)
    axes.set_ylim(0)
    axes.set_xlabel(f"step ({found['epochs']} epochs of {found['num_rows']:,} images)", fontsize=9, color=MUTED)
    axes.set_ylabel("training loss", fontsize=9, color=MUTED)
    axes.tick_params(labelsize=8.5, colors=MUTED)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.set_title(
        "One training, killed twice, over the same training on 1 rank that was never killed (grey).\n"
        f"Each image once an epoch; no loss differs by more than {found['largest_difference']:.0e} of its value.",
        fontsize=10, color=INK, loc="left",
    )  # fmt: skip
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=110)
    plt.close(figure)


def _top(axes: Any) -> Any:
    """Places by step, and by the height of the axes from 0 to 1."""
    return axes.get_xaxis_transform()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", nargs=3, metavar=("DATASET", "MODELS", "RANKS"), help=argparse.SUPPRESS)
    parser.add_argument("--draw", action="store_true", help="train nothing")
    parser.add_argument("--out", type=Path, default=DOCS / "killed-twice.svg", help="an .svg or a .png")
    given = parser.parse_args()
    if given.train:
        dataset, models, num_ranks = given.train
        return train(dataset, models, int(num_ranks))
    numbers = DOCS / "killed-twice.json"
    if not given.draw:
        with tempfile.TemporaryDirectory(prefix="shardmill-killed-") as folder:
            numbers.write_text(json.dumps(measure(Path(folder))) + "\n", encoding="utf-8")
    found = json.loads(numbers.read_text(encoding="utf-8"))
    draw(found, given.out)
    for name in ("measured", "num_rows", "epochs", "steps", "repeated_steps", "largest_difference"):
        sys.stdout.write(f"{name:20} {found[name]}\n")


if __name__ == "__main__":
    main()
