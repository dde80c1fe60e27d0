"""A nonce is read back where storage is shared, and names the place and the host where it is not."""

from __future__ import annotations

import json
import os
import shutil
import socket
from dataclasses import asdict
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.reach import REACH, check_nonce, planted
from shardmill.stores import open_store
from shardmill.values import Nonce
from tests.services.faulty_store import FaultyStore


def test_a_nonce_is_read_back_and_leaves_nothing(tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    with planted(store) as nonce, planted(store) as of_another_driver:
        check_nonce(Nonce(**json.loads(json.dumps(asdict(nonce)))))
        assert {file.path for file in store.list("")} == {nonce.path, of_another_driver.path}
    assert list(store.list("")) == []


def test_what_a_killed_driver_left_goes_after_a_day_and_a_cleanup_that_fails_hides_no_cause(tmp_path: Path):
    store = open_store(tmp_path / "dataset")
    for name in ("old", "young"):
        store.put(f"{REACH}/{name}", b"left")
    os.utime(tmp_path / "dataset" / REACH / "old", (1, 1))
    with pytest.raises(ZeroDivisionError), planted(store) as nonce:
        assert {file.path for file in store.list(REACH)} == {f"{REACH}/young", nonce.path}
        (tmp_path / "dataset" / nonce.path).unlink()
        (tmp_path / "dataset" / nonce.path).mkdir()
        raise ZeroDivisionError


def test_a_host_with_another_folder_of_that_name_is_named_with_the_folder(tmp_path: Path):
    root = tmp_path / "models"
    with planted(open_store(root)) as nonce:
        shutil.rmtree(root)
        with pytest.raises(UsageError, match=f"{socket.gethostname()} does not share {root}") as caught:
            check_nonce(nonce)
        assert "s3://" in str(caught.value)
        (root / nonce.path).parent.mkdir(parents=True)
        (root / nonce.path).write_text("of another run")
        with pytest.raises(UsageError, match="does not share"):
            check_nonce(nonce)


def test_who_is_interrupted_as_the_nonce_is_written_leaves_none(tmp_path: Path, faulty):
    def interrupted(store: FaultyStore, path: str, data: bytes) -> None:
        store.sound.put(path, data)
        raise KeyboardInterrupt

    faulty["put"] = interrupted
    with pytest.raises(KeyboardInterrupt), planted(open_store(f"faulty://{tmp_path}")):
        raise AssertionError("nothing may run")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
