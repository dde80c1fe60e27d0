"""The environment of a peer's script: what its first comment declares (PEP 723), installed by uv."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path


@cache
def find_uv() -> str:
    """The uv that scripts/setup.sh finds or installs. Ends the process if there is none."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    own = str(cache_home / "shardmill" / "uv" / "bin" / "uv")
    for candidate in ("uv", own, str(Path.home() / ".local" / "bin" / "uv")):
        found = shutil.which(candidate)
        # A shim of pyenv may be there and lead nowhere, so each candidate must answer.
        if found and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return found
    raise SystemExit("uv is missing: `make setup` installs it, or `pip install uv`")


def install(script: Path) -> None:
    """Install what the script declares. Raises CalledProcessError."""
    subprocess.run([find_uv(), "sync", "--quiet", "--script", str(script)], check=True, stdout=sys.stderr)


@cache
def python_of(script: Path) -> str:
    """The Python of the script's environment: `uv run --script` starts the same one, after 0.2 s of looking for it."""
    command = [find_uv(), "python", "find", "--script", str(script)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def version_of(script: Path) -> str:
    """The release that the script asks for, first of all; empty if it asks for none."""
    pinned = re.search(r'"[^"]*==([\d.]+)"', script.read_text())
    return pinned[1] if pinned else ""
