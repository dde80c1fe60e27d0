# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["datasets==5.2.0", "torchdata==0.11.0", "torch==2.12.1", "numpy<3"]
# ///
"""Hugging Face `datasets`: an IterableDataset of Parquet files, split by node, in torchdata's StatefulDataLoader.

https://huggingface.co/docs/datasets/use_with_pytorch: "split_dataset_by_node", "Checkpoint and resume".
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

from common import NUM_SHARDS, NUM_WORKERS, Job, NotSupported, rows, run_ranks
from datasets import Dataset, load_dataset
from datasets.distributed import split_dataset_by_node
from torchdata.stateful_dataloader import StatefulDataLoader

BUFFER_ROWS = 100


def write(own: Path) -> None:
    numbers, images = zip(*rows(), strict=True)
    dataset = Dataset.from_dict({"number": numbers, "image": images})
    for shard in range(NUM_SHARDS):
        dataset.shard(NUM_SHARDS, shard).to_parquet(own / f"{shard:02d}.parquet")


class Ranked:
    def __init__(self, job: Job) -> None:
        self.job = job
        files = sorted(str(path) for path in job.own.glob("*.parquet"))
        dataset = load_dataset("parquet", data_files=files, split="train", streaming=True, cache_dir=str(job.own))
        if job.variant:
            dataset = dataset.shuffle(seed=job.seed, buffer_size=BUFFER_ROWS)
        self.dataset = split_dataset_by_node(dataset, job.rank, job.world_size)
        num_workers = 0 if job.variant == "shuffle_alone" else NUM_WORKERS
        self.loader = StatefulDataLoader(self.dataset, job.batch_size, num_workers=num_workers)

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.dataset.set_epoch(number)
        for batch in self.loader:
            yield batch["number"].tolist()

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        if len(states) != self.job.world_size:
            raise NotSupported(
                "[the documentation](https://huggingface.co/docs/datasets/use_with_pytorch) describes no way: a state "
                "has the position in the shards of one rank, and StatefulDataLoader's is that of its rank"
            )
        self.loader.load_state_dict(states[self.job.rank])


if __name__ == "__main__":
    run_ranks(write, Ranked)
