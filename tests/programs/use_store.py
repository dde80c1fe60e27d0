"""Uses the store at argv[1] in every way that a commit does; prints a line for each with what came of it.

A process of its own, because one process keeps one connection to one server.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def use_store(uri: str, **environment: str) -> dict[str, str]:
    """What comes of each use of the store at `uri` in a process with this environment."""
    done = subprocess.run(
        [sys.executable, "-m", __name__, uri],
        env={**os.environ, **environment},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def main(uri: str) -> None:
    from shardmill.errors import ShardmillError
    from shardmill.stores import open_store

    store = open_store(uri)
    for name, use in {
        "list": lambda: [file.path for file in store.list("")],
        "stat": lambda: store.stat("a") is not None,
        "read": lambda: store.read("a"),
        "put_if_absent": lambda: store.put_if_absent("manifest", b"1"),
        "list again": lambda: [file.path for file in store.list("")],
    }.items():
        try:
            print(f"{name}: {use()}")
        except ShardmillError as error:
            print(f"{name}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main(sys.argv[1])
