"""Logs that grow: on stores that can append and that cannot, and while a store refuses them."""

from __future__ import annotations

import json
import resource
import tracemalloc
from pathlib import Path

import pytest

from shardmill.errors import StorageError
from shardmill.jobs.line_log import GrowingFile, LineLog, open_to_append, read_lines, replace_lines
from shardmill.stores import open_store


def test_line_logs_on_a_store_without_append(s3_bucket: str):
    store, path = open_store(f"{s3_bucket}/logs"), "runs/r/events.jsonl"

    def numbers() -> list[int]:
        return [json.loads(line)["n"] for line in read_lines(store, path)]

    now = [0.0]
    log = LineLog(store, path, clock=lambda: now[0])
    log.append({"n": 1})
    assert numbers() == [1]
    log.append({"n": 2})
    assert numbers() == [1]
    # What is flushed outlives this process, line by line, though the object is not written again.
    for number in (3, 4):
        log.flush()
        assert numbers() == list(range(1, number))
        log.append({"n": number})
    assert len(list(store.list(f"{path}.parts"))) == 2 and len(store.read(path).splitlines()) == 1
    # Killed here: 4 was never flushed. The next log goes on behind what is there, and its object holds the parts.
    again = LineLog(store, path, clock=lambda: now[0])
    assert numbers() == [1, 2, 3]
    again.append({"n": 5})
    assert numbers() == [1, 2, 3, 5] and not list(store.list(f"{path}.parts"))
    again.append({"n": 6})
    again.flush()
    now[0] = 10.0
    again.append({"n": 7})
    again.append({"n": 8})
    assert numbers() == [1, 2, 3, 5, 6, 7]
    # A rewrite that was cut off before it deleted the parts.
    store.put(f"{path}.parts/{8:015d}", b'{"n": 2}\n')
    assert numbers() == [1, 2, 3, 5, 6, 7]
    again.close()
    assert numbers() == [1, 2, 3, 5, 6, 7, 8] and [file.path for file in store.list("")] == [path]
    replace_lines(store, path, read_lines(store, path)[:2])
    assert numbers() == [1, 2]


def test_a_log_on_a_disk_that_is_full_for_a_while_is_whole_afterwards(tmp_path: Path):
    said: list[str] = []
    log = LineLog(open_store(tmp_path), "events.jsonl", warn=said.append)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (30, hard))
        # The fourth line is written in part.
        for number in range(6):
            log.append({"n": number})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert len(said) == 1 and "events.jsonl cannot be written; it will be retried: no space to write" in said[0], said
    log.append({"n": 6})
    log.close()
    assert [json.loads(line)["n"] for line in (tmp_path / "events.jsonl").read_bytes().splitlines()] == list(range(7))
    assert len(said) == 1


def test_a_log_that_a_store_refuses_at_the_end_says_so(s3_server: str):
    said: list[str] = []
    log = LineLog(open_store("s3://nobody-made-this/x"), "events.jsonl", warn=said.append)
    log.append({"n": 1})
    log.close()
    assert ["cannot be written; it will be retried" in said[0], "events.jsonl misses its last lines" in said[1]] == [
        True,
        True,
    ]


def test_a_place_that_takes_no_folder_is_named():
    with pytest.raises(StorageError, match="cannot access /proc/work/events.jsonl: no folder can be created there"):
        open_to_append(Path("/proc/work/events.jsonl"))


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path):
    (tmp_path / "events.jsonl").write_bytes(b'{"n": 1}\n{"n":')
    assert read_lines(open_store(tmp_path), "events.jsonl") == [b'{"n": 1}\n']


def test_what_is_in_a_local_file_is_not_held_in_memory(tmp_path: Path):
    log = GrowingFile(open_store(tmp_path), "log")
    tracemalloc.start()
    try:
        for _ in range(50):
            log.append(bytes(1_000_000))
        log.close()
        assert tracemalloc.get_traced_memory()[0] < 10_000_000
    finally:
        tracemalloc.stop()
    assert (tmp_path / "log").stat().st_size == 50_000_000
