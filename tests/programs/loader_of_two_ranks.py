"""`python -m tests.programs.loader_of_two_ranks URI FILE RANK SEED...`: a rank's streams or refusal, for each seed."""

from __future__ import annotations

import sys

import torch.distributed

import shardmill
from shardmill.errors import UsageError

uri, file, rank, *seeds = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
for seed in map(int, seeds):
    try:
        print(shardmill.open_dataset(uri).batches("train", global_batch_size=32, seed=seed).streams)
    except UsageError as error:
        print(*str(error).split())
torch.distributed.destroy_process_group()
