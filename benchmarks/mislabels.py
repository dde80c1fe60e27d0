"""How many planted wrong labels of real digits `shardmill mislabels` finds, by how long the model has learned them.

python benchmarks/mislabels.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.planted_labels import plant_wrong_labels
from shardmill.data_quality.mislabels import find_mislabels
from shardmill.data_quality.predicted_rows import PredictedRows, read_predicted_rows
from shardmill.dataset.dataset import open_dataset

_SHARES, _EPOCHS = (0.05, 0.2), (3, 12, 60)
_CONFIG = """
[source]
uri = "images"
[dataset]
uri = "dataset"
[models]
uri = "models"
[etl]
engine = "local"
[train]
model = "small_cnn"
epochs = {epochs}
global_batch_size = 64
learning_rate = 2e-3
warmup_steps = 20
"""


def main() -> None:
    """Print the table."""
    columns = ("planted", "epochs", "train accuracy", "seconds", "split", "found", "by the model", "likely", "planted")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    for share in _SHARES:
        for epochs in _EPOCHS:
            with tempfile.TemporaryDirectory() as folder:
                _measure(Path(folder), share, epochs)


def _measure(folder: Path, share: float, epochs: int) -> None:
    planted = plant_wrong_labels(folder / "images", share)
    (folder / "run.toml").write_text(_CONFIG.format(epochs=epochs))
    shardmill(folder, "run", "run.toml", "--workdir", "work")
    shardmill(folder, "predict", "models", "dataset", "--out", "out", "--layer", "flatten")
    rows = read_predicted_rows(open_dataset(str(folder / "out")))
    started = time.monotonic()
    found = find_mislabels(rows, limit=len(rows.sources))
    seconds = time.monotonic() - started
    # Twice as many as were planted.
    head = int(2 * share * len(rows.sources))
    listed = [each.source for each in found.suspects][:head]
    own = by_own_probabilities(rows)[:head]
    likely = [each.source for each in found.suspects if each.is_likely]
    split_of = dict(zip(rows.sources, rows.splits, strict=True))
    agrees_N = agrees(rows)
    learned = agrees_N[np.array(rows.splits) == "train"].mean()
    for name, splits in (("train", {"train"}), ("others", {"validation", "test"})):
        mine = {key for key in planted if split_of[key] in splits}
        of_list, of_own = (len(mine & set(each)) / len(mine) for each in (listed, own))
        called = [key for key in likely if split_of[key] in splits]
        precision = len(mine & set(called)) / max(len(called), 1)
        print(
            f"| {share:.0%} | {epochs} | {learned:.1%} | {seconds:.1f} | {name} | {of_list:.0%} | {of_own:.0%} | "
            f"{len(called)} | {precision:.0%} |",
            flush=True,
        )


def by_own_probabilities(rows: PredictedRows) -> list[str]:
    """Sources by how sure the model is of another class than the given one."""
    doubt_N = np.where(agrees(rows), -rows.probabilities_N, rows.probabilities_N)
    return [rows.sources[row] for row in np.argsort(-doubt_N, kind="stable")]


def agrees(rows: PredictedRows) -> np.ndarray:
    """Whether the model predicts the given class."""
    given = [rows.class_names[label] for label in rows.labels_N.tolist()]
    return np.array([one == other for one, other in zip(given, rows.predictions, strict=True)])


def shardmill(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "pipeline.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": sys.path[0]}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr[-2000:])


if __name__ == "__main__":
    main()
