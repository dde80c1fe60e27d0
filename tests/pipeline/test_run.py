"""Whole runs: how they go on, are killed, are named and look in a terminal."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import jsonschema
import pytest

from pipeline.cli_options import Common, committed_version
from pipeline.commands.stages import train
from pipeline.config import load_for_dataset, load_pipeline
from pipeline.output.ending import end_with_failure
from pipeline.output.progress import RunProgress
from pipeline.preflight import FirstSetup
from pipeline.run import _try_build
from pipeline.running import Run
from pipeline.tree import PipelineTree
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import CommitConflict, UsageError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.process import Terminated
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.stores import open_store
from tests.canaries import files_with_canaries, write_config
from tests.lab.commands import (
    BIN,
    BUILD_HERE,
    ENVIRONMENT,
    ROOT,
    SUMMARY_SCHEMA,
    in_process,
    last_line,
    shardmill,
    start,
)
from tests.lab.datasets import make_dataset, write_images
from tests.lab.terminal import SPARK_LINES, Terminal
from tests.processes import processes_of_session
from tests.services.lost_executor import GATED_KERAS

# The local engine; while there is a file `hold`, it begins no second unit, and says so by a file `held`.
HOLDING = """
import time
from dataclasses import replace
from pathlib import Path

from etl.engines.local import LOCAL


def run_units(units, task, settings):
    for result in LOCAL.run_units(units, task, settings):
        yield result
        while Path("hold").exists():
            Path("held").touch()
            time.sleep(0.01)


ENGINE = replace(LOCAL, run_units=run_units)
"""
OPTIONS = (
    *("--workdir", "work", "--run-id", "mine"),
    *("--set", "etl.image_size=16", "--set", "train.epochs=2", "--set", "train.record_samples=true"),
    *("--set", "train.global_batch_size=16", "--set", "etl.unit_min_images=40"),
)
HERE = ("--set", "etl.engine=holding:ENGINE")
ON_SPARK = ("--set", "etl.engine=spark", "--set", "spark.master=local[2]")


def summary_of(folder: Path, run_id: str = "mine") -> dict:
    summary = json.loads((folder / "work" / "runs" / run_id / "summary.json").read_text())
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    return summary


def interrupt(folder: Path, photos: Path, number: signal.Signals, engine: tuple[str, ...] = HERE) -> None:
    """Start the run, end it by a signal in the middle of its ETL, and see that nothing half-done is left."""
    (folder / "holding.py").write_text(HOLDING)
    (folder / "hold").touch()
    started = start("run", photos, *OPTIONS, *engine, cwd=folder)

    def is_under_way() -> bool:
        if engine == HERE:
            return (folder / "held").exists()
        return any("org.apache.spark.deploy" in line for line in processes_of_session(started.pid).values())

    while not is_under_way():
        assert started.poll() is None, started.communicate()
        time.sleep(0.01)
    if number == signal.SIGINT:
        # As a terminal does it: the whole foreground group.
        os.killpg(started.pid, number)
    else:
        started.send_signal(number)
    _, errors = started.communicate(timeout=200)
    (folder / "hold").unlink()
    assert started.returncode == 128 + number
    assert errors.rstrip().splitlines()[-1].startswith(f"ERROR {128 + number}: ")
    assert "Traceback" not in errors
    assert not list((folder / "work" / "dataset").glob("manifests/*"))
    assert not processes_of_session(started.pid)
    summary = summary_of(folder)
    assert (summary["status"], summary["exit_code"]) == ("failed", 128 + number)
    assert summary["stages"]["etl"]["status"] == "failed"
    assert summary["dataset"] is None


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images that no test changes: a work directory belongs to the folder that it was made from."""
    photos = tmp_path_factory.mktemp("images") / "photos"
    write_images(photos, num_images=150, num_classes=3, image_size=20)
    return photos


