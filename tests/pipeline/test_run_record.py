"""What a run leaves: stage records, one summary, line logs; whole whenever the run ended."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from pipeline.progress import RunProgress
from pipeline.record import RunRecord
from shardmill.errors import IntegrityError, UsageError
from shardmill.jobs.events import (
    LineLog,
    StageRecord,
    how_run_ended,
    new_run_id,
    read_lines,
    read_stage_record,
    write_stage_record,
)
from shardmill.jobs.stage_process import Terminated
from shardmill.stores import open_store
from tests.pipeline.command import SUMMARY_SCHEMA


def test_warnings_are_said_and_stay_with_their_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    record = RunRecord(str(tmp_path), "r")
    progress = RunProgress(record, num_epochs=12)

    def work() -> StageRecord:
        progress.event("etl.warning", {"message": "few \x1b[2J images"})
        progress.event("train.resumed", {"epoch": 2, "step": 4, "rank": 0})
        return StageRecord(stage="etl")

    record.stage("etl", work)
    record.stage("train", lambda: StageRecord(stage="train"))
    summary = record.close()
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    assert list(summary["warnings"]) == ["etl"] and len(summary["warnings"]["etl"]) == 1
    said = capsys.readouterr().err
    # People count from 1, and a name cannot command their terminal.
    assert r"WARNING: few \x1b[2J images" in said and "continues at epoch 3/12, step 5" in said


def test_run_ids_are_unique_and_plain():
    assert len({new_run_id() for _ in range(500)}) == 500
    for hostile in ("a/b", "../x", ".hidden", ""):
        with pytest.raises(Exception, match="run id|does not stay"):
            RunRecord("/nowhere", hostile or "/")


def test_a_summary_has_every_key_whenever_the_run_ended(tmp_path: Path):
    record = RunRecord(str(tmp_path), "r", is_single_stage=False)
    record.open("")
    running = json.loads((tmp_path / "runs/r/summary.json").read_text())
    jsonschema.validate(running, SUMMARY_SCHEMA)
    assert (running["status"], running["exit_code"]) == ("running", None)

    record.stage("etl", lambda: StageRecord(stage="etl", sections={"etl": {"engine": "spark"}}))
    assert json.loads((tmp_path / "runs/r/summary.json").read_text())["status"] == "running"

    def fail() -> StageRecord:
        raise IntegrityError("a shard is cut", "expected 9 bytes")

    with pytest.raises(IntegrityError):
        record.stage("verify", fail)
    summary = record.close(IntegrityError("a shard is cut", "expected 9 bytes"))
    assert summary == json.loads((tmp_path / "runs/r/summary.json").read_text())
    assert (summary["exit_code"], summary["error"]) == (3, "a shard is cut; expected 9 bytes")
    assert summary["stages"]["verify"]["status"] == "failed"
    assert summary["etl"] == {"engine": "spark"} and summary["train"] is None


@pytest.mark.parametrize(
    ("error", "code"), [(UsageError("x"), 2), (KeyboardInterrupt(), 130), (Terminated(), 143), (ValueError("x"), 1)]
)
def test_each_way_to_end_is_recorded_with_its_code(error: BaseException, code: int, tmp_path: Path):
    def fail() -> StageRecord:
        raise error

    with pytest.raises(type(error)):
        RunRecord(str(tmp_path), "r").stage("etl", fail)
    record = read_stage_record(tmp_path, "r", "etl")
    assert record is not None and (record.status, record.exit_code) == ("failed", code)


def test_stages_in_processes_of_their_own_make_one_summary(tmp_path: Path):
    write_stage_record(tmp_path, "r", "train", StageRecord(stage="train", sections={"evaluation": None, "x": {"a": 1}}))
    write_stage_record(tmp_path, "r", "etl", StageRecord(stage="etl", sections={"x": {"a": 0, "b": 2}}))
    summary = json.loads((tmp_path / "runs/r/summary.json").read_text())
    # Later stages of the story win, in whatever order they were written.
    assert summary["x"] == {"a": 1, "b": 2} and summary["evaluation"] is None


def test_a_damaged_record_of_a_run_is_one_line_and_ends_no_other_stage(tmp_path: Path):
    write_stage_record(tmp_path, "r", "etl", StageRecord(stage="etl", sections={"x": {"a": 0}}))
    file = tmp_path / "runs/r/etl.json"
    whole = file.read_bytes()
    flipped = [
        whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :] for place in range(len(whole))
    ]
    for damaged in (b"", b"{}", b"\xff" * 100, whole[:-1], *flipped):
        file.write_bytes(damaged)
        with pytest.raises(IntegrityError, match=r"etl\.json was altered; .*delete it"):
            read_stage_record(tmp_path, "r", "etl")
    write_stage_record(tmp_path, "r", "train", StageRecord(stage="train"))
    assert list(json.loads((tmp_path / "runs/r/summary.json").read_text())["stages"]) == ["train"]
    file.unlink()
    for damaged in (b"", b"[]", b"\xff", b"{}"):
        (tmp_path / "runs/r/summary.json").write_bytes(damaged)
        assert how_run_ended(tmp_path, "r") == (0, "")


def test_line_logs_on_a_store_without_append(s3_bucket: str):
    store = open_store(f"{s3_bucket}/logs")
    now = [0.0]
    log = LineLog(store, "runs/r/events.jsonl", clock=lambda: now[0])
    log.append({"n": 1})
    assert read_lines(store, "runs/r/events.jsonl") == [b'{"n": 1}\n']
    log.append({"n": 2})
    assert len(read_lines(store, "runs/r/events.jsonl")) == 1
    now[0] = 10.0
    log.append({"n": 3})
    assert len(read_lines(store, "runs/r/events.jsonl")) == 3
    log.append({"n": 4})
    log.close()
    again = LineLog(store, "runs/r/events.jsonl")
    again.append({"n": 5})
    again.close()
    assert [json.loads(line)["n"] for line in read_lines(store, "runs/r/events.jsonl")] == [1, 2, 3, 4, 5]


def test_a_line_cut_by_a_kill_is_left_out(tmp_path: Path):
    (tmp_path / "events.jsonl").write_bytes(b'{"n": 1}\n{"n":')
    assert read_lines(open_store(tmp_path), "events.jsonl") == [b'{"n": 1}\n']
