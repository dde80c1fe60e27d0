# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["lancedb==0.40.0", "torch==2.12.1", "numpy<3"]
# ///
"""LanceDB's StreamingDataset.

https://docs.lancedb.com/training/resuming: "collect the state_dict() from every rank of the previous run and merge them
with StreamingDataset.merge_state_dicts". https://docs.lancedb.com/training/checkpointing: "torch.utils.data.DataLoader
produces a safe checkpoint when num_workers = 0", and "make sure global_batch_size is a multiple of num_splits".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from common import GLOBAL_BATCH_SIZE, Job, rows, run_ranks
from torch.utils.data import DataLoader

NUM_SPLITS = GLOBAL_BATCH_SIZE // 2
"""A multiple of every world size here."""


def write(own: Path) -> None:
    import lancedb

    numbers, images = zip(*rows(), strict=True)
    lancedb.connect(str(own)).create_table("rows", pa.table({"number": numbers, "image": images}))


class Ranked:
    def __init__(self, job: Job) -> None:
        # Its threads begin with the import, in the process of the rank.
        import lancedb
        from lancedb.streaming import StreamingDataset

        self.job, self.streaming_dataset = job, StreamingDataset
        self.table = lancedb.connect(str(job.own)).open_table("rows")
        self.merged: dict[str, Any] | None = None

    def epoch(self, number: int) -> Iterator[list[int]]:
        # One instance reads one epoch.
        self.dataset = self.streaming_dataset(
            self.table, num_splits=NUM_SPLITS, shuffle_seed=self.job.seed, epoch=number, rank=self.job.rank,
            world_size=self.job.world_size, columns=["number"],
        )  # fmt: skip
        if self.merged is not None:
            self.dataset.load_state_dict(self.merged)
            self.merged = None
        for batch in DataLoader(self.dataset, self.job.batch_size):
            yield batch["number"].tolist()

    def state(self) -> dict[str, Any]:
        return self.dataset.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        self.merged = self.streaming_dataset.merge_state_dicts(states)


if __name__ == "__main__":
    run_ranks(write, Ranked)
