# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["mosaicml-streaming==0.13.0", "torch==2.12.1", "numpy<3"]
# ///
"""MosaicML Streaming: MDS shards, its StreamingDataset and StreamingDataLoader.

https://docs.mosaicml.com/projects/streaming/en/latest/distributed_training/fast_resumption.html: "simply call the
state_dict method of StreamingDataLoader", which "is called on rank zero", and load_state_dict on each rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from common import NUM_SHARDS, NUM_WORKERS, Job, rows, run_ranks
from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def write(own: Path) -> None:
    size_limit = sum(len(image) + 16 for _, image in rows()) // NUM_SHARDS
    with MDSWriter(out=str(own), columns={"number": "int", "image": "bytes"}, size_limit=size_limit) as writer:
        for number, image in rows():
            writer.write({"number": number, "image": image})


class Ranked:
    def __init__(self, job: Job) -> None:
        # As trainers do. Otherwise the next two calls make and destroy a group each, and ranks can miss each other.
        torch.distributed.init_process_group("gloo")
        # What processes that were killed left behind.
        clean_stale_shared_memory()
        dataset = StreamingDataset(local=str(job.own), shuffle=True, shuffle_seed=job.seed, batch_size=job.batch_size)
        self.loader = StreamingDataLoader(dataset, batch_size=job.batch_size, num_workers=NUM_WORKERS)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["number"].tolist()

    def state(self) -> dict[str, Any] | None:
        return self.loader.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        self.loader.load_state_dict(states[0])


if __name__ == "__main__":
    run_ranks(write, Ranked)
