"""Trains on argv[1] under argv[2], and is killed at a random place of writing a checkpoint argv[4] times; seed argv[3].

Then the training goes on to its end, and one that nothing disturbed is made beside it. Prints both digests of weights.
"""

import os
import random
import signal
import sys
from pathlib import Path

import torch
import torch.export._trace

from shardmill.failpoints import VARIABLE
from shardmill.stores import open_store
from tests.train.training import train_here
from train.checkpoints.checkpoint import complete_checkpoints

PLACES = ("checkpoint_file", "checkpoint_marker", "checkpoint_done")


def main(uri: str, models: Path, seed: int, num_kills: int) -> None:
    pick = random.Random(seed)
    # A kill comes at the third pass of its place or before; three passes are at least one checkpoint.
    config = {
        "model": "tests.train.torch_models:linear",
        "strategy": "single",
        "epochs": num_kills + 1,
        "checkpoint_every_steps": 1,
    }
    # Imports the compilers.
    torch.use_deterministic_algorithms(True)
    newest = 0
    for number in range(num_kills):
        place = f"{pick.choice(PLACES)}:{pick.randint(1, 3)}"
        # Forked: what takes seconds to import is imported once.
        if (child := os.fork()) == 0:
            os.environ[VARIABLE] = place
            train_here(uri, models / "killed", **config)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, (place, status)
        store = open_store(models / "killed")
        found = next(complete_checkpoints(store, "t"), None)
        step = found.marker.global_step if found else 0
        print(f"kill {number}: {place}, newest checkpoint {step}", flush=True)
        assert step >= newest, "a complete checkpoint was lost"
        newest = step
        if found:
            for file in found.marker.files:
                found.read(store, file.path)
    print(train_here(uri, models / "killed", **config).weights_sha256)
    print(train_here(uri, models / "whole", **config).weights_sha256)


main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
