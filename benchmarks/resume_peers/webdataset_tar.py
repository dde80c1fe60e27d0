# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["webdataset==1.0.2", "torch==2.12.1", "numpy<3"]
# ///
"""webdataset: tar shards, split by node and by worker, shuffled, in its WebLoader."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import webdataset
from common import NUM_SHARDS, NUM_WORKERS, Job, NotSupported, rows, run_ranks

BUFFER_ROWS = 100


def write(own: Path) -> None:
    for shard in range(NUM_SHARDS):
        with webdataset.TarWriter(str(own / f"{shard:02d}.tar")) as writer:
            for number, image in rows()[shard::NUM_SHARDS]:
                writer.write({"__key__": f"{number:04d}", "png": image, "cls": str(number).encode()})


class Ranked:
    def __init__(self, job: Job) -> None:
        urls = sorted(str(path) for path in job.own.glob("*.tar"))
        dataset = webdataset.WebDataset(
            urls, shardshuffle=len(urls), detshuffle=True, seed=job.seed, nodesplitter=webdataset.split_by_node
        )
        dataset = dataset.shuffle(BUFFER_ROWS, seed=job.seed).decode().to_tuple("cls").batched(job.batch_size)
        self.loader = webdataset.WebLoader(dataset, batch_size=None, num_workers=NUM_WORKERS)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for (numbers,) in self.loader:
            yield numbers.tolist()

    def state(self) -> None:
        return None

    def resume(self, states: list[Any], epoch: int) -> None:
        raise NotSupported(
            "it has no state: [its author](https://github.com/webdataset/webdataset/issues/271) recommends resampling, "
            'and writes of keeping track of epochs and samples: "WebDataset can\'t really do this for you"'
        )


if __name__ == "__main__":
    run_ranks(write, Ranked)
