"""With SHARDMILL_LOG_FORMAT=json, every line on stderr is one JSON object, whoever writes it."""

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.output.progress import RunProgress
from shardmill.errors import UsageError
from shardmill.jobs import json_log
from shardmill.jobs.json_log import JsonLog, start_json_log
from shardmill.jobs.observer import Observer
from shardmill.jobs.process import print_error
from shardmill.jobs.redact import warn_on_stderr
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.run_record import RunRecord, _JobObserver, recording
from shardmill.stores.retries import TELL_AFTER_SECONDS
from tests.lab.datasets import write_images
from tests.services.fault_proxy import Fault, proxying
from tests.services.web import serving
from train.contracts.values import BEFORE_CHECKPOINT
from train.reporting.run_log import RunLog

Objects = Callable[[], list[dict[str, Any]]]


def log_as_json(monkeypatch: pytest.MonkeyPatch) -> Objects:
    """From now on stderr is JSON; returns what it has received. (A fixture comes before pytest takes stderr.)"""
    received = io.StringIO()
    monkeypatch.setenv("SHARDMILL_LOG_FORMAT", "json")
    monkeypatch.setattr(json_log, "_logs", [])
    monkeypatch.setattr(sys, "stderr", received)
    start_json_log()
    return lambda: [json.loads(line, parse_constant=pytest.fail) for line in received.getvalue().splitlines()]


def without_time(value: dict[str, Any]) -> dict[str, Any]:
    return {key: value[key] for key in value if key != "time"}


def test_each_line_is_an_object_with_its_level(monkeypatch: pytest.MonkeyPatch):
    objects = log_as_json(monkeypatch)
    sys.stderr.write("etl: 3 of 9 im")
    sys.stderr.write("ages\n\netl: WARNING: few images\n")
    warn_on_stderr("no space")
    print_error(7, "2 of 3 are rejected")
    print_error(143, "terminated")
    assert [without_time(each) for each in objects()] == [
        {"level": "info", "message": "etl: 3 of 9 images"},
        {"level": "warning", "message": "etl: few images"},
        {"level": "warning", "message": "no space"},
        {"level": "error", "message": "2 of 3 are rejected", "exit_code": 7, "kind": "RejectLimitExceeded"},
        {"level": "error", "message": "terminated", "exit_code": 143},
    ]
    assert all(each["time"].endswith("+00:00") for each in objects())


@pytest.mark.parametrize("observes", [lambda record: RunProgress(record, 2), _JobObserver], ids=["command", "job"])
def test_events_of_a_run_keep_their_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, observes: Callable[[RunRecord], Observer]
):
    objects = log_as_json(monkeypatch)
    with recording(RunRecord(str(tmp_path), "r1")) as record:
        observer = observes(record)
        observer.event("etl.units_kept", {"kept": 2, "missing": 1, "token": "hunter2hunter2"})
        observer.event("train.epoch", {"rank": 1, "epoch": 0, "seconds": 1.0, "train_loss": float("nan")})
        observer.event("train.stuck", {"rank": 0, "warning": "the loss has not moved"})
        RunLog(observer).event(BEFORE_CHECKPOINT, {"rank": 0})
        record.stage("train", lambda: None, lambda _: StageRecord(stage="train"))
    kept, epoch, stuck, started, ended, over = map(without_time, objects())
    assert kept.pop("message", "etl: work units reused").startswith("etl: work units reused")
    assert kept == {
        "level": "info", "run_id": "r1", "event": "etl.units_kept", "kept": 2, "missing": 1, "token": "(hidden)"
    }  # fmt: skip
    assert (epoch["rank"], epoch["train_loss"], "message" in epoch) == (1, "nan", False)
    assert (stuck["level"], stuck["warning"]) == ("warning", "the loss has not moved")
    of_run = {"level": "info", "run_id": "r1"}
    assert started == {**of_run, "event": "stage.started", "stage": "train"}
    assert ended.pop("seconds") >= 0
    assert ended == {**of_run, "event": "stage.ended", "stage": "train", "status": "done", "retries": 0}
    assert over == {**of_run, "event": "run.ended", "command": "", "exit_code": 0, "status": "partial"}


def test_a_job_without_it_quotes_values_as_logfmt_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    observer = _JobObserver(RunRecord(str(tmp_path), "r1"))
    observer.event("etl.warning", {"warning": 'few "images"', "num_images": 3, "uri": "s3://a/b?c=d", "note": ""})
    assert capsys.readouterr().err == (
        'etl.warning warning="few \\"images\\"" num_images=3 uri="s3://a/b?c=d" note=""\n'
    )


def test_another_format_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDMILL_LOG_FORMAT", "yaml")
    with pytest.raises(UsageError, match="SHARDMILL_LOG_FORMAT is 'yaml'; expected text or json"):
        start_json_log()
    assert not isinstance(sys.stderr, JsonLog)


@pytest.mark.starts("program")
def test_a_command_says_how_it_ended(tmp_path: Path):
    done = subprocess.run(
        ["shardmill", "verify", str(tmp_path / "nothing")],
        capture_output=True, text=True, env={**os.environ, "SHARDMILL_LOG_FORMAT": "json"},
    )  # fmt: skip
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == last["exit_code"] != 0 and last["level"] == "error" and "nothing" in last["message"]


@pytest.mark.drill
def test_a_worker_that_waits_for_storage_says_so(tmp_path: Path):
    write_images(tmp_path / "images", num_images=12)
    names = [file.relative_to(tmp_path).as_posix() for file in sorted((tmp_path / "images").rglob("*.png"))]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(f"{name},{name.split('/')[1]}\n" for name in names))
    began: dict[str, float] = {}
    late: list[str] = []

    def choose(method: str, path: str) -> Fault | None:
        # The table is read by the command, and images by its workers. The outage ends once an attempt that comes late
        # enough for a warning has failed: when one comes is random.
        if not path.endswith(".png") or late:
            return None
        now = time.monotonic()
        if now - began.setdefault(path, now) > TELL_AFTER_SECONDS:
            late.append(path)
        return Fault.SLOW_DOWN

    with serving(tmp_path) as upstream, proxying(upstream) as proxy:
        proxy.choose = choose
        settings = {"source.uri": f"{proxy.endpoint}/table.csv", "source.kind": "table", "etl.image_size": 16}
        options = [f"--set={key}={value}" for key, value in settings.items()]
        (tmp_path / "job.toml").write_text(f"dataset.uri = '{tmp_path / 'dataset'}'\n")
        done = subprocess.run(
            ["shardmill", "etl", tmp_path / "job.toml", *options, "--workdir", tmp_path / "work"],
            capture_output=True, text=True, env={**os.environ, "SHARDMILL_LOG_FORMAT": "json"},
        )  # fmt: skip
    assert done.returncode == 0 and late, done.stderr
    objects = [json.loads(line) for line in done.stderr.splitlines()]
    waits = [each for each in objects if "a request to storage has failed for" in each.get("message", "")]
    assert waits and all(each["level"] == "warning" and "HTTP 503" in each["message"] for each in waits), objects
