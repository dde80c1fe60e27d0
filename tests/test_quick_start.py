"""Test processes hide the packages that slow down Keras from their first line, and only for Keras."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

IMPORTER = """
try:
    import {name} as found
except ImportError as error:
    found = error.name
"""


@pytest.mark.starts("program")
@pytest.mark.parametrize("name", ["sklearn", "matplotlib"])
def test_keras_alone_does_not_find_what_it_imports_for_wrappers_and_plots(tmp_path: Path, name: str):
    for package in ("keras", "other", name):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for package in ("keras", "other"):
        (tmp_path / package / "plots.py").write_text(IMPORTER.format(name=name))
    code = "import keras.plots, other.plots; print(keras.plots.found, other.plots.found)"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    hidden, found = done.stdout.split(" ", 1)
    assert hidden == name and found.startswith("<module")
