"""The stage runner and what a run leaves: stage records, one summary, line logs; whole whenever the run ended."""

from __future__ import annotations

import json
import multiprocessing
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import jsonschema
import pytest

from pipeline.cli_options import Common
from pipeline.output.progress import RunProgress
from pipeline.running import SUMMARY_SECTIONS, WHOLE_PIPELINE, open_run
from shardmill.errors import CommitConflict, IntegrityError, ShardmillError, UsageError
from shardmill.jobs.observer import Observer
from shardmill.jobs.process import Terminated
from shardmill.jobs.run_files import (
    PARTIAL,
    StageRecord,
    latest_run,
    new_run_id,
    read_run_state,
    read_stage_record,
    read_stage_records,
    write_stage_record,
    write_summary,
)
from shardmill.jobs.run_job import run_job
from shardmill.jobs.run_record import RunRecord, recording
from tests.lab.commands import SUMMARY_SCHEMA


def summary_on_disk(folder: Path) -> dict:
    summary = json.loads((folder / "runs/r/summary.json").read_text())
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    return summary


def do_stage(record: RunRecord, name: str, **fields: object) -> None:
    record.stage(name, lambda: None, lambda _: StageRecord(stage=name, **fields))


def test_a_stage_gives_its_value_to_the_next_one(tmp_path: Path):
    with recording(RunRecord(str(tmp_path), "r")) as record:
        number = record.stage("one", lambda: 41, lambda value: StageRecord(stage="one", detail={"value": value}))
        assert record.stage("two", lambda: number + 1, lambda _: StageRecord(stage="two", status="skipped")) == 42
    first, second = read_stage_records(tmp_path, "r")
    assert (first.stage, first.detail, second.status) == ("one", {"value": 41}, "skipped")
    assert record.ended == [first, second] and 0 < first.started <= second.started
    events = [json.loads(line) for line in (tmp_path / "runs/r/events.jsonl").read_text().splitlines()]
    assert [each["event"] for each in events] == ["stage.started", "stage.ended"] * 2 + ["run.ended"]


def test_warnings_are_said_and_stay_with_their_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = RunRecord(str(tmp_path), "r")
    progress = RunProgress(record, num_epochs=12)

    def work() -> None:
        progress.event("etl.warning", {"warning": "few \x1b[2J images"})
        progress.event("train.resumed", {"epoch": 2, "step": 4, "rank": 0})

    record.stage("etl", work, lambda _: StageRecord(stage="etl"))
    do_stage(record, "train")
    summary = record.close()
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    assert list(summary["warnings"]) == ["etl"] and len(summary["warnings"]["etl"]) == 1
    said = capsys.readouterr().err
    # People count from 1, and a name cannot command their terminal.
    assert r"WARNING: few \x1b[2J images" in said and "resuming at epoch 3/12, step 5" in said


def test_the_latest_run_is_one_that_did_something(tmp_path: Path):
    for run_id in ("r", "mistyped"):
        with recording(RunRecord(str(tmp_path), run_id)) as record:
            if run_id == "r":
                do_stage(record, "etl")
    assert latest_run(tmp_path) == "r"
    with pytest.raises(UsageError, match="no run below"):
        latest_run(tmp_path / "elsewhere")


@pytest.mark.parametrize("is_named", [False, True])
def test_a_run_without_a_config_is_recorded_only_for_who_named_it(is_named: bool, tmp_path: Path):
    common = Common((), str(tmp_path / "work"), "r", is_run_named=is_named, json=False, debug=False)
    with pytest.raises(UsageError, match="no config file"), open_run(str(tmp_path / "c.toml"), common):
        pass
    # A scheduler names its runs, and finds the reason of a failed task in the summary.
    assert (tmp_path / "work/runs/r/summary.json").exists() == is_named
    assert (tmp_path / "work").exists() == is_named


def test_time_left_is_estimated_from_work_under_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    progress = RunProgress(RunRecord(str(tmp_path), "r"), num_epochs=1)
    # (seconds, images): 500 were kept, Spark takes 20 s to start, then ten images a second are done.
    for now, num_done in ((0.0, 500), (20.0, 510), (30.0, 610), (40.0, 710), (1020.0, 760)):
        monkeypatch.setattr("pipeline.output.progress.time.monotonic", lambda now=now: now)
        progress.event("etl.progress", {"num_done": num_done, "num_images": 1010})
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" images")[2] for line in lines] == [
        "", "", ", 10 a second, 40 s left", ", 10 a second, 30 s left", ", 0.25 a second, 1,000 s left"
    ]  # fmt: skip


def test_no_rate_is_computed_from_two_units_that_ended_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    progress = RunProgress(RunRecord(str(tmp_path), "r"), num_epochs=1)
    for now, num_done in ((0.0, 0), (1.9, 250), (1.902, 500)):
        monkeypatch.setattr("pipeline.output.progress.time.monotonic", lambda now=now: now)
        progress.event("etl.progress", {"num_done": num_done, "num_images": 500})
    assert capsys.readouterr().err.splitlines() == ["etl: 0 of 500 images", "etl: 500 of 500 images"]


