"""What ranks print is gathered in the run's folder, each line with its rank, and bounded."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path

from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.stores import open_store
from train.launching.output import MAX_LINE_BYTES, MAX_TOLD_BYTES, NUM_TAIL_LINES, RankOutput
from train.rank_output import RanksLog
from train.run_log import RunLog
from train.values import OUTPUT


def read(data: bytes) -> tuple[str, str]:
    """-> what is told of a process that prints this, the end that is kept."""
    told: list[str] = []
    output = RankOutput(io.BufferedReader(io.BytesIO(data)), told.append)  # pyright: ignore[reportArgumentType]
    output.read()
    assert all(text.endswith("\n") for text in told)
    return "".join(told), output.tail()


def test_lines_are_told_whole_and_the_last_ones_kept():
    assert read(b"") == ("", "")
    assert read(b"one\ntwo\nno end") == ("one\ntwo\nno end\n", "one\ntwo\nno end")
    told, tail = read(b"".join(b"line %d \xff\n" % number for number in range(100_000)))
    assert told.count("\n") == 100_000 and "line 99999 \ufffd" in told
    assert tail.splitlines() == [f"line {number} \ufffd" for number in range(100_000)][-NUM_TAIL_LINES:]


def test_what_never_ends_takes_little():
    told, tail = read(b"x" * (10 << 20) + b"y")
    assert told == f"{tail}\n" and len(tail) == MAX_LINE_BYTES and tail.endswith("xy")
    told, tail = read(b"a line\n" * (MAX_TOLD_BYTES // 7 + 1000) + b"the last\n")
    assert MAX_TOLD_BYTES - 10 < len(told) < MAX_TOLD_BYTES + 100 and told.endswith("bytes: the rest is left out)\n")
    assert tail.endswith("a line\nthe last")


def test_lines_have_their_rank_and_no_secret_and_attempts_add_up(tmp_path: Path):
    names: list[str] = []

    class Names(SilentObserver):
        def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
            names.append(name)

    for attempt in range(2):
        log = RunLog(Names(), [RanksLog(open_store(tmp_path), "run/ranks.log")])
        log.event(OUTPUT, {"rank": 1, "text": f"attempt {attempt}\nof two\n"})
        log.event(OUTPUT, {"rank": 0, "text": "s3://user:password@host/x\n"})
        log.event("other", {})
        log.close()
    lines = (tmp_path / "run" / "ranks.log").read_text().splitlines()
    assert lines[:2] == ["rank 1: attempt 0", "rank 1: of two"] and lines[3:5] == [
        "rank 1: attempt 1",
        "rank 1: of two",
    ]
    assert lines[2] == lines[5] and lines[2].startswith("rank 0: s3://") and "password" not in lines[2]
    assert set(names) == {"train.other"}, "no log of events holds what ranks print"
    assert os.listdir(tmp_path) == ["run"]
