"""The worker of the side process tests: answers, or fails to answer, as the task says."""

from __future__ import annotations

import ctypes
import os
import subprocess
import time
from dataclasses import dataclass

from shardmill.errors import UsageError
from train.launching.side_process import answer


@dataclass(frozen=True)
class Task:
    way: str


def work(task: Task) -> int:
    match task.way:
        case "answers":
            # It has all that this process has open, and a group of its own is not left to it.
            print("printed by a user", flush=True)
            return subprocess.Popen(["sleep", "1000"]).pid
        case "refuses":
            raise UsageError("too few", "expected more", "add some")
        case "raises":
            raise KeyError("absent")
        case "leaves":
            print("nothing to do here", flush=True)
            os.write(2, b"goodbye\n")
            os._exit(3)
        case "crashes":
            return ctypes.string_at(0)[0]
        case _:
            time.sleep(1000)
            return 0


if __name__ == "__main__":
    answer(Task, work)
