"""The packages of the ETL as an archive for the nodes of a cluster."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from benchmarks.peer_script import find_uv
from shardmill.kernel import NATIVE_ID
from tests.lab.commands import ROOT

NAME = "environment"
"""Of the folder beside each executor into which Spark unpacks the archive."""


def pack_environment(folder: Path) -> Path:
    """As docs/clusters.md does, without compressing it; with the native kernel if it could be built here."""
    environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(folder / NAME)}
    packages = ("--frozen", "--no-dev", "--no-install-project", "--extra", "hdfs")
    into = ("--python", folder / NAME)
    for command in (
        [find_uv(), "venv", "--relocatable", "--python", sys.executable, folder / NAME],
        [find_uv(), "sync", *packages],
        *([[find_uv(), "pip", "install", *into, "--no-deps", ROOT / "native"]] if NATIVE_ID else []),
        ["tar", "-cf", folder / "environment.tar", "-C", folder / NAME, "."],
    ):
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, f"{command}\n{done.stderr[-3000:]}"
    shutil.rmtree(folder / NAME)
    return folder / "environment.tar"
