"""`shardmill run FOLDER`: interrupted, run again to its end, and once more with nothing left to do; and its record."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
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
from tests.pipeline.command import BIN, ENVIRONMENT, ROOT, last_line, shardmill
from tests.support import write_images

SCHEMA = json.loads((ROOT / "docs" / "summary.schema.json").read_text())
OPTIONS = (
    *("--workdir", "work", "--run-id", "mine"),
    *("--set", "etl.image_size=16", "--set", "train.epochs=2", "--set", "train.record_samples=true"),
    *("--set", "train.global_batch_size=16", "--set", "spark.master=local[2]"),
)


def summary_of(folder: Path, run_id: str = "mine") -> dict:
    summary = json.loads((folder / "work" / "runs" / run_id / "summary.json").read_text())
    jsonschema.validate(summary, SCHEMA)
    return summary


def processes_of_session(session: int) -> list[str]:
    listed = subprocess.run(["ps", "-eo", "sess,stat,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    return [row[2] for row in rows if row[0] == str(session) and not row[1].startswith("Z")]


def interrupt(folder: Path, number: signal.Signals) -> None:
    """Start the run, end it by a signal while the JVM comes up, and see that nothing half-done is left."""
    started = subprocess.Popen(
        [str(BIN / "shardmill"), "run", "photos", *OPTIONS],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert started.stderr is not None
    next(line for line in started.stderr if line.startswith("etl: 0 of"))
    time.sleep(2.0)
    if number == signal.SIGINT:
        # As a terminal does it: the whole foreground group.
        os.killpg(started.pid, number)
    else:
        started.send_signal(number)
    _, errors = started.communicate(timeout=30)
    assert started.returncode == 128 + number
    assert errors.rstrip().splitlines()[-1].startswith(f"ERROR {128 + number}: ")
    assert "Traceback" not in errors
    assert not list((folder / "work" / "dataset").glob("manifests/*"))
    assert processes_of_session(started.pid) == []
    summary = summary_of(folder)
    assert (summary["status"], summary["exit_code"]) == ("failed", 128 + number)
    assert summary["stages"]["etl"]["status"] == "failed"
    assert summary["dataset"] is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images, and a work directory with one run that was interrupted once, then finished by the same command."""
    folder = tmp_path_factory.mktemp("run")
    write_images(folder / "photos", num_images=150, num_classes=3, image_size=20)
    interrupt(folder, signal.SIGINT)
    done = shardmill("run", "photos", *OPTIONS, "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == summary_of(folder)
    return folder


def test_sigterm_leaves_nothing_half_visible_either(tmp_path: Path):
    write_images(tmp_path / "photos", num_images=150, num_classes=3, image_size=20)
    interrupt(tmp_path, signal.SIGTERM)


def test_the_same_command_finishes_an_interrupted_run(folder: Path):
    summary = summary_of(folder)
    assert summary["status"] == "ok" and summary["exit_code"] == 0 and summary["error"] is None
    counts = summary["dataset"]["counts"]
    assert (counts["listed"], counts["accepted"]) == (150, 150)
    assert summary["train"]["world_size"] == 1
    assert summary["evaluation"]["num_samples"] == counts["by_split"]["test"]
    assert summary["promotion"]["decision"] == "promoted" and summary["promotion"]["current"] == 1
    assert summary["stages"]["evaluate"]["status"] == "done" and summary["evaluation"]["top5_accuracy"] is None
    assert summary["export"]["parity_max_abs_diff"] <= 1e-5
    assert abs(sum(summary["train"]["time_shares"].values()) - 1) < 1e-6

    # Each sample of the train split once in each epoch, in steps that count up.
    record = folder / "work" / "runs" / "mine"
    steps = [json.loads(line) for line in (record / "steps.jsonl").read_text().splitlines()]
    assert [(each["epoch"], each["step"]) for each in steps] == sorted((each["epoch"], each["step"]) for each in steps)
    for epoch in range(2):
        seen = [sample for each in steps if each["epoch"] == epoch for sample in each["sample_ids"]]
        assert len(seen) == len(set(seen)) == counts["by_split"]["train"]
    assert len(steps) == summary["train"]["steps"]
    assert steps[-1]["loss_hex"] == summary["train"]["final_loss_hex"]
    events = [json.loads(line) for line in (record / "events.jsonl").read_text().splitlines()]
    assert {"stage.started", "etl.committed", "train.epoch", "run.ended"} <= {each["event"] for each in events}

    # One file that needs nothing from outside.
    page = (record / "report.html").read_text()
    assert 'src="http' not in page and "<script" not in page and "@import" not in page
    for words in ("Class balance", "Confusion matrix", "Where a step", "promoted", "class_2"):
        assert words in page


def test_another_run_skips_every_stage_and_says_so(folder: Path):
    done = shardmill("run", "photos", *OPTIONS, "--run-id", "again", cwd=folder)
    assert done.returncode == 0, done.stderr
    skipped = [line.partition(":")[0] for line in done.stderr.splitlines() if "skipped, its result is there" in line]
    assert skipped == ["etl", "train", "export", "evaluate", "promote"]
    first, second = summary_of(folder), summary_of(folder, "again")
    assert second["dataset"] == first["dataset"]
    assert second["train"]["weights_sha256"] == first["train"]["weights_sha256"]
    assert second["promotion"]["decision"] == "already_current"


def test_a_model_predicts_ordinary_files_and_rejects_the_rest(folder: Path):
    (folder / "page.jpg").write_text("<html>")
    image = next((folder / "photos" / "class_1").iterdir())
    done = shardmill("predict", "work/models", image, "page.jpg", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found[0]["label"].startswith("class_") and 0 < found[0]["probability"] <= 1
    assert found[1]["rejection"].startswith("not_an_image") and found[1]["label"] == ""


def test_promote_works_on_a_models_store_and_says_which(folder: Path, tmp_path: Path):
    # A copy: what is current here is nobody else's business.
    folder = shutil.copytree(folder, tmp_path / "copy")
    # A folder of images holds no models, whatever the work directory holds.
    for store in ("photos", "nowhere"):
        for more in ((), ("--rollback",)):
            refused = shardmill("promote", store, "--workdir", "work", *more, cwd=folder)
            assert refused.returncode == 2 and f"{store} holds no exports" in last_line(refused)
    assert not list((folder / "work" / "models" / "current").glob("*2.json"))
    refused = shardmill("promote", "work/models", "--rollback", "--workdir", "work", cwd=folder)
    assert refused.returncode == 2 and "has nothing to roll back to" in last_line(refused)
    refused = shardmill("promote", "work/models@1", "--rollback", "--workdir", "work", cwd=folder)
    assert refused.returncode == 2 and "exclude each other" in last_line(refused)

    # A worse model is exported and kept out, with exit 9 if somebody insists.
    worse = (
        "--run-id",
        "worse",
        "--set",
        "train.seed=5",
        "--set",
        "train.epochs=1",
        "--set",
        "train.learning_rate=1e-9",
    )
    exported = [shardmill(stage, "work/dataset", *OPTIONS, *worse, cwd=folder) for stage in ("train", "export")]
    assert [done.returncode for done in exported] == [0, 0], exported[-1].stderr
    strict = ("--workdir", "work", "--set", "gate.min_accuracy=1")
    insisting = shardmill("promote", "work/models", *strict, "--run-id", "strict", "--require", cwd=folder)
    assert insisting.returncode == 9 and "is below gate.min_accuracy = 1" in last_line(insisting)
    assert summary_of(folder, "strict")["exit_code"] == 9

    # A person may choose it all the same, and go back, and undo that.
    for named, decision, current in (("@2", "chosen", 2), ("", "rolled_back", 1), ("@2", "chosen", 2)):
        flags = () if named else ("--rollback",)
        done = shardmill("promote", f"work/models{named}", "--workdir", "work", *flags, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        promotion = json.loads(done.stdout)["sections"]["promotion"]
        assert (promotion["decision"], promotion["current"]) == (decision, current)
        assert promotion["models"] == str(folder / "work" / "models") and promotion["models"] in done.stderr
    # It stays below the floor, current or not.
    insisting = shardmill("promote", "work/models", *strict, "--require", cwd=folder)
    assert insisting.returncode == 9 and "is the current one, but accuracy" in last_line(insisting)


def test_a_failed_run_has_a_report_and_is_the_latest(tmp_path: Path):
    write_images(tmp_path / "photos", num_images=8, num_classes=1)
    done = shardmill("run", "photos", "--json", cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == 2 and "has 1 classes (class_0)" in told["error"]["message"]
    record = tmp_path / "shardmill-work" / "runs" / told["run_id"]
    assert "has 1 classes" in (record / "report.html").read_text() and f"report: {record}/report.html" in done.stderr
    assert not (tmp_path / "shardmill-work" / "dataset").exists()
    summary = json.loads((record / "summary.json").read_text())
    jsonschema.validate(summary, SCHEMA)
    assert summary["exit_code"] == 2
    (record / "report.html").unlink()
    again = shardmill("report", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["run_id"] == told["run_id"] and (record / "report.html").is_file()
    assert json.loads((record / "summary.json").read_text())["exit_code"] == 2


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
    jsonschema.validate(summary, SCHEMA)
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
    jsonschema.validate(running, SCHEMA)
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