@pytest.fixture(scope="module")
def finished(photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds `work`, to be read only: a run that was interrupted and finished by the same command, and one run again.

    All three run here: a work directory that was moved is another one, whose stages are not skipped.
    """
    finished = tmp_path_factory.mktemp("run")
    interrupt(finished, photos, signal.SIGINT)
    done = shardmill("run", photos, *OPTIONS, *HERE, "--json", cwd=finished)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == summary_of(finished)
    again = shardmill("run", photos, *OPTIONS, *HERE, "--run-id", "again", cwd=finished)
    assert again.returncode == 0, again.stderr
    (finished / "again.txt").write_text(again.stderr)
    return finished


@pytest.fixture
def folder(finished: Path, tmp_path: Path) -> Path:
    """A copy of `finished` to work in."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.mark.starts("command")
def test_sigterm_leaves_nothing_half_visible_either(photos: Path, tmp_path: Path):
    interrupt(tmp_path, photos, signal.SIGTERM)


def test_ctrl_c_names_the_version_that_the_run_has_committed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    uri = make_dataset(tmp_path)
    run_id = open_dataset(uri).manifest.run_id
    for committed_by, said in ((run_id, f"{uri}@1 by run {run_id} is committed"), ("other", "what is finished")):
        record = RunRecord(str(tmp_path / "work"), committed_by)
        record.store.put(f"{record.folder}/config.toml", f'[dataset]\nuri = "{uri}"\n'.encode())
        common = Common((), str(tmp_path / "work"), committed_by, is_run_named=True, json=True, debug=False)
        for error in (KeyboardInterrupt(), Terminated(), *([Terminated("step 1")] if committed_by == run_id else [])):
            committed = committed_version(common)
            end_with_failure(error, is_json=True, is_debug=False, run_id=committed_by, committed=committed)
            shown = capsys.readouterr()
            assert said in shown.err and said in json.loads(shown.out)["error"]["message"]


@pytest.mark.starts("program")
def test_what_is_started_while_a_command_ends_ends_with_it():
    """As Spark's script does, which starts one JVM after the other."""
    command = subprocess.Popen([sys.executable, "-m", "tests.programs.end_children"], start_new_session=True, cwd=ROOT)
    assert command.wait(200) == 0 and not processes_of_session(command.pid)


@pytest.mark.drill
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_jvm_that_is_starting_ends_with_the_command(number: signal.Signals, photos: Path, tmp_path: Path):
    interrupt(tmp_path, photos, number, ON_SPARK)


@pytest.mark.starts("command")
def test_the_same_command_finishes_an_interrupted_run(finished: Path):
    summary = summary_of(finished)
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
    record = finished / "work" / "runs" / "mine"
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
    for words in ("Class balance", "Confusion matrix", "Where the training", "promoted", "class_2"):
        assert words in page


@pytest.mark.starts("command")
def test_another_run_skips_every_stage_and_says_so(finished: Path):
    said = (finished / "again.txt").read_text().splitlines()
    skipped = [line.partition(":")[0] for line in said if "skipped, its result already exists" in line]
    assert skipped == ["etl", "train", "export", "evaluate", "promote"]
    first, second = summary_of(finished), summary_of(finished, "again")
    assert second["dataset"] == first["dataset"]
    assert second["train"]["weights_sha256"] == first["train"]["weights_sha256"]
    assert second["promotion"]["decision"] == "already_current"


@pytest.mark.starts("command")
def test_a_model_predicts_ordinary_files_and_rejects_the_rest(folder: Path, photos: Path):
    (folder / "page.jpg").write_text("<html>")
    image = next((photos / "class_1").iterdir())
    done = shardmill("predict", "work/models", image, "page.jpg", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("predict: export work/models@1; ")
    found = json.loads(done.stdout)
    assert found[0]["label"].startswith("class_") and 0 < found[0]["probability"] <= 1
    assert found[1]["rejection"].startswith("not_an_image") and found[1]["label"] == ""


@pytest.mark.starts("command")
def test_promote_works_on_a_models_store_and_says_which(folder: Path, photos: Path):
    # A folder of images holds no models, whatever the work directory holds.
    for store, what in ((str(photos), "holds no exports"), ("nowhere", "does not exist; expected a models folder")):
        for more in ((), ("--rollback",)):
            refused = in_process("promote", store, "--workdir", "work", *more, cwd=folder)
            assert refused.returncode == 2 and f"{store} {what}" in last_line(refused)
    assert not list((folder / "work" / "models" / "current").glob("*2.json"))
    refused = in_process("promote", "work/models", "--rollback", "--workdir", "work", cwd=folder)
    assert refused.returncode == 2 and "has nothing to roll back to" in last_line(refused)
    refused = in_process("promote", "work/models@1", "--rollback", "--workdir", "work", cwd=folder)
    assert refused.returncode == 2 and "exclude each other" in last_line(refused)

    # A worse model is exported and kept out, with exit 9 if somebody insists.
    worse = (
        "--run-id", "worse", "--set", "train.seed=5", "--set", "train.epochs=1", "--set", "train.learning_rate=1e-9",
    )  # fmt: skip
    exported = [in_process(stage, "work/dataset", *OPTIONS, *HERE, *worse, cwd=folder) for stage in ("train", "export")]
    assert [done.returncode for done in exported] == [0, 0], exported[-1].stderr
    strict = ("--workdir", "work", "--set", "gate.min_accuracy=1")
    insisting = in_process("promote", "work/models", *strict, "--run-id", "strict", "--require", cwd=folder)
    assert insisting.returncode == 9 and "is below gate.min_accuracy = 1" in last_line(insisting)
    assert summary_of(folder, "strict")["exit_code"] == 9

    # A person may choose it all the same, and go back, and undo that.
    for named, decision, current in (("@2", "chosen", 2), ("", "rolled_back", 1), ("@2", "chosen", 2)):
        flags = () if named else ("--rollback",)
        done = in_process("promote", f"work/models{named}", "--workdir", "work", *flags, "--json", cwd=folder)
        assert done.returncode == 0, done.stderr
        promotion = json.loads(done.stdout)["sections"]["promotion"]
        assert (promotion["decision"], promotion["current"]) == (decision, current)
        assert promotion["models"] == str(folder / "work" / "models") and promotion["models"] in done.stderr
    # It stays below the floor, current or not.
    insisting = in_process("promote", "work/models", *strict, "--require", cwd=folder)
    assert insisting.returncode == 9 and "is the current one, but accuracy" in last_line(insisting)


def test_a_failed_run_has_a_report_and_is_the_latest(tmp_path: Path):
    write_images(tmp_path / "photos", num_images=8, num_classes=1)
    done = in_process("run", "photos", "--json", *BUILD_HERE, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == 2 and "has 1 classes (class_0)" in told["error"]["message"]
    record = tmp_path / "shardmill-work" / "runs" / told["run_id"]
    assert "has 1 classes" in (record / "report.html").read_text() and f"report: {record}/report.html" in done.stderr
    assert not (tmp_path / "shardmill-work" / "dataset").exists()
    summary = json.loads((record / "summary.json").read_text())
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    assert summary["exit_code"] == 2
    (record / "report.html").unlink()
    again = in_process("report", "--json", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["run_id"] == told["run_id"] and (record / "report.html").is_file()
    assert json.loads((record / "summary.json").read_text())["exit_code"] == 2


def test_what_a_stage_calls_aside_counts_in_no_stage(tmp_path: Path):
    seconds = [0.0]
    record = RunRecord(str(tmp_path), "r", clock=lambda: seconds[0])

    def work() -> None:
        seconds[0] += 1
        with record.aside():
            seconds[0] += 5

    with recording(record):
        record.stage("etl", work, lambda _: StageRecord(stage="etl"))
        record.stage("verify", lambda: None, lambda _: StageRecord(stage="verify"))
    assert [each.seconds for each in record.ended] == [1, 0]


def test_the_model_is_tried_in_no_time_of_the_etl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    seconds = [0.0]

    def take_five_seconds(*_: object) -> None:
        seconds[0] += 5

    monkeypatch.setattr("pipeline.run.try_build", take_five_seconds)
    (tmp_path / "images").mkdir()
    record = RunRecord(str(tmp_path), "r", clock=lambda: seconds[0])
    with recording(record), RunProgress(record, num_epochs=1) as progress:
        run = Run(load_pipeline(str(tmp_path / "images"), (), str(tmp_path)), record, progress)
        tried = partial(_try_build, run, FirstSetup(run.tree), RowSchema("png", (16, 16, 3), ("cat", "dog")))
        record.stage("etl", tried, lambda _: StageRecord(stage="etl"))
    assert seconds[0] >= 5 and record.ended[0].seconds == 0


# The model that is trained otherwise, behind a gate at which its twelfth step waits.
BEHIND_GATE = """
import keras
from gated_keras import Gate

from train.models.small_cnn import small_cnn


def net(image_shape, num_classes):
    return keras.Sequential([keras.Input(image_shape), Gate(), small_cnn(image_shape, num_classes)])
"""
TRAINING = (
    *("--set", "train.epochs=4", "--set", "train.global_batch_size=16", "--set", "train.checkpoint_every_steps=3"),
    *("--set", "train.record_samples=true", "--set", "train.model=behind_gate:net"),
)


def train_arguments(folder: Path, name: str) -> tuple[str, ...]:
    return (
        "train", "c.toml", *TRAINING, "--workdir", "w", "--run-id", name, "--set",
        f"models.uri={folder}/models-{name}",
    )  # fmt: skip


def steps_of(folder: Path, name: str) -> list[dict]:
    file = folder / "w" / "runs" / name / "steps.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.drill
def test_killed_twice_is_as_good_as_never_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "behind_gate.py").write_text(BEHIND_GATE)
    shutil.copy(GATED_KERAS, tmp_path)
    uri = make_dataset(tmp_path, num_images=240, num_classes=3)
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{uri}"\n')
    whole = shardmill(*train_arguments(tmp_path, "whole"), "--json", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    expected = json.loads(whole.stdout)["sections"]["train"]
    num_steps = expected["steps"]
    assert num_steps > 20

    # Inside an epoch, between two checkpoints; then again, nine steps further on. The gate stays closed.
    for enough in (10, 19):
        with monkeypatch.context() as gated:
            gated.setitem(ENVIRONMENT, "TEST_GATE", str(tmp_path / "never"))
            started = start(*train_arguments(tmp_path, "killed"), cwd=tmp_path, stdout=DEVNULL, stderr=DEVNULL)
        while len(steps_of(tmp_path, "killed")) < enough:
            assert started.poll() is None
            time.sleep(0.005)
        os.killpg(started.pid, signal.SIGKILL)
        started.wait()
        summary = json.loads((tmp_path / "w/runs/killed/summary.json").read_text())
        # Nobody could write how it ended.
        assert (summary["status"], summary["exit_code"]) == ("running", None)

    last = shardmill(*train_arguments(tmp_path, "killed"), "--json", cwd=tmp_path)
    assert last.returncode == 0, last.stderr
    found = json.loads(last.stdout)["sections"]["train"]
    assert found["resumed_from"] is not None
    assert found["weights_sha256"] == expected["weights_sha256"]
    assert found["final_loss_hex"] == expected["final_loss_hex"]
    assert steps_of(tmp_path, "killed") == steps_of(tmp_path, "whole")
    assert len(steps_of(tmp_path, "whole")) == num_steps


BAD_RUN_IDS = [
    "../x", "..", ".", "/etc", "a/b", "a/../b", "a\\b", ".hidden", "~root", "C:x", "s3://b/x", "%2e%2e%2fx", "x\ty",
    "x\ny", "n" * 256, "\udce4",
]  # fmt: skip


@pytest.mark.parametrize("run_id", BAD_RUN_IDS)
def test_a_bad_run_id_is_a_usage_error(run_id: str, tmp_path: Path):
    with pytest.raises(UsageError, match="run id .*expected a name of at most 255 bytes.*give --run-id a name"):
        RunRecord(str(tmp_path), run_id)
    assert not list(tmp_path.iterdir())


@pytest.mark.starts("program")
def test_every_command_refuses_a_bad_run_id_before_it_works(tmp_path: Path):
    for command in ("run", "etl", "train", "compact", "gc", "inspect", "report", "doctor"):
        done = in_process(command, *([] if command == "report" else [str(tmp_path)]), "--run-id", "../x", cwd=tmp_path)
        assert done.returncode == 2 and "ERROR 2: run id '../x'; expected a name" in done.stderr, (command, done.stderr)
    job = [sys.executable, str(ROOT / "etl" / "job.py"), "--config", str(tmp_path / "none.toml"), "--run-id", "../x"]
    done = subprocess.run(job, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=ENVIRONMENT)
    assert done.returncode == 2 and "ERROR 2: run id '../x'" in done.stderr, done.stderr
    assert not list(tmp_path.parent.glob("x"))


def test_a_run_is_that_of_one_process_at_a_time(tmp_path: Path):
    with recording(RunRecord(str(tmp_path), "r")) as first:
        first.stage("etl", lambda: 1, lambda value: StageRecord(stage="etl"))
        with pytest.raises(CommitConflict, match="run 'r' of .* is at work in another process.*give another --run-id"):
            with recording(RunRecord(str(tmp_path), "r")) as second:
                second.stage("train", lambda: 2, lambda value: StageRecord(stage="train"))
        with recording(RunRecord(str(tmp_path), "another")):
            pass
    assert set(read_run(tmp_path, "r")["stages"]) == {"etl"}
    # Its next stage is another process's.
    with recording(RunRecord(str(tmp_path), "r")) as later:
        later.stage("train", lambda: 2, lambda value: StageRecord(stage="train"))
    assert set(read_run(tmp_path, "r")["stages"]) == {"etl", "train"}


@pytest.mark.starts("server")
def test_a_run_on_s3_is_that_of_one_process_at_a_time(s3_bucket: str):
    with recording(RunRecord(s3_bucket, "r")):
        with pytest.raises(CommitConflict, match="run r on .* is at work.*its lease .* lapses 30 s after"):
            with recording(RunRecord(s3_bucket, "r")):
                pass
    with recording(RunRecord(s3_bucket, "r")):
        pass
    assert not list(open_store(s3_bucket).list("running"))


def read_run(workdir: Path, run_id: str) -> dict[str, Any]:
    return json.loads((workdir / "runs" / run_id / "summary.json").read_text())


@pytest.mark.parametrize("is_named", [False, True])
def test_train_loads_its_config_once_and_records_for_who_named_the_run_that_it_cannot(
    is_named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    loaded: list[str] = []

    def counted(named: str, overrides: tuple[str, ...], workdir: str) -> PipelineTree:
        loaded.append(named)
        return load_for_dataset(named, overrides, workdir)

    monkeypatch.setattr("pipeline.commands.stages.load_for_dataset", counted)
    options = [str(tmp_path / "c.toml"), "--workdir", str(tmp_path / "work"), *(["--run-id", "r"] if is_named else [])]
    with pytest.raises(SystemExit) as ended:
        train.main(options, standalone_mode=False)
    assert ended.value.code == 2
    assert (tmp_path / "work/runs/r/summary.json").exists() == is_named
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{tmp_path}/none"\n')
    with pytest.raises(SystemExit):
        train.main(options, standalone_mode=False)
    assert len(loaded) == 2


@pytest.mark.drill
def test_a_live_spark_session_shows_no_secret_and_no_line_of_its_own(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    (tmp_path / "spark-events").mkdir()
    plain = {"enabled": "true", "dir": (tmp_path / "spark-events").as_uri(), "compress": "false"}
    events = {f"spark.eventLog.{name}": value for name, value in {**plain, "rolling.enabled": "false"}.items()}
    config = write_config(tmp_path, **events)
    terminal = Terminal(BIN / "shardmill", "etl", config, "--workdir", "work", "--run-id", "r", cwd=tmp_path)
    seen: dict[int, str] = {}
    while terminal.process.poll() is None:
        seen |= processes_of_session(terminal.process.pid)
        time.sleep(0.1)
    shown = terminal.text()
    assert terminal.process.returncode == 0, shown

    # Other users of the machine read command lines.
    assert any("org.apache.spark.deploy.SparkSubmit" in line for line in seen.values())
    assert [line for line in seen.values() if "canary" in line.lower()] == []

    # The event log was really written, with a setting that is no secret.
    [log] = list((tmp_path / "spark-events").glob("local-*"))
    assert b"SparkListenerEnvironmentUpdate" in log.read_bytes() and b"spark.eventLog.enabled" in log.read_bytes()
    assert files_with_canaries(tmp_path / "spark-events", tmp_path / "work", tmp_path / "dataset") == []

    # The progress bar is one line that is drawn over again, and nothing came between.
    lines = shown.replace("\r\n", "\n").split("\n")
    assert any(line.count("\r") > 3 for line in lines)
    assert [line for line in lines if "━" in line.rpartition("\r")[2]] in ([], [lines[-1]], [lines[-2]])

    # The person saw our lines alone; Spark's are in the run's log.
    assert not SPARK_LINES.search(shown), shown
    assert "canary" not in shown and "etl: done" in shown
    lines = (tmp_path / "work" / "runs" / "r" / "spark.log").read_text().splitlines()
    levels = [line for line in lines if re.search(r"\b(INFO|WARN|ERROR)\b", line)]
    # In our own layout, set by shardmill/jobs/spark-log4j2.properties.
    assert levels and all(re.match(r"\d\d:\d\d:\d\d spark (WARN|ERROR) ", line) for line in levels), lines


@pytest.mark.drill
@pytest.mark.parametrize(
    ("setting", "value"), [("spark.driver.memory", "1x"), ("spark.serializer", "no.such.Serializer")]
)
def test_settings_that_spark_refuses_are_one_line_that_names_the_log(setting: str, value: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    config = write_config(tmp_path, **{setting: value})
    terminal = Terminal(BIN / "shardmill", "etl", config, "--workdir", "work", "--run-id", "r", cwd=tmp_path)
    terminal.process.wait(250)
    shown = terminal.text().rstrip().splitlines()
    assert terminal.process.returncode == 2, shown
    assert shown[-1].startswith("ERROR 2: Spark does not start: "), shown
    assert not [line for line in shown if SPARK_LINES.search(line)], shown
    log = tmp_path / "work" / "runs" / "r" / "spark.log"
    assert f"Spark's own report is in {log}" in " ".join(shown)
    assert value in log.read_text()
    assert "canary" not in log.read_text()
