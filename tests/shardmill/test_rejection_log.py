"""Many rejections are on disk while a build runs, and in several segments of its ledger; their readers see one list."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from shardmill.dataset.ledger import ledger_digest, read_rejections, write_ledger
from shardmill.dataset.open import open_dataset
from shardmill.dataset.rejection_log import RejectionLog
from shardmill.dataset.verify import verify_dataset
from shardmill.ids import add_digests, key_bytes, key_hash
from shardmill.stores import open_store
from shardmill.values import Rejection, RejectReason
from tests.etl.building import ETL
from tests.lab.datasets import build_here, write_images


def few_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmill.dataset.rejection_log.MAX_WAITING", 7)
    monkeypatch.setattr("shardmill.dataset.rejection_log.ROW_GROUP_ROWS", 3)
    monkeypatch.setattr("shardmill.dataset.ledger.SEGMENT_ROWS", 5)


def test_a_log_is_a_sorted_list_of_what_was_added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    few_in_memory(monkeypatch)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    names = {rng.randbytes(3).decode("utf-8", "surrogateescape") for _ in range(100)}
    reasons = list(RejectReason)
    rejections = [Rejection(name, rng.choice(reasons), f"no. {place}", place) for place, name in enumerate(names)]
    log = RejectionLog(tmp_path, rejections[:30])
    assert list(log) == sorted(rejections[:30], key=lambda each: key_bytes(each.key))
    log.add(rejections[30:])
    for _ in range(2):
        assert list(log) == sorted(rejections, key=lambda each: key_bytes(each.key))
    assert len(log) == len(rejections) and log.by_reason == Counter(each.reason for each in rejections)
    assert log.digest == ledger_digest(rejections)
    assert log.key_sum == add_digests(*(key_hash(each.key) for each in rejections))
    assert len(write_ledger(open_store(tmp_path), log)) == -(-len(rejections) // 5)


def test_a_version_of_many_rejections_is_that_of_a_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=30)
    for number in range(9):
        (tmp_path / "images" / "class_0" / f"broken{number}.jpg").write_bytes(b"<html>not found</html>")
        (tmp_path / "images" / "class_1" / f"note{number}.txt").write_text("a note")
    etl = ETL.model_copy(update={"max_reject_fraction": 1.0, "formats": ("parquet",)})
    in_memory = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "in_memory"), etl))
    few_in_memory(monkeypatch)
    on_disk = open_dataset(build_here(str(tmp_path / "images"), str(tmp_path / "on_disk"), etl))
    assert [len(each.manifest.ledger_segments) for each in (in_memory, on_disk)] == [1, 4]
    ours, theirs = (list(read_rejections(each.store, each.manifest)) for each in (in_memory, on_disk))
    assert ours == theirs and len(ours) == 18
    assert in_memory.manifest.ledger_digest == on_disk.manifest.ledger_digest
    assert in_memory.manifest.counts == on_disk.manifest.counts
    assert in_memory.manifest.source == on_disk.manifest.source
    verify_dataset(on_disk, deep=True).raise_if_failed()
