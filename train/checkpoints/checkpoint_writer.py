"""Writes checkpoints in the background: the arrays of one moment are copied, and the next step begins.

Every rank has a writer, with one thread, and hands over the same moments in the same order. At most one is being
written; to hand over the next waits for it. The ranks' threads agree among themselves (`World.exchange_aside`), so that
no step waits for the store, and after each checkpoint all of them know alike whether it is there.
"""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from shardmill.checksummed import ChecksummedFile, checksum_file, with_checksum
from shardmill.errors import StorageError
from shardmill.failpoints import failpoint
from shardmill.jobs.process import Terminated
from shardmill.storage import Store
from train.checkpoints.arrays import MARKER, dump_arrays
from train.checkpoints.checkpoint import CheckpointFolder, CheckpointMarker, TrainingIdentity, delete_older
from train.contracts.activities import Activity, during, waiting
from train.contracts.values import BEFORE_CHECKPOINT, Progress, Reporter, from_json, to_json
from train.contracts.world import Gather, alone

# How long a training that fails waits for a checkpoint that was begun: ranks that fail for one reason can complete it.
GRACE_SECONDS = 10.0
THREAD_NAME = "checkpoint"
STORING, OF_ALL_RANKS = Activity("storing a checkpoint"), waiting("the checkpoint of all ranks")


def wait_for_writers() -> None:
    """Wait a short time for what this process still writes of a training that was asked to end."""
    for thread in threading.enumerate():
        if thread.name == THREAD_NAME:
            thread.join(GRACE_SECONDS)


