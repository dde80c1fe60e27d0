"""The contestants of `defaults.py`: one training in this process; prints accuracy and seconds as a line of JSON.

python benchmarks/defaults_contestants.py NAME FOLDER SEED [KEY=VALUE ...]
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false, reportArgumentType=false
from __future__ import annotations

import json
import resource
import sys
import time
from functools import partial
from pathlib import Path

SIDE, BATCH_SIZE, EPOCHS, LEARNING_RATE = 32, 64, 10, 1e-3


class Clock:
    """CPU time of this process and its children, and wall time, since it was made."""

    def __init__(self) -> None:
        self._cpu, self._wall = _cpu_seconds(), time.perf_counter()

    def report(self, accuracy: float) -> str:
        cpu, wall = _cpu_seconds() - self._cpu, time.perf_counter() - self._wall
        return json.dumps({"accuracy": accuracy, "cpu_seconds": cpu, "wall_seconds": wall})


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def ours(folder: Path, seed: int, settings: list[str]) -> str:
    """`shardmill train` on the dataset: also plans, writes checkpoints and computes all metrics of every epoch."""
    import keras  # noqa: F401

    from pipeline.config import load_for_dataset
    from shardmill.jobs.observer import SilentObserver
    from train.reporting.observer import GlobalStep
    from train.training import train_model
    from train.tree import TrainTree

    class Silent(SilentObserver):
        def step(self, step: GlobalStep) -> None:
            return

    clock = Clock()
    tree = load_for_dataset(str(folder / "dataset"), (f"train.seed={seed}", *settings), str(folder / f"ours-{seed}"))
    evaluation = train_model(tree.part(TrainTree), Silent()).result.evaluation
    assert evaluation is not None and evaluation.accuracy is not None
    return clock.report(evaluation.accuracy)


def plain_keras(folder: Path, seed: int) -> str:
    """As Keras's guides show it: `image_dataset_from_directory`, `compile`, `fit`, `evaluate`."""
    import keras

    from train.models.small_cnn import small_cnn

    clock = Clock()
    keras.utils.set_random_seed(seed)
    read = partial(keras.utils.image_dataset_from_directory, image_size=(SIDE, SIDE), batch_size=BATCH_SIZE)
    train, validation, test = (read(str(folder / "images" / split)) for split in ("train", "val", "test"))
    network = small_cnn((SIDE, SIDE, 3), 10)
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), keras.layers.Rescaling(1 / 255), network])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(LEARNING_RATE), loss, metrics=["accuracy"])
    model.fit(train.cache().prefetch(2), validation_data=validation.cache().prefetch(2), epochs=EPOCHS, verbose=0)
    return clock.report(model.evaluate(test, verbose=0)[1])


def plain_torch(folder: Path, seed: int) -> str:
    """As PyTorch's tutorials show it: `ImageFolder`, `DataLoader`, Adam, a loop."""
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms

    clock = Clock()
    torch.manual_seed(seed)
    splits = [
        datasets.ImageFolder(str(folder / "images" / split), transforms.ToTensor())
        for split in ("train", "val", "test")
    ]
    train, validation, test = (DataLoader(each, BATCH_SIZE, shuffle=each is splits[0]) for each in splits)
    # train/models/small_cnn.py in PyTorch.
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, stride=2, padding=1), nn.GELU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1), nn.GELU(),
        nn.Conv2d(128, 256, 3, stride=2, padding=1), nn.GELU(),
        nn.Flatten(), nn.Linear(256 * (SIDE // 8) ** 2, 10),
    )  # fmt: skip
    optimizer, loss_of = torch.optim.Adam(model.parameters(), LEARNING_RATE), nn.CrossEntropyLoss()

    def accuracy_on(loader: DataLoader) -> float:
        model.eval()
        with torch.no_grad():
            return sum(int((model(x).argmax(1) == y).sum()) for x, y in loader) / len(loader.dataset)  # pyright: ignore

    for _ in range(EPOCHS):
        model.train()
        for images, labels in train:
            optimizer.zero_grad()
            loss_of(model(images), labels).backward()
            optimizer.step()
        accuracy_on(validation)
    return clock.report(accuracy_on(test))


def main() -> None:
    name, folder, seed, *settings = sys.argv[1:]
    if name == "ours":
        print(ours(Path(folder), int(seed), settings))
    else:
        print({"keras": plain_keras, "torch": plain_torch}[name](Path(folder), int(seed)))


if __name__ == "__main__":
    main()
