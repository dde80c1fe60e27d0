"""The output of ranks is collected in the run's folder, each line with its rank, and bounded."""

from __future__ import annotations

import io
import json
import os
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.stores import open_store
from train.contracts.values import OUTPUT
from train.launching.output import MAX_LINE_BYTES, MAX_TOLD_BYTES, NUM_TAIL_LINES, RankOutput, gathered
from train.reporting.observer import GlobalStep
from train.reporting.rank_output import RanksLog
from train.reporting.run_log import RunLog


def read(data: bytes) -> tuple[str, str]:
    """-> what is told of a process that prints this, the end that is kept."""
    told: list[str] = []
    output = RankOutput(io.BufferedReader(io.BytesIO(data)), told.append)  # pyright: ignore[reportArgumentType]
    output.read()
    assert all(text.endswith("\n") for text in told)
    return "".join(told), output.tail()


def test_lines_are_reported_whole_and_the_last_ones_kept():
    assert read(b"") == ("", "")
    assert read(b"one\ntwo\nno end") == ("one\ntwo\nno end\n", "one\ntwo\nno end")
    told, tail = read(b"".join(b"line %d \xff\n" % number for number in range(100_000)))
    assert told.count("\n") == 100_000 and "line 99999 \ufffd" in told
    assert tail.splitlines() == [f"line {number} \ufffd" for number in range(100_000)][-NUM_TAIL_LINES:]


def test_what_never_ends_takes_little():
    told, tail = read(b"x" * (10 << 20) + b"y")
    assert told == f"{tail}\n" and len(tail) == MAX_LINE_BYTES and tail.endswith("xy")
    told, tail = read(b"a line\n" * (MAX_TOLD_BYTES // 7 + 1000) + b"the last\n")
    assert MAX_TOLD_BYTES - 10 < len(told) < MAX_TOLD_BYTES + 100 and told.endswith("bytes; truncated)\n")
    assert tail.endswith("a line\nthe last")


class Told:
    """An observer that prints as a driver does, and keeps what it is told that ranks print."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def step(self, step: GlobalStep) -> None:
        print("progress of the driver")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        print(f"the driver's event {name}")
        if name == OUTPUT:
            self.texts.append(str(fields["text"]))


def test_what_is_printed_here_goes_to_stderr_and_is_reported(capsys):
    told, before = Told(), (sys.stdout, sys.stderr)
    kept: list[TextIO] = []
    with pytest.raises(ValueError, match="the model's"), gathered(told) as observer:
        kept += [sys.stdout, sys.stderr]
        print("one", 1)
        assert not told.texts, "nobody who prints calls the observer"
        thread = threading.Thread(target=lambda: sys.stderr.writelines(["of a thread\n", "no end"]))
        thread.start()
        thread.join()
        observer.event("resumed", {"rank": 0})
        assert "".join(told.texts) == "one 1\nof a thread\n"
        assert (sys.stdout.isatty(), sys.stdout.encoding) == (before[1].isatty(), before[1].encoding)
        raise ValueError("the model's")
    assert "".join(told.texts) == "one 1\nof a thread\nno end\n"
    assert (sys.stdout, sys.stderr) == before
    # A handler of the user's that has kept a stream writes on.
    kept[0].write("later\n")
    out, err = capsys.readouterr()
    assert set(out.splitlines()) == {"the driver's event output", "the driver's event resumed"}
    assert err.splitlines()[0] == "one 1" and err.endswith("later\n")
    assert "of a thread\nno end" in err and "the driver" not in err and "later" not in "".join(told.texts)


def test_what_never_ends_takes_little_here_too(capsys):
    told = Told()
    with gathered(told) as observer:
        for _ in range(MAX_TOLD_BYTES // 7 + 1000):
            print("a line")
        observer.event("resumed", {"rank": 0})
        print("the last")
    text = "".join(told.texts)
    assert MAX_TOLD_BYTES - 10 < len(text) < MAX_TOLD_BYTES + 100 and text.endswith("bytes; truncated)\n")
    assert "the last\n" in capsys.readouterr().err


def test_a_run_in_the_commands_own_process_has_its_log(tiny_uri, tmp_path):
    settings = {"model": "tests.train.launch_models:chatty", "epochs": 1, "launcher": "inline"}
    given = [f"--set=train.{name}={value}" for name, value in settings.items()]
    places = [f"--set=models.uri={tmp_path}/models", f"--workdir={tmp_path}/work", "--run-id=r"]
    done = CliRunner().invoke(app, ["train", tiny_uri, "--json", *given, *places])
    assert done.exit_code == 0 and "the first layer is built" in done.stderr, done.output
    assert json.loads(done.stdout)["stage"] == "train", "a program reads stdout"
    assert (tmp_path / "work/runs/r/ranks.log").read_text() == "rank 0: the first layer is built\n"


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
