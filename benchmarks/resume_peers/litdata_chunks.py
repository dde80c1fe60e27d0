# /// script
# requires-python = ">=3.11,<3.12"
# dependencies = ["litdata==0.2.76", "torch==2.12.1", "numpy<3"]
# ///
"""litdata's StreamingDataset and StreamingDataLoader.

https://github.com/Lightning-AI/litData, "Pause, resume data streaming": "Same seed and shuffle are required. For a
StreamingDataset, num_workers and world_size may change: LitData drops a global sample_in_epoch prefix and restripes the
rest (never duplicates remaining IDs). [...] keep global batch size constant and DDP ranks in lockstep". And "For the
training dataset, don't forget to enable shuffle and drop_last" (https://lightning.ai/docs/litdata).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import torch
from common import NUM_ROWS, NUM_SHARDS, NUM_WORKERS, Job, rows, run_ranks


def _sample(row: tuple[int, bytes]) -> dict[str, object]:
    return {"number": row[0], "image": row[1]}


def write(own: Path) -> None:
    chunk_rows = -(-NUM_ROWS // NUM_SHARDS)
    litdata.optimize(_sample, rows(), output_dir=str(own), num_workers=1, chunk_size=chunk_rows, reorder_files=False)


class Ranked:
    def __init__(self, job: Job) -> None:
        torch.distributed.init_process_group("gloo")
        dataset = litdata.StreamingDataset(str(job.own), shuffle=True, drop_last=True, seed=job.seed)
        self.loader = litdata.StreamingDataLoader(dataset, batch_size=job.batch_size, num_workers=NUM_WORKERS)

    def epoch(self, number: int) -> Iterator[list[int]]:
        for batch in self.loader:
            yield batch["number"].tolist()

    def state(self) -> dict[str, Any]:
        return self.loader.state_dict()

    def resume(self, states: list[Any], epoch: int) -> None:
        self.loader.load_state_dict(states[0])


if __name__ == "__main__":
    run_ranks(write, Ranked)
