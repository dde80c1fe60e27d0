"""Temporary folders that do not outlive their owner: removed at its end, and after a kill by the next owner of one.

TensorFlow, Spark and others leave files in the temporary folder whenever a process does not end by itself, and ranks
never do. So each process of ours gets a folder of its own, and what is in it goes with it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "shardmill-scratch-"
# Younger folders without an owner may be about to get one.
STALE_SECONDS = 60.0


class Scratch:
    """A private folder below the temporary one. Its owner holds a lock on it, which the kernel frees with the process.

    A lock and not a process id: containers that share a temporary folder do not share their ids.
    """

    def __init__(self) -> None:
        remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def remove(self) -> None:
        """The folder with all that is in it; it may be gone already."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(descriptor)


@contextmanager
def private_temporary_folder() -> Iterator[Path]:
    """For this process and what it starts, "the temporary folder" is one of its own."""
    scratch = Scratch()
    before = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch.path)
    try:
        yield scratch.path
    finally:
        tempfile.tempdir = before[1]
        os.environ.pop("TMPDIR")
        if before[0] is not None:
            os.environ["TMPDIR"] = before[0]
        scratch.remove()


def remove_stale() -> None:
    """Folders of ours whose owner was killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        try:
            status = folder.lstat()
            is_mine = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if not is_mine or time.time() - status.st_mtime < STALE_SECONDS:
                continue
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
        except OSError:
            # Its owner lives.
            pass
        finally:
            os.close(descriptor)
