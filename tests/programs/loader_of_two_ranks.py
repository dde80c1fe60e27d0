"""`python -m tests.programs.loader_of_two_ranks URI FILE RANK SEED`: one rank's streams, or why it has no loader."""

from __future__ import annotations

import sys

import torch.distributed

import shardmill
from shardmill.errors import UsageError

uri, file, rank, seed = sys.argv[1:]
torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=int(rank), world_size=2)
try:
    print(shardmill.open_dataset(uri).batches("train", global_batch_size=32, seed=int(seed)).streams, end="")
except UsageError as error:
    print(error, end="")
torch.distributed.destroy_process_group()
