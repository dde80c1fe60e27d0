# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["torchdata==0.11.0", "torch==2.12.1", "numpy<3"]
# ///
"""torchdata's StatefulDataLoader over a list of rows, with its StatefulDistributedSampler.

https://meta-pytorch.org/data/0.11/stateful_dataloader_tutorial.html
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import NUM_WORKERS, Job, NotSupported, rows, run_ranks
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


def write(own: Path) -> None:
    (own / "rows.json").write_text(json.dumps([[number, image.hex()] for number, image in rows()]))


class Ranked:
    def __init__(self, job: Job) -> None:
        self.job = job
        dataset = json.loads((job.own / "rows.json").read_text())
        self.sampler = StatefulDistributedSampler(dataset, job.world_size, job.rank, shuffle=True, seed=job.seed)
        self.loader = StatefulDataLoader(dataset, job.batch_size, sampler=self.sampler, num_workers=NUM_WORKERS)

    def epoch(self, number: int) -> Iterator[list[int]]:
        self.sampler.set_epoch(number)
        for numbers, _ in self.loader:
            yield numbers.tolist()

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        if len(states) != self.job.world_size:
            raise NotSupported(
                "its state is that of one rank: [the documentation]"
                "(https://meta-pytorch.org/data/0.11/torchdata.stateful_dataloader.html) says that it handles state "
                '"across multiprocess workers (but not across ranks)"'
            )
        self.loader.load_state_dict(states[self.job.rank])


if __name__ == "__main__":
    run_ranks(write, Ranked)
