"""One tiny dataset for all training tests."""

from __future__ import annotations

import pytest

from tests.support import make_dataset


@pytest.fixture(scope="session")
def tiny_uri(tmp_path_factory) -> str:
    """120 images of 16 x 16 in 3 classes, in both formats, with all three splits."""
    return make_dataset(tmp_path_factory.mktemp("tiny"))