@pytest.fixture
def signal_handlers_restored() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signal_handlers_restored")
def test_every_observer_records_the_same_events_and_warnings(tmp_path: Path):
    def work(observer: Observer) -> None:
        observer.event("etl.progress", {"num_done": 1, "num_images": 2})
        observer.event("train.progress", {"rank": 0, "epoch": 0, "step": 0, "num_steps": 2, "loss": 1.0})
        observer.event("etl.warning", {"warning": "few images"})
        observer.event("train.loss_stuck", {"rank": 0, "epoch": 1, "warning": "the loss has not moved"})
        observer.event("train.checkpoint", {"rank": 0, "global_step": 2})

    def job(record: RunRecord, observer: Observer) -> None:
        record.stage("s", lambda: work(observer), lambda _: StageRecord(stage="s"))

    with recording(RunRecord(str(tmp_path), "command")) as record, RunProgress(record, 2) as progress:
        job(record, progress)
    assert run_job(job, str(tmp_path), "job", sections=(), debug=True) == 0
    for run_id in ("command", "job"):
        lines = (tmp_path / f"runs/{run_id}/events.jsonl").read_text().splitlines()
        told = [json.loads(line)["event"] for line in lines if '"s"' not in line]
        assert told == ["etl.warning", "train.loss_stuck", "train.checkpoint", "run.ended"]
        summary = json.loads((tmp_path / f"runs/{run_id}/summary.json").read_text())
        assert summary["warnings"] == {"s": ["few images", "the loss has not moved"]}


@pytest.mark.starts("program")
@pytest.mark.parametrize("debug", ["", "--debug"])
def test_what_libraries_log_of_their_errors_is_for_debug_only(tmp_path: Path, debug):
    command = [sys.executable, "-m", "tests.programs.log_a_traceback", str(tmp_path), debug]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 130 and done.stderr.rstrip().splitlines()[-1].startswith("ERROR 130: ")
    assert ("the JVM is gone" in done.stderr) == bool(debug)


def _draw_run_ids(drawn: SimpleQueue[list[str]]) -> None:
    drawn.put([new_run_id() for _ in range(25)])


@pytest.mark.starts("program")
def test_run_ids_are_unique_and_plain():
    # In 20 processes that begin with the same memory; most draw theirs within one second.
    context = multiprocessing.get_context("fork")
    drawn = context.SimpleQueue()
    processes = [context.Process(target=_draw_run_ids, args=(drawn,)) for _ in range(20)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        assert process.exitcode == 0
    run_ids = [run_id for _ in processes for run_id in drawn.get()]
    assert len(set(run_ids)) == len(run_ids) == 500
    for hostile in ("a/b", "../x", ".hidden", ""):
        with pytest.raises(Exception, match="run id|leaves its root"):
            RunRecord("/nowhere", hostile or "/")


def test_a_summary_has_every_section_whenever_the_run_ended(tmp_path: Path):
    def fail() -> None:
        raise IntegrityError("a shard is cut", "expected 9 bytes")

    section = {"engine": "spark", "seconds": 1.0, "images_per_second": 2.0}
    record = RunRecord(str(tmp_path), "r", sections=SUMMARY_SECTIONS, whole=WHOLE_PIPELINE)
    with pytest.raises(IntegrityError), recording(record):
        do_stage(record, "etl", sections={"etl": section})
        running = summary_on_disk(tmp_path)
        assert (running["status"], running["exit_code"], running["export"]) == ("running", None, None)
        record.stage("verify", fail, lambda _: StageRecord(stage="verify"))
    summary = summary_on_disk(tmp_path)
    assert summary == record.summary
    assert (summary["exit_code"], summary["error"]) == (3, "a shard is cut; expected 9 bytes")
    assert summary["stages"]["verify"]["status"] == "failed"
    assert summary["etl"] == section and summary["train"] is None


def test_a_run_is_ok_only_when_it_has_been_through_the_whole_pipeline(tmp_path: Path):
    order = ["etl", "verify", "train", "export", "evaluate", "promote"]
    assert set(order) == WHOLE_PIPELINE
    for stage in order:
        # One process for each, as a scheduler does it; jobs under spark-submit do not know the pipeline.
        assert not (tmp_path / "runs").exists() or summary_on_disk(tmp_path)["status"] == "partial"
        whole = frozenset() if stage in ("etl", "train") else WHOLE_PIPELINE
        with recording(RunRecord(str(tmp_path), "r", whole=whole)) as record:
            do_stage(record, stage, status="skipped" if stage == "export" else "done")
    assert (summary_on_disk(tmp_path)["status"], summary_on_disk(tmp_path)["exit_code"]) == ("ok", 0)
    (tmp_path / "runs/r/summary.json").unlink()
    assert read_run_state(tmp_path, "r", WHOLE_PIPELINE).status == "ok"
    # A stage that failed is not made good by a later one.
    with recording(RunRecord(str(tmp_path), "r", whole=WHOLE_PIPELINE)) as record:
        do_stage(record, "verify", status="failed", exit_code=3, error="damaged")
    assert (summary_on_disk(tmp_path)["status"], summary_on_disk(tmp_path)["exit_code"]) == ("failed", 3)
    with recording(RunRecord(str(tmp_path), "r", whole=WHOLE_PIPELINE)) as record:
        do_stage(record, "promote")
    assert summary_on_disk(tmp_path)["status"] == "partial"


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("x"), 2), (KeyboardInterrupt(), 130), (Terminated(), 143), (ValueError("x"), 1)]
)
def test_each_way_to_end_is_recorded_with_its_code(error: BaseException, code: int, tmp_path: Path):
    def fail() -> None:
        raise error

    record = RunRecord(str(tmp_path), "r")
    with pytest.raises(type(error)), recording(record):
        record.stage("etl", fail, lambda _: StageRecord(stage="etl"))
    written = read_stage_record(tmp_path, "r", "etl")
    assert written is not None and (written.status, written.exit_code) == ("failed", code)
    assert read_run_state(tmp_path, "r").exit_code == code


