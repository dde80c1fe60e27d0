"""`make demo`, once per test session, in a folder of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Demo:
    """A finished `make demo`."""

    folder: Path
    stdout: str
    stderr: str
    run: Path
    """Its run record."""

    @property
    def work(self) -> Path:
        return self.folder / "demo-work"

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.run / "summary.json").read_bytes())

    def shardmill(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """A command of the command line, in the demo's folder."""
        return subprocess.run(
            [sys.executable, "-m", "pipeline.cli", *arguments],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=250,
        )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    folder = tmp_path_factory.mktemp("demo")
    # A checkout that shares everything but ./demo-work with the real one.
    for name in ("Makefile", "scripts", "examples", "native", ".venv", "uv.lock", "pyproject.toml", ".python-version"):
        (folder / name).symlink_to(REPOSITORY / name)
    # What an earlier demo left must go; what somebody else put there must stay.
    (folder / "demo-work" / "images" / "7").mkdir(parents=True)
    (folder / "demo-work" / "images" / "7" / "left_over.jpg").write_bytes(b"x")
    (folder / "demo-work" / "mine.txt").write_text("keep me")
    # An environment that was not made by scripts/setup.sh is not touched by a test: then it is only the demo itself.
    is_set_up = any((REPOSITORY / ".venv" / f"setup-{profile}").exists() for profile in ("all", "demo"))
    by_hand = "{0} -m pipeline.demo && {0} -m pipeline.cli run examples/demo.toml --workdir demo-work"
    command = ["make", "demo"] if is_set_up else ["sh", "-c", by_hand.format(sys.executable)]
    # The outer make's own variables would reach the inner one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (folder / "demo-work" / "runs").iterdir()
    return Demo(folder, done.stdout, done.stderr, run)
