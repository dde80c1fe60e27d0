"""Numbered records in words."""

from __future__ import annotations

from pathlib import Path

import pytest

from shardmill.errors import UsageError
from tests.train.test_garbage import export
from train.published.exported import read_export
from train.records import numbers_in_words


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2, 3, 5, 8, 9], "1 to 3, 5, 8 to 9"),
        (list(range(1, 41, 2)), "..., 25, 27, 29, 31, 33, 35, 37, 39"),
    ],
)
def test_numbers_are_reported_as_ranges(numbers: list[int], words: str):
    assert numbers_in_words(numbers) == words


def test_an_export_that_is_gone_is_not_among_those_that_are_reported(tmp_path: Path):
    for number in (1, 2, 5):
        export(tmp_path, number)
    with pytest.raises(UsageError, match="has no export 3; it has 1 to 2, 5; "):
        read_export(str(tmp_path), 3)
