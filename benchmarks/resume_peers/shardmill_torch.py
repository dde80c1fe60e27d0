"""shardmill's `torch_loader`, of a dataset version that its ETL built from files: the row's number is in its pixels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import GLOBAL_BATCH_SIZE, NUM_ROWS, NUM_SHARDS, Job, rows, run_ranks

import shardmill


def write(own: Path) -> None:
    images = own / "images" / "class"
    images.mkdir(parents=True)
    for number, image in rows():
        (images / f"{number:04d}.png").write_bytes(image)
    splits = {"train": 1.0, "validation": 0.0, "test": 0.0}
    etl = {
        "image_size": 8,
        "encoding": "raw",
        "split_fractions": splits,
        "chunk_bytes": 8 * 8 * 3 * NUM_ROWS // NUM_SHARDS,
    }
    shardmill.etl(own / "images", workdir=own / "work", etl=etl, quiet=True)


class Ranked:
    """docs/get-started/your-loop.md#pytorch: "state = loader.state_dict()  # JSON; save it with the weights"."""

    def __init__(self, job: Job) -> None:
        dataset = shardmill.open_dataset(job.own / "work" / "dataset")
        self.loader = dataset.torch_loader(
            "train", global_batch_size=GLOBAL_BATCH_SIZE, seed=job.seed, rank=job.rank, world_size=job.world_size
        )

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            pixels_N3 = batch.images[batch.weights > 0][:, :, 0, 0].int()
            yield (pixels_N3[:, 0] * 256 + pixels_N3[:, 1]).tolist()

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        self.loader.load_state_dict(states[0])


if __name__ == "__main__":
    run_ranks(write, Ranked)
