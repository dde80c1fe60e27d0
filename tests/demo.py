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


def _fingerprint() -> str:
    """Of what scripts/setup.sh has installed from, as it computes it."""
    script = (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    [line] = [line for line in script.splitlines() if line.startswith("fingerprint=")]
    command = line.removeprefix("fingerprint=$(").removesuffix(")").replace('"$0"', "scripts/setup.sh")
    return subprocess.run(
        command, shell=True, cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout.strip()


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
    # An environment that scripts/setup.sh would change is not touched by a test: then it is only the demo itself.
    marks = [REPOSITORY / ".venv" / f"setup-{profile}" for profile in ("all", "demo")]
    is_set_up = any(mark.exists() and mark.read_text().strip() == _fingerprint() for mark in marks)
    by_hand = "{0} -m pipeline.demo && {0} -m pipeline.cli run examples/demo.toml --workdir demo-work"
    command = ["make", "demo"] if is_set_up else ["sh", "-c", by_hand.format(sys.executable)]
    # The outer make's own variables would reach the inner one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    [run] = (folder / "demo-work" / "runs").iterdir()
    return Demo(folder, done.stdout, done.stderr, run)
