"""Keys of JSON lines that first occur far behind: a large table gives what a small one does, or says why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from etl.config import SourceConfig
from etl.sources import table_rows
from shardmill.errors import UsageError
from tests.etl.building import images_of, list_images

VALUES = {"split": "test", "group": "g", "label": "cat", "key": "k", "size_bytes": 5, "mtime_ns": 5}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 100)


def table(tmp_path: Path, last: dict[str, Any], first: dict[str, Any] | None = None) -> SourceConfig:
    rows = [{"uri": f"{row}.jpg", **(first or {})} for row in range(20)] + [{"uri": "20.jpg", **last}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table")


@pytest.mark.parametrize("name", VALUES)
def test_a_key_that_comes_late_is_not_ignored(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=rf"row 21 of the table t\.jsonl is the first with the key '{name}'") as caught:
        list_images(table(tmp_path, {name: VALUES[name]}))
    assert "write it in the first row too" in caught.value.fix
    assert (f"set source.{name}_field={name}" in caught.value.fix) == ("_" not in name)


@pytest.mark.parametrize("name", ["split", "group", "label", "key"])
@pytest.mark.parametrize("is_named", [True, False], ids=["in the config", "in the first row"])
def test_a_column_that_the_config_or_the_first_row_names_may_come_late(name: str, is_named: bool, tmp_path: Path):
    source = table(tmp_path, {name: VALUES[name]}, first=None if is_named else {name: None})
    if is_named:
        source = source.model_copy(update={f"{name}_field": name})
    listing = list_images(source)
    [last] = [image for image in images_of(listing) if image.place == 21]
    found = {"split": last.split, "label": last.label, "key": last.key.rpartition("\0")[2], "group": "g"}
    assert found[name] == VALUES[name]
    # As in a table whose rows lack a value: a label and a key are needed, a split and a group are not.
    assert len(listing.rejections) == (20 if name in ("label", "key") else 0)


def test_a_column_of_the_config_that_no_row_has_is_no_column(tmp_path: Path):
    source = table(tmp_path, {"split": "test"}).model_copy(update={"split_field": "splt"})
    with pytest.raises(UsageError, match="source.split_field = 'splt' is not a column; .*did you mean 'split'"):
        list_images(source)


def test_a_better_name_for_the_same_column_is_not_taken_halfway(tmp_path: Path):
    with pytest.raises(UsageError, match="row 21 .* is the first with the key 'label'"):
        list_images(table(tmp_path, {"label": "cat", "class": "cat"}, first={"class": "dog"}))
    with pytest.raises(UsageError, match="row 21 .* is the first with the key 'uri'"):
        (tmp_path / "t.jsonl").write_text('{"path": "a.jpg"}\n' * 20 + '{"path": "b.jpg", "uri": "c.jpg"}\n')
        list_images(SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table"))


def test_a_key_without_values_changes_nothing(tmp_path: Path):
    assert list_images(table(tmp_path, {"split": None, "label": None, "more": 1})).num_images == 21


def test_a_late_key_that_is_named_like_one_of_ours_is_reported(tmp_path: Path):
    [warning] = list_images(table(tmp_path, {"splt": "test"})).warnings
    assert "its column 'splt' is ignored" in warning
    with pytest.raises(UsageError, match="category"):
        list_images(table(tmp_path, {"category": "cat"}))
