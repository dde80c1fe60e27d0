"""The commands over a dataset's versions: what they print, and how they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardmill.dataset.leases import writing
from shardmill.dataset.open import open_dataset
from shardmill.stores import open_store
from tests.lab.commands import in_process, last_line
from tests.lab.datasets import make_dataset


@pytest.fixture
def dataset(tmp_path: Path) -> str:
    return make_dataset(tmp_path, num_images=120)


def machine(*arguments: str, cwd: Path) -> Any:
    done = in_process(*arguments, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_compact_says_what_it_made_and_when_there_was_nothing_to_do(dataset: str, tmp_path: Path):
    first = machine("compact", dataset, cwd=tmp_path)
    assert (first["version"], first["is_new"]) == (2, True)
    assert first["num_shards_after"] < first["num_shards_before"]
    assert first["content_digest"] == open_dataset(f"{dataset}@1").manifest.content_digest
    again = machine("compact", dataset, cwd=tmp_path)
    assert (again["version"], again["is_new"], again["num_rows_copied"]) == (2, False, 0)
    refused = in_process("compact", f"{dataset}@1", cwd=tmp_path)
    assert refused.returncode == 2 and "names one version" in last_line(refused)


def test_inspect_shows_what_a_person_asks_and_with_all_the_digests(dataset: str, tmp_path: Path):
    rows = [line.split("\t") for line in in_process("inspect", dataset, cwd=tmp_path).stdout.splitlines()[1:]]
    counts = machine("inspect", dataset, cwd=tmp_path)["counts"]
    names = [name for name, *_ in rows]
    assert names[0] == "images" and f"{counts['accepted']} accepted" in rows[0][1]
    assert names[1].startswith("in ") and {"classes", "size", "stored"} < set(names[:8])
    assert any(name.startswith("class ") and " train" in row[0] for name, *row in rows) and len(rows) < 20
    everything = in_process("inspect", dataset, "--all", cwd=tmp_path).stdout.splitlines()[1:]
    assert [line.partition("\t")[0] for line in everything[-2:]] == ["content_digest", "layout_digest"]


def test_gc_lists_first_and_deletes_when_told(dataset: str, tmp_path: Path):
    machine("compact", dataset, cwd=tmp_path)
    young = machine("gc", dataset, "--keep", "1", cwd=tmp_path)
    assert (young["expired_versions"], young["num_files"]) == ([], 0)
    listed = machine("gc", dataset, "--keep", "1", "--older-than", "0", cwd=tmp_path)
    assert (listed["expired_versions"], listed["deleted"]) == ([1], False)
    assert all(Path(dataset, file["path"]).exists() for file in listed["files"]) and listed["num_files"]
    done = in_process("gc", dataset, "--keep", "1", "--older-than", "0s", "--delete", cwd=tmp_path)
    assert done.returncode == 0 and "expired\t1" in done.stdout, done.stderr
    assert not any(Path(dataset, file["path"]).exists() for file in listed["files"])
    refused = in_process("inspect", f"{dataset}@1", cwd=tmp_path)
    assert refused.returncode == 2 and "@1 has expired" in last_line(refused)
    assert in_process("verify", dataset, "--deep", cwd=tmp_path).returncode == 0


def test_gc_ends_with_6_beside_a_writer(dataset: str, tmp_path: Path):
    with writing(open_store(dataset), "etl"):
        refused = in_process("gc", dataset, "--delete", cwd=tmp_path)
    assert refused.returncode == 6 and "is at work" in last_line(refused)


@pytest.mark.parametrize("age", ["7", "soon", "-1d", "1w"])
def test_an_age_needs_a_unit(dataset: str, tmp_path: Path, age: str):
    refused = in_process("gc", dataset, f"--older-than={age}", cwd=tmp_path)
    assert refused.returncode == 2 and "expected a number with a unit" in last_line(refused)


def test_rollback_and_the_versions_that_inspect_lists(dataset: str, tmp_path: Path):
    machine("compact", dataset, cwd=tmp_path)
    done = machine("rollback", f"{dataset}@1", cwd=tmp_path)
    assert done == {"uri": dataset, "version": 3, "restored_version": 1, "is_new": True}
    assert not machine("rollback", f"{dataset}@1", cwd=tmp_path)["is_new"]
    machine("gc", dataset, "--keep", "1", "--older-than", "0", "--delete", cwd=tmp_path)
    listed = machine("inspect", dataset, "--versions", cwd=tmp_path)
    found = [(each["version"], each["operation"], each["parent_version"], each["is_expired"]) for each in listed]
    assert found == [
        (4, "expire", 3, False),
        (3, "rollback", 2, False),
        (2, "compact", 1, True),
        (1, "full", None, False),
    ]
    assert {each["num_accepted"] for each in listed} == {120}
    shown = in_process("inspect", dataset, "--versions", cwd=tmp_path).stdout
    assert "3\trollback to 1\t120 images" in shown and "2\tcompact after 1" in shown
    refused = in_process("rollback", dataset, cwd=tmp_path)
    assert refused.returncode == 2 and "names no version; expected DATASET@N" in last_line(refused)


def test_inspect_tells_two_versions_apart(dataset: str, tmp_path: Path):
    assert "no row was added" in in_process("inspect", dataset, "--diff", "1", cwd=tmp_path).stdout
    (tmp_path / "images" / "class_0" / "00003.png").unlink()
    make_dataset(tmp_path, num_images=0)
    found = machine("inspect", f"{dataset}@2", "--diff", "1", cwd=tmp_path)
    assert [(each["change"], each["source"], each["after"]) for each in found["rows"]] == [
        ("removed", "class_0/00003.png", None)
    ]
    assert [(each["change"], each["class_name"], each["num_rows"]) for each in found["counts"]] == [
        ("removed", "class_0", 1)
    ]
    assert "removed\tclass_0/00003.png" in in_process("inspect", dataset, "--diff", "1", cwd=tmp_path).stdout
    refused = in_process("inspect", dataset, "--diff", "1", "--files", cwd=tmp_path)
    assert refused.returncode == 2 and "exclude each other" in last_line(refused)


def test_gc_of_a_models_folder_lists_its_exports_and_trainings(tmp_path: Path):
    left = tmp_path / "models" / "trainings" / ".tmp-1"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    (tmp_path / "models" / "exports").mkdir()
    whole = tmp_path / "models" / "trainings" / "0" / "note"
    whole.parent.mkdir()
    whole.write_bytes(b"1")
    listed = machine("gc", "models", "--older-than", "0", cwd=tmp_path)
    assert (listed["deleted"], listed["expired_exports"], listed["expired_trainings"]) == (False, [], [])
    assert {each["kind"] for each in listed["files"]} == {"unpublished"} and left.exists()
    done = in_process("gc", "models", "--older-than", "0", "--delete", cwd=tmp_path)
    assert done.returncode == 0 and "exports that went" in done.stdout, done.stderr
    assert not left.exists() and whole.exists()
