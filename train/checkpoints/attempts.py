"""Numbers the attempts at one training: only the newest may publish, however long an older one keeps running.

<training_dir>/attempts/00000002.json     who claimed number 2; `put_if_absent` gives each number to one attempt

A scheduler that lost sight of an attempt starts another. The older one may wake up again; what it would publish then is
refused to it. Between its look at the numbers and its write a newer one may still begin: such a checkpoint is whole and
of the same training, and counts less than any of the newer attempt (train/checkpoints/checkpoint.py); a result is
published once.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from shardmill.errors import CommitConflict
from shardmill.section import Section
from shardmill.storage import Store, join_uri
from train.records import put_record, read_record, record_numbers, record_path

ATTEMPTS = "attempts"


class AttemptRecord(Section):
    """The process that claimed an attempt number."""

    host: str
    process: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """One of the attempts at the training in `training_dir`, relative to the store's root."""

    store: Store
    training_dir: str
    number: int

    @property
    def name(self) -> str:
        """Part of the names of the attempt's files: no attempt ever overwrites another one's files."""
        return f"a{self.number:08d}"

    def check(self) -> None:
        """Raise CommitConflict (exit 6) if a newer attempt has begun."""
        folder = f"{self.training_dir}/{ATTEMPTS}"
        # Numbers have no gaps, so one question is enough; this is asked at every checkpoint.
        if self.store.stat(record_path(folder, self.number + 1)) is None:
            return
        newest = max(record_numbers(self.store, folder))
        by = read_record(self.store, folder, newest, AttemptRecord)
        raise CommitConflict(
            f"attempt {self.number} at {join_uri(self.store.uri, self.training_dir)} is no longer the newest: "
            f"attempt {newest} began on host {by.host}, process {by.process}",
            "an older attempt may not publish anything",
            "let the newer attempt continue; if it has ended, run the same command again",
        )

    def publish(self, path: str, data: bytes) -> None:
        """Publish a file that no attempt has published yet. Raises CommitConflict if one has, or if this one is old."""
        self.check()
        if not self.store.put_if_absent(path, data) and self.store.read(path) != data:
            raise CommitConflict(
                f"another attempt has published {join_uri(self.store.uri, path)} before attempt {self.number}",
                "expected no such file; nothing was replaced",
                "run the same command again: it finds the published file",
            )


def claim_attempt(store: Store, training_dir: str, world_size: int) -> Attempt:
    """The next number, which is nobody else's."""
    folder = f"{training_dir}/{ATTEMPTS}"
    record = AttemptRecord(host=socket.gethostname(), process=os.getpid(), world_size=world_size)
    number = max(record_numbers(store, folder), default=0) + 1
    while not put_record(store, folder, number, record):
        number += 1
    return Attempt(store, training_dir, number)
