"""What `--help` shows."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pipeline.cli import app


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("predict", "predict [OPTIONS] MODEL IMAGE..."),
        ("train", "train [OPTIONS] DATASET[@N]"),
        ("report", "report [OPTIONS] [SOURCE_OR_CONFIG]"),
        ("init", "init [OPTIONS] [FILE]"),
    ],
)
def test_help_names_arguments_without_braces(command: str, usage: str):
    shown = CliRunner().invoke(app, [command, "--help"]).output
    assert f"{usage} " in shown and "{" not in shown, shown
