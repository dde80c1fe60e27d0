"""Failpoints: named places where tests make a process die as by `kill -9`, or stop.

Off unless SHARDMILL_FAILPOINT is set; docs/failpoints.md lists the points.
"""

from __future__ import annotations

import itertools
import os
import re
import signal
from collections.abc import Iterator

from shardmill.errors import UsageError

VARIABLE = "SHARDMILL_FAILPOINT"

FAILPOINTS = {
    "list": "while the source is listed",
    "decode": "a source image has been read and is passed to the decoder",
    "shard_open": "a shard's rows are complete, but nothing is written",
    "shard_mid": "the shard is published, its row segment is not",
    "shard_close": "shard and row segment are published",
    "task_report": "a unit is finished and recorded, but its task has not reported it",
    "manifest_put": "all files of a version are published and the lease is checked, but the manifest is not published",
    "post_commit": "the manifest is published, but nothing that follows the commit is done",
    "checkpoint_file": "a file of a training's checkpoint is about to be written",
    "checkpoint_marker": "all files of a checkpoint are written, but its marker is not",
    "checkpoint_done": "the marker is written, but older checkpoints are not deleted yet",
    "cache_keep": "a chunk is in a temporary file of the cache, but is no entry of it yet",
    "tar_record": "a tar file of an export is recorded, but not published",
    "gc_delete": "gc is about to delete a file that nothing refers to",
}

_passes: Iterator[int] = itertools.count(1)


def is_failpoint_set() -> bool:
    """Return whether a failpoint is set, for loops that would call `failpoint` in each iteration."""
    return VARIABLE in os.environ


def failpoint(name: str) -> None:
    """Kill this process if SHARDMILL_FAILPOINT is `NAME`, `NAME:N` (the Nth pass) or `NAME@FILE` (once; makes FILE);
    with `stop:` before any of them, stop it until it is sent SIGCONT.

    A retried task meets the point again in a new process: `@FILE` lets that one live. Raises UsageError if the variable
    names no failpoint, so that a misspelt test cannot pass.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return
    parsed = re.fullmatch(r"(stop:)?(\w+)(?::(\d+))?(?:@(.+))?", wanted)
    if parsed is None or parsed[2] not in FAILPOINTS:
        expected = f"expected NAME, NAME:N or NAME@FILE, or stop: and one of these, of {', '.join(FAILPOINTS)}"
        raise UsageError(f"{VARIABLE}={wanted}", expected)
    if parsed[2] != name or (parsed[3] and next(_passes) != int(parsed[3])):
        return
    if parsed[4]:
        try:
            os.close(os.open(parsed[4], os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return
    os.kill(os.getpid(), signal.SIGSTOP if parsed[1] else signal.SIGKILL)
