# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["grain==0.2.18", "numpy<3"]
# ///
"""grain: a MapDataset of rows, shuffled; cut by rank as its guide does, or by its experimental ElasticIterator.

https://google-grain.readthedocs.io/en/latest/tutorials/dataset_basic_tutorial.html: "Checkpointing": `get_state`,
`set_state`. ElasticIterator: "State of any shard can be used to restore the state of all of the shards after changes in
sharding and global batch size".
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grain
from common import GLOBAL_BATCH_SIZE, Job, rows, run_ranks


def write(own: Path) -> None:
    (own / "rows.json").write_text(json.dumps([[number, image.hex()] for number, image in rows()]))


class Ranked:
    def __init__(self, job: Job) -> None:
        self.job = job
        self.rows = json.loads((job.own / "rows.json").read_text())
        self.saved: Any = None

    def epoch(self, number: int) -> Iterator[list[int]]:
        job = self.job
        shuffled = grain.MapDataset.source(self.rows).map(lambda row: row[0])
        shuffled = shuffled.seed(job.seed * 1_000 + number).shuffle()
        if job.variant == "elastic":
            shard = grain.sharding.ShardOptions(job.rank, job.world_size)
            self.iterator = iter(grain.experimental.ElasticIterator(shuffled, GLOBAL_BATCH_SIZE, shard))
        else:
            own = shuffled[job.rank :: job.world_size].batch(job.batch_size)
            self.iterator = iter(own.to_iter_dataset())
        if self.saved is not None:
            self.iterator.set_state(self.saved)
            self.saved = None
        for numbers in self.iterator:
            yield numbers.tolist()

    def state(self) -> Any:
        return self.iterator.get_state()

    def resume(self, states: list[Any], epoch: int) -> None:
        # The steps that are done: the same on all ranks, and at every world size with the same global batch.
        self.saved = states[0]


if __name__ == "__main__":
    run_ranks(write, Ranked)