class Ranks(Protocol):
    """The ranks that write a checkpoint together; see train/api.py."""

    rank: int
    world_size: int

    def state_files(self) -> dict[str, list[np.ndarray]]: ...


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of a training, as one rank has it."""

    path: str
    """Path of its checkpoint."""
    files: dict[str, list[np.ndarray]]
    """This rank's, by name."""
    identity: TrainingIdentity
    progress: Progress
    global_step: int
    world_size: int


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a checkpoint; except for the time, equal on all ranks that write one together."""

    moment: Moment
    problem: str
    """Why the store refused it, or one that had to come before it; empty if it is there."""
    seconds: float


class CheckpointWriter:
    """Writes the checkpoints of one rank."""

    def __init__(self, folder: CheckpointFolder, ranks: Ranks, reporter: Reporter, gather: Gather = alone) -> None:
        """`gather`: of the ranks that write one together, for the writer's thread."""
        self._folder = folder
        self._ranks, self._gather_bytes = ranks, gather
        self._reporter = reporter
        self._running: Future[Written] | None = None
        self._changed = threading.Condition()
        self._activity = STORING
        """The thread's."""
        # The thread's own until `_running` is done.
        self._owed: list[Moment] = []
        """The best epoch's, while the store refuses it."""
        self.refused: dict[str, str] = {}
        """Checkpoints that are not there, and why."""
        self._copy: dict[str, list[np.ndarray]] = {}

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        """A training that failed gives what it has begun a short time to complete; one that was asked to end, none."""
        if self._running is not None and not (error_type and issubclass(error_type, (KeyboardInterrupt, Terminated))):
            wait([self._running], GRACE_SECONDS)

    def copy_state(self) -> dict[str, list[np.ndarray]]:
        """This rank's files of this moment: all of a checkpoint that a step waits for.

        The copy is held until the next one takes its memory. Pages that a virtual machine has never touched come from
        its host at 0.5 GB/s, which takes ten times as long as the copy itself.
        """
        self._copy = {}
        self._copy = self._ranks.state_files()
        return self._copy

    def begin(self, moment: Moment) -> None:
        """Hand over what is to be written; the one before must have been taken."""
        assert self._running is None
        if self._ranks.world_size == 1:
            # Of several ranks the driver sees it, when they exchange what they have stored.
            self._reporter.event(BEFORE_CHECKPOINT, {})
        self._running = Future()
        # A daemon: a store that hangs keeps no process alive.
        threading.Thread(target=self._run, args=(moment, self._running), name=THREAD_NAME, daemon=True).start()

    @property
    def is_writing(self) -> bool:
        return self._running is not None and not self._running.done()

    def take(self) -> Written | None:
        """Wait for the checkpoint in progress and return its outcome, once. None if there is none.

        Raises what its thread raised: CommitConflict, on rank 0, if a newer attempt has begun.
        """
        running = self._running
        if running is None:
            return None
        if self.is_writing:
            # This tells the driver which rank the others wait for.
            with self._changed, during(self._reporter, told := self._activity):
                while not running.done():
                    if self._activity != told:
                        told = self._activity
                        self._reporter.doing(told)
                    self._changed.wait()
        self._running = None
        return running.result()

    def _run(self, moment: Moment, running: Future[Written]) -> None:
        """The thread."""
        try:
            written = self._write_in_order(moment)
        except BaseException as error:
            with self._changed:
                running.set_exception(error)
                self._changed.notify_all()
        else:
            with self._changed:
                running.set_result(written)
                self._changed.notify_all()

    def _write_in_order(self, now: Moment) -> Written:
        """First what is owed: a marker must name no checkpoint of the best epoch that is not there."""
        start_seconds = time.perf_counter()
        best = now.progress.best
        owed = [each for each in self._owed if best is not None and each.path == best.checkpoint != now.path]
        problem = ""
        for moment in (*owed, now):
            problem = self._write(moment)
            if problem:
                self.refused[now.path] = self.refused[moment.path] = problem
                break
            self.refused.pop(moment.path, None)
            owed = [each for each in owed if each is not moment]
        # The weights of the best epoch exist nowhere else.
        is_best = best is not None and now.path == best.checkpoint
        self._owed = [now] if problem and is_best else owed
        return Written(now, problem, time.perf_counter() - start_seconds)

    def _write(self, moment: Moment) -> str:
        """Rank 0 publishes the marker when the files of all are there. -> why not, equal on all that gather.

        Empty if it is published. A store that refuses leaves the checkpoints before as they are. Afterwards the newest
        `keep_checkpoints` complete ones stay, with those of the best epochs that they name; older checkpoints are
        deleted, marker first.
        """
        of_all_ranks = [from_json(_Stored, part) for part in self._gather(to_json(_stored(self._folder.store, moment)))]
        # The gather is also the barrier: rank 0 has every rank's list only after every rank has stored (and synced) its
        # files, so a marker never names a file that a crash has lost.
        problem = "; ".join(each.problem for each in of_all_ranks if each.problem)
        if self._ranks.rank == 0 and not problem:
            problem = self._publish(moment, tuple(file for of_rank in of_all_ranks for file in of_rank.files))
        # All ranks continue in the same way: rank 0 decides.
        return json.loads(self._gather(json.dumps(problem).encode())[0])

    def _gather(self, data: bytes) -> list[bytes]:
        if self._ranks.world_size > 1:
            self._begin(OF_ALL_RANKS)
        of_ranks = self._gather_bytes(data)
        self._begin(STORING)
        return of_ranks

    def _begin(self, activity: Activity) -> None:
        with self._changed:
            self._activity = activity
            self._changed.notify_all()

    def _publish(self, moment: Moment, files: tuple[ChecksummedFile, ...]) -> str:
        """-> why not, or ''. Raises CommitConflict if a newer attempt has begun."""
        marker = CheckpointMarker(moment.identity, moment.world_size, moment.global_step, moment.progress, files)
        try:
            self._folder.attempt.check()
            failpoint("checkpoint_marker")
            self._folder.store.put(f"{moment.path}/{MARKER}", with_checksum(to_json(marker)))
        except StorageError as error:
            return str(error)
        failpoint("checkpoint_done")
        # What is left of older ones is deleted next time.
        with suppress(StorageError):
            delete_older(self._folder, keep=moment.path)
        return ""


@dataclass(frozen=True, slots=True)
class _Stored:
    """The files of a checkpoint that one rank has stored, or why it could not."""

    files: tuple[ChecksummedFile, ...]
    problem: str = ""


def _stored(store: Store, moment: Moment) -> _Stored:
    written = []
    try:
        for name, arrays in moment.files.items():
            data = dump_arrays(arrays)
            failpoint("checkpoint_file")
            store.put(f"{moment.path}/{name}", data)
            written.append(checksum_file(name, data))
    except StorageError as error:
        return _Stored((), str(error))
    return _Stored(tuple(written))
