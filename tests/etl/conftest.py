"""The images of the tests of the ETL."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lab.datasets import write_images


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder that holds `images`: 160 of them, one file that is none, and one with no image's name."""
    folder = tmp_path
    write_images(folder / "images", num_images=160)
    (folder / "images" / "class_0" / "broken.jpg").write_bytes(b"<html>not found</html>")
    (folder / "images" / "class_0" / ".DS_Store").write_bytes(b"x")
    return folder
