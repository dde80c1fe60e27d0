"""How many planted wrong labels `shardmill mislabels` finds if the network knows them by heart, among 10,000 images.

python benchmarks/mislabels_memorised.py [--images 10000] [--share 0.05] [--epochs 60] [--whole-sources]

The images are moved copies of the digits; those of one digit are in one split. The table also has the list if they are
in one fifth, too, and the list by the network's own probabilities, which are in sample for the train split.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.mislabels import agrees, by_own_probabilities, shardmill
from benchmarks.planted_labels import plant_in_moved_copies, source_of
from shardmill.data_quality.mislabels import Mislabels, find_mislabels
from shardmill.data_quality.predicted_rows import PredictedRows, read_predicted_rows
from shardmill.dataset.dataset import open_dataset

_CONFIG = """
[source]
uri = "images"
[dataset]
uri = "dataset"
[models]
uri = "models"
[etl]
engine = "local"
image_size = 16
color = "gray"
[train]
model = "small_cnn"
epochs = {epochs}
global_batch_size = 128
learning_rate = 1e-3
schedule = "constant"
# What was learned by heart, not the weights of the best epoch.
export = "last"
[train.augment]
random_crop_padding = 0
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--epochs", type=int, nargs="+", default=[60])
    parser.add_argument("--whole-sources", action="store_true", help="all copies of a digit have the same wrong label")
    given = parser.parse_args()
    columns = ("epochs", "split", "planted", "learned labels", "planted", "found", "one fifth", "by the network", "s")
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|", flush=True)
    for epochs in given.epochs:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            planted = plant_in_moved_copies(folder / "images", given.images, given.share, given.whole_sources)
            (folder / "run.toml").write_text(_CONFIG.format(epochs=epochs))
            shardmill(folder, "run", "run.toml", "--workdir", "work")
            shardmill(folder, "predict", "models", "dataset", "--out", "out", "--layer", "flatten")
            _print_rows(read_predicted_rows(open_dataset(str(folder / "out"))), set(planted), epochs)


def _print_rows(rows: PredictedRows, planted: set[str], epochs: int) -> None:
    """A row of the table for the train split, and one for the others."""
    head = len(rows.sources) // 10
    started = time.monotonic()
    heads = [_sources(find_mislabels(rows, limit=head))]
    seconds = time.monotonic() - started
    # The folds are by these numbers.
    together = replace(rows, hashes_N=np.array([source_of(key) for key in rows.sources], np.uint64))
    heads += [_sources(find_mislabels(together, limit=head)), set(by_own_probabilities(rows)[:head])]
    is_planted_N = np.array([key in planted for key in rows.sources])
    is_train_N, agrees_N = np.array(rows.splits) == "train", agrees(rows)
    for name, of_split_N in (("train", is_train_N), ("others", ~is_train_N)):
        mine_N = of_split_N & is_planted_N
        mine = {rows.sources[row] for row in np.flatnonzero(mine_N)}
        shares = [f"{len(mine & each) / len(mine):.1%}" for each in heads]
        learned = [f"{agrees_N[which].mean():.1%}" for which in (of_split_N, mine_N)]
        cells = [str(epochs), name, str(len(mine)), *learned, *shares, f"{seconds:.1f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


def _sources(found: Mislabels) -> set[str]:
    return {each.source for each in found.suspects}


if __name__ == "__main__":
    main()
