"""The output of `--help`."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from pipeline.cli import COMMANDS, app


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


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_shows_the_help_of_its_entry(name: str):
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert " ".join(COMMANDS.entry(name).help.split()) in " ".join(shown.output.split())
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    assert f" {name} " in listed