def test_the_error_of_a_stage_counts_more_than_that_of_its_record(tmp_path: Path):
    def fail() -> None:
        # Where the record would be, there is a folder now.
        (tmp_path / "runs/r/etl.json").mkdir(parents=True)
        raise UsageError("the stage's own error")

    with pytest.raises(ShardmillError, match="the stage's own error"), recording(RunRecord(str(tmp_path), "r")) as run:
        run.stage("etl", fail, lambda _: StageRecord(stage="etl"))


def test_stages_in_processes_of_their_own_make_one_summary(tmp_path: Path):
    records = [
        StageRecord(stage="b", started=1, sections={"x": {"a": 0, "b": 2}}),
        StageRecord(stage="a", started=2, sections={"y": None, "x": {"a": 1}}),
    ]
    for record in random.sample(records, 2):
        write_stage_record(tmp_path, "r", record)
    summary = write_summary(tmp_path, "r", PARTIAL, ("y",))
    # Later stages win, in whatever order their records were written.
    assert summary["x"] == {"a": 1, "b": 2} and summary["y"] is None and list(summary["stages"]) == ["b", "a"]


def test_an_attempt_that_lost_leaves_the_run_what_the_one_that_won_has_recorded(tmp_path: Path):
    """Both are of one run: a scheduler that loses sight of a task starts it again under the same name.

    A lease of a remote work folder has lapsed if the first one was suspended.
    """

    def lose() -> None:
        winner = RunRecord(str(tmp_path), "r")
        do_stage(winner, "train", sections={"train": {"weights_sha256": "0" * 64}})
        winner.close()
        raise CommitConflict("attempt 2 began")

    lost = RunRecord(str(tmp_path), "r")
    with pytest.raises(CommitConflict), recording(lost):
        lost.stage("train", lose, lambda _: StageRecord(stage="train"))
    assert lost.ended[-1].exit_code == CommitConflict.exit_code
    record = read_stage_record(tmp_path, "r", "train")
    assert record is not None and record.status == "done"
    assert read_run_state(tmp_path, "r") == PARTIAL

    # What begins afterwards and fails is told.
    with pytest.raises(UsageError), recording(RunRecord(str(tmp_path), "r")) as later:
        later.stage("train", lambda: (_ for _ in ()).throw(UsageError("wrong")), lambda _: StageRecord(stage="train"))
    assert (read_run_state(tmp_path, "r").status, read_run_state(tmp_path, "r").exit_code) == ("failed", 2)


def test_a_damaged_record_of_a_run_is_one_line_and_ends_no_other_stage(tmp_path: Path):
    write_stage_record(tmp_path, "r", StageRecord(stage="etl", sections={"x": {"a": 0}}))
    file = tmp_path / "runs/r/etl.json"
    whole = file.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for damaged in (b"", b"{}", b"\xff" * 100, whole[:-1], *flipped):
        file.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"etl\.json was altered; .*delete it"):
            read_stage_record(tmp_path, "r", "etl")
    with recording(RunRecord(str(tmp_path), "r")) as record:
        do_stage(record, "train")
    assert list(summary_on_disk(tmp_path)["stages"]) == ["train"]
    file.unlink()
    for damaged in (b"", b"[]", b"\xff", b"{}"):
        (tmp_path / "runs/r/summary.json").write_bytes(damaged)
        assert read_run_state(tmp_path, "r") == PARTIAL
