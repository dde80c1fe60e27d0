"""What the adapters of `resume_conformance.py` share: the rows, what an adapter is, and the life of one rank.

The standard library alone, so that it runs in the environment of every peer.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import signal
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

NUM_ROWS, NUM_SHARDS, EPOCHS, GLOBAL_BATCH_SIZE = 1_000, 24, 2, 24
"""Whole steps at 2, 3 and 4 ranks, whole shards for each rank, and a last step that is not full."""
NUM_WORKERS = 2
"""Worker processes of a rank, where a loader has them."""
NOT_SUPPORTED = 3
"""Exit code of a rank whose loader cannot resume so; the line it printed says why."""


@dataclass(frozen=True)
class Job:
    """One rank of a run."""

    own: Path
    """Folder with the rows in the loader's format."""
    rank: int
    world_size: int
    seed: int
    variant: str

    @property
    def batch_size(self) -> int:
        """Rows that this rank gets in a step."""
        return GLOBAL_BATCH_SIZE // self.world_size


class Loader(Protocol):
    """A data loader on one rank: all that an adapter has to provide, beside a function that writes the rows."""

    def epoch(self, number: int) -> Iterator[list[int]]:
        """The rows' numbers, step by step; after `resume` those that are left of the epoch that was interrupted."""
        ...

    def state(self) -> Any:
        """What the loader saves after the step that `epoch` gave last; anything that can be pickled."""
        ...

    def resume(self, states: list[Any], epoch: int) -> None:
        """Called once, before `epoch(epoch)`: the states of all ranks of the run before. Raises NotSupported."""
        ...


class NotSupported(Exception):
    """The loader documents that it cannot do this: the message quotes where."""


def rows() -> list[tuple[int, bytes]]:
    """Each row: its number, and a PNG of 8 x 8 pixels whose red and green hold the number."""
    return [(number, _png(number)) for number in range(NUM_ROWS)]


def _png(number: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    pixel = bytes((number // 256, number % 256, 0))
    header = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    pixels = zlib.compress((b"\0" + pixel * 8) * 8, level=0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def run_ranks(write: Callable[[Path], None], open_loader: Callable[[Job], Loader]) -> None:
    """The main function of an adapter: write the rows; or be all ranks of a run, in processes that end as they are
    told. Their exit codes, steps, states and what they said are files in --out."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--own", required=True, type=Path)
    parser.add_argument("--write", action="store_true", help="write the rows into --own, and end")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--variant", default="")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world-size", type=int, default=1)
    parser.add_argument("--resume-epoch", type=int, default=0)
    parser.add_argument("--states", type=Path, nargs="*", default=[], help="of all ranks of the run before")
    parser.add_argument("--save-epoch", type=int, default=EPOCHS)
    parser.add_argument("--save-step", type=int, default=-1, help="counted in this run")
    parser.add_argument("--kill-after", type=int, help="steps after that; without it, the iteration just stops")
    options = parser.parse_args()
    if options.write:
        options.own.mkdir(parents=True)
        write(options.own)
        return
    ranks = []
    for rank in range(options.world_size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            _be_rank(rank, open_loader, options)
            return
    codes = [os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks]
    (options.out / "codes.json").write_text(json.dumps(codes))


def _be_rank(rank: int, open_loader: Callable[[Job], Loader], options: argparse.Namespace) -> None:
    world = str(options.world_size)
    # As torchrun sets them; MASTER_ADDR and MASTER_PORT are there.
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world)
    log = os.open(options.out / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    loader = open_loader(Job(options.own, rank, options.world_size, options.seed, options.variant))
    if options.states:
        # Written by the ranks of the run before.
        states = [pickle.loads(path.read_bytes()) for path in options.states]  # noqa: S301
        try:
            loader.resume(states, options.resume_epoch)
        except NotSupported as error:
            print(error)
            sys.exit(NOT_SUPPORTED)

    def save() -> None:
        (options.out / f"{rank}.state").write_bytes(pickle.dumps(loader.state()))

    with (options.out / f"{rank}.steps").open("w", encoding="utf-8") as out:
        for epoch in range(options.resume_epoch, EPOCHS):
            step = -1
            for step, numbers in enumerate(loader.epoch(epoch)):
                out.write(json.dumps([epoch, [int(number) for number in numbers]]) + "\n")
                out.flush()
                if epoch == options.save_epoch and step >= options.save_step:
                    if step == options.save_step:
                        save()
                    if options.kill_after is None:
                        return
                    if step == options.save_step + options.kill_after:
                        os.kill(os.getpid(), signal.SIGKILL)
            if epoch == options.save_epoch:
                # This rank had fewer steps than the others.
                if step < options.save_step:
                    save()
                if options.kill_after is None:
                    return
                os.kill(os.getpid(), signal.SIGKILL)
