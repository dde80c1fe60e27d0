"""The commands over a dataset's versions: what they print, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.open import open_dataset
from tests.pipeline.command import last_line, shardmill
from tests.support import make_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return make_dataset(tmp_path, num_images=120)


def machine(*arguments: str, cwd: Path) -> Any:
    done = shardmill(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compact_says_what_it_made_and_when_there_was_nothing_to_do(dataset: str, tmp_path: Path):
    first = machine("compact", dataset, cwd=tmp_path)
    assert (first["version"], first["is_new"]) == (2, True)
    assert first["num_shards_after"] < first["num_shards_before"]
    assert first["content_digest"] == open_dataset(f"{dataset}@1").manifest.content_digest
    again = machine("compact", dataset, cwd=tmp_path)
    assert (again["version"], again["is_new"], again["num_rows_copied"]) == (2, False, 0)
    refused = shardmill("compact", f"{dataset}@1", cwd=tmp_path)
    assert refused.returncode == 2 and "names one version" in last_line(refused)
