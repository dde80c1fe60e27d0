"""Names and messages beyond ASCII: under a locale without them, and on streams that cannot hold them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.lab.commands import BIN, ENVIRONMENT, ROOT
from tests.lab.datasets import write_images

# Python turns its UTF-8 mode on by itself in the locale C, unless it is told not to.
IN_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
ETL = ["shardmill", "etl"]
OTHERS = [["shardmill", "run"], [sys.executable, str(ROOT / "etl" / "job.py"), "--config"]]


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(BIN / "shardmill") if arguments[0] == "shardmill" else arguments[0], *arguments[1:]],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "", **environment},
        capture_output=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locale") / "sp äce"
    write_images(folder / "bil der", num_images=40, num_classes=2)
    os.rename(folder / "bil der" / "class_0", folder / "bil der" / "kätzchen")
    (folder / "bil der" / "kätzchen" / "größe.jpg").write_bytes(b"no image")
    (folder / "fö.toml").write_text(
        '[source]\nuri = "bil der"\n[dataset]\nuri = "dö"\n[models]\nuri = "mö"\n'
        "[etl]\nimage_size = 16\n[train]\nepochs = 1\n",
        encoding="utf-8",
    )
    return folder


def run_in(workdir: str, command: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    """The summary of a command on the folder's images, with its dataset in `workdir`."""
    done = run(
        [*command, "fö.toml", "--workdir", workdir, "--run-id", "rün", "--set", f"dataset.uri={workdir}/dä"],
        folder, **environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert "\\x" not in done.stderr.decode() and "\\udc" not in done.stderr.decode()
    return json.loads((folder / workdir / "runs/rün/summary.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def digest_under_utf_8(folder: Path) -> str:
    """Of the dataset, which is the same whatever builds it."""
    return run_in("wö rk utf-8", ETL, folder, LC_ALL="C.UTF-8")["dataset"]["content_digest"]


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "command", [ETL, *(pytest.param(each, marks=pytest.mark.drill) for each in OTHERS)], ids=["etl", "run", "job"]
)
def test_a_locale_without_umlauts_changes_nothing(
    folder: Path, command: list[str], request: pytest.FixtureRequest, digest_under_utf_8: str
):
    """Dataset, summary, events, report, console: as under UTF-8."""
    workdir = f"wö rk {request.node.callspec.id} ascii"
    summary = run_in(workdir, command, folder, **IN_ASCII)
    assert summary["dataset"]["content_digest"] == digest_under_utf_8
    assert summary["dataset"]["counts"]["rejected"] == 1
    assert summary["dataset"]["uri"] == str(folder / workdir / "dä")
    events = (folder / workdir / "runs/rün/events.jsonl").read_text("utf-8").splitlines()
    assert any(event.get("dataset") == summary["dataset"]["uri"] for event in map(json.loads, events))
    if "run" in command:
        assert "kätzchen" in (folder / workdir / "runs/rün/report.html").read_text("utf-8")
    shown = run(["shardmill", "inspect", f"{workdir}/dä", "--rejects"], folder, **IN_ASCII)
    assert "kätzchen/größe.jpg" in shown.stdout.decode("utf-8")


@pytest.mark.starts("program")
def test_a_failure_names_its_path(folder: Path):
    done = run(["shardmill", "etl", "nirgendwö.toml"], folder, **IN_ASCII)
    assert done.returncode == 2 and "nirgendwö.toml" in done.stderr.decode("utf-8").splitlines()[-1]


@pytest.mark.starts("program")
def test_a_stream_of_another_encoding_gets_escapes(folder: Path):
    done = run(["shardmill", "etl", "nirgendwö.toml"], folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and b"nirgendw\\xf6.toml" in done.stderr
    done = run(["shardmill", "check-source", "bil der"], folder, PYTHONIOENCODING="ascii:strict")
    assert b"k\\xe4tzchen" in done.stdout + done.stderr and b"ERROR 1" not in done.stderr


@pytest.mark.starts("program")
def test_python_that_does_not_take_utf_8_is_one_line(folder: Path):
    command = [sys.executable, "-X", "utf8=0", "-m", "pipeline.cli", "inspect", "nö"]
    done = run(command, folder, LC_ALL="C")
    [line] = done.stderr.decode().splitlines()
    assert (
        done.returncode == 2 and line.startswith("ERROR 2: Python decodes file names as ") and "LC_ALL=C.UTF-8" in line
    )
