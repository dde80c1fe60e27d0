"""The story of training: what is trained on which version, what is skipped, and `train/job.py` as a command."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from etl.config import EtlConfig
from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.jobs.config import DatasetConfig, ModelsConfig
from shardmill.jobs.observer import SilentObserver
from shardmill.stores import open_store
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.train.driver_process import hearing_signals
from train.config import TrainConfig
from train.job import main
from train.planning.trainings import choose_training, training_id
from train.published.export import export_training
from train.published.gate import promote_export
from train.published.predict import predict_images
from train.reporting.run_log import RunLog
from train.stage_record import train_record
from train.training import finished_training, train_model
from train.tree import TrainTree

ROOT = Path(__file__).parents[2]
ETL = EtlConfig(image_size=16, encoding="png", chunk_bytes=8_000, unit_min_images=40)


class Recorder:
    """Keeps what the observer is told; raises after `fail_after_steps` steps, as if the driver had been stopped."""

    def __init__(self, fail_after_steps: int = -1) -> None:
        self.steps: list[tuple[int, int, str]] = []
        self.events: list[str] = []
        self.fields: dict[str, dict] = {}
        self._fail_after_steps = fail_after_steps

    def step(self, step) -> None:
        self.steps.append((step.epoch, step.step, step.loss_hex))
        if len(self.steps) == self._fail_after_steps:
            raise RuntimeError("stopped here")

    def event(self, name, fields) -> None:
        self.events.append(name)
        self.fields[name] = fields


def tree_of(dataset_uri: str, models_uri: Path | str, **train: object) -> TrainTree:
    settings = {"epochs": 2, "global_batch_size": 24, "num_streams": 6, "checkpoint_every_steps": 2, **train}
    return TrainTree(
        dataset=DatasetConfig(uri=dataset_uri),
        models=ModelsConfig(uri=str(models_uri)),
        train=TrainConfig(**settings),
    )


@pytest.fixture
def dataset_uri(tmp_path) -> str:
    return make_dataset(tmp_path)


@pytest.mark.parametrize(
    "free",
    [
        {"launcher": "local", "strategy": "horovod", "num_workers": 3},
        {"format": "tfrecord", "reading": {"threads": 5, "prefetch_bytes": 1}},
        {"record_samples": True, "watch": {"silent_seconds": 1}, "checkpoint": {"keep": 9}},
        {"checkpoint_every_steps": 7},
    ],
)
def test_a_training_is_the_same_however_it_is_run(free):
    assert training_id(TrainConfig(**free), "/data", "") == training_id(TrainConfig(), "/data", "")


@pytest.mark.parametrize(
    "other",
    [
        {"standardize": False},
        {"seed": 1},
        {"learning_rate": 2e-3},
        {"model": "resnet50"},
        {"augment": {"random_flip": True}},
    ],
)
def test_a_training_is_another_where_the_outcome_may_be(other):
    assert training_id(TrainConfig(**other), "/data", "") != training_id(TrainConfig(), "/data", "")
    assert training_id(TrainConfig(), "/other", "") != training_id(TrainConfig(), "/data", "")
    assert training_id(TrainConfig(), "/data", "source") != training_id(TrainConfig(), "/data", "")


@pytest.mark.starts("ranks")
def test_a_finished_training_is_not_done_again(dataset_uri, tmp_path):
    tree = tree_of(dataset_uri, tmp_path / "models")
    with pytest.raises(UsageError, match=r"no finished training.*repeat the --set options.*runs/ID/config\.toml"):
        finished_training(tree)
    first = train_model(tree, Recorder())
    recorder = Recorder()
    second = train_model(tree, recorder)
    assert (first.skipped, second.skipped) == (False, True)
    assert second.result == first.result == finished_training(tree).result
    # The summary shows how it was trained, not how it would be planned today.
    other = tree.model_copy(update={"train": tree.train.model_copy(update={"strategy": "mirrored"})})
    for skipped in (train_model(other, Recorder()), finished_training(other)):
        section = train_record(skipped).sections["train"]
        assert section["strategy"] == "single" and "; single: one worker; inline: " in section["strategy_reason"]
    assert recorder.steps == []
    # Other settings are another training.
    assert not train_model(tree_of(dataset_uri, tmp_path / "models", seed=1), RunLog(SilentObserver())).skipped


def test_a_run_trains_its_own_version_and_tells_of_an_older_one_that_is_unfinished(dataset_uri, tmp_path):
    whole = Recorder()
    expected = train_model(tree_of(dataset_uri, tmp_path / "never_stopped", epochs=1), whole).result
    tree = tree_of(dataset_uri, tmp_path / "models", epochs=1, backend="keras")
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree, Recorder(fail_after_steps=3))

    # Meanwhile the dataset grows.
    write_images(tmp_path / "images", num_images=180)
    build_here(str(tmp_path / "images"), dataset_uri, ETL)
    latest = open_dataset(dataset_uri).pin
    assert latest.version == 2
    choice = choose_training(open_store(tmp_path / "models"), tree.train, latest)
    assert (choice.dataset, choice.result, choice.unfinished_versions) == (latest, None, (1,))

    # The same command again trains the version that it finds, and says what is left over and how to finish it.
    newer = Recorder()
    assert train_model(tree, newer).result.dataset == latest
    assert newer.fields["unfinished"] == {"rank": 0, "version": 1, "dataset": f"{dataset_uri}@1", "trains": 2}
    assert "resumed" not in newer.events

    # Somebody who asks for the older version goes on where its last checkpoint is, and ends as if nothing had been.
    rest = Recorder()
    resumed = train_model(tree_of(f"{dataset_uri}@1", tmp_path / "models", epochs=1), rest).result
    assert "resumed" in rest.events
    assert rest.steps == whole.steps[2:]
    assert (resumed.dataset.version, resumed.weights_sha256) == (1, expected.weights_sha256)
    assert choose_training(open_store(tmp_path / "models"), tree.train, latest).unfinished_versions == ()


def test_a_missing_shard_is_named_before_anything_starts(dataset_uri, tmp_path):
    shard = next(Path(dataset_uri, "shards", "train").glob("*.parquet"))
    shard.unlink()
    recorder = Recorder()
    with pytest.raises(IntegrityError, match=shard.name.split(".")[0]):
        train_model(tree_of(dataset_uri, tmp_path / "models"), recorder)
    assert (recorder.steps, recorder.events) == ([], [])


@pytest.mark.parametrize(
    ("key", "given", "meant"), [("launcher", "lokal", "local"), ("strategy", "horovodd", "horovod")]
)
def test_a_wrong_name_is_refused_with_the_one_that_was_meant(key, given, meant):
    with pytest.raises(ValidationError, match=f"did you mean '{meant}'"):
        TrainConfig(**{key: given})


def test_what_cannot_run_is_refused_before_anything_starts(dataset_uri, tmp_path):
    tree = tree_of(dataset_uri, tmp_path / "models", num_workers=2, launcher="local", strategy="single")
    with pytest.raises(UsageError, match="'single' with train.num_workers = 2"):
        train_model(tree, RunLog(SilentObserver()))
    assert not (tmp_path / "models").exists()


def test_the_whole_story_with_models_in_a_bucket(dataset_uri, s3_bucket):
    tree = tree_of(dataset_uri, f"{s3_bucket}/models", epochs=1)
    for skipped in (False, True):
        outcome = train_model(tree, RunLog(SilentObserver()))
        exported = export_training(outcome.models_uri, tree.train, outcome.result, "run")
        promotion = promote_export(exported.models_uri, exported.export, tree.gate, "run")
        assert (outcome.skipped, exported.skipped, promotion.current) == (skipped, skipped, 1)
    image = next(Path(dataset_uri).parent.joinpath("images").rglob("*.png"))
    [prediction] = predict_images(f"{s3_bucket}/models", [str(image)])
    assert prediction.label.startswith("class_")


# --- as a command -----------------------------------------------------------------------------------------------------


@pytest.fixture
def config_file(tmp_path, dataset_uri) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(
        f"""
        [source]
        uri = "belongs to the ETL"
        [dataset]
        uri = "{dataset_uri}"
        [models]
        uri = "{tmp_path / "models"}"
        [train]
        epochs = 2
        global_batch_size = 24
        num_streams = 6
        record_samples = true
        """
    )
    return file


@pytest.fixture
def job(config_file, tmp_path, monkeypatch, capsys):
    """job(*arguments) -> exit code, stdout and stderr of train/job.py, in this process."""

    def run(*arguments: str) -> tuple[int, str, str]:
        given = ["train/job.py", "--config", str(config_file), "--workdir", str(tmp_path / "work"), *arguments]
        monkeypatch.setattr(sys, "argv", given)
        capsys.readouterr()
        with hearing_signals():
            code = main()
        return code, *capsys.readouterr()

    return run


def records_of(code: int, stdout: str, stderr: str) -> list[dict]:
    assert code == 0, stderr
    return [json.loads(line) for line in stdout.splitlines() if line.startswith("{")]


def test_each_stage_tells_what_it_did_and_skips_what_is_done(job, tmp_path):
    first = records_of(*job("--run-id", "one"))
    assert [(each["stage"], each["status"]) for each in first] == [
        ("train", "done"),
        ("export", "done"),
        ("promote", "done"),
    ]
    assert first[2]["sections"]["promotion"]["decision"] == "promoted"
    steps = [json.loads(line) for line in (tmp_path / "work/runs/one/steps.jsonl").read_text().splitlines()]
    assert [(step["epoch"], step["step"]) for step in steps] == [(epoch, step) for epoch in (0, 1) for step in range(4)]
    assert steps[-1]["loss_hex"] == first[0]["sections"]["train"]["final_loss_hex"]
    second = records_of(*job("--run-id", "two"))
    assert [each["status"] for each in second] == ["skipped", "skipped", "skipped"]
    trained, skipped = (each[0]["sections"]["train"] for each in (first, second))
    # The first step compiles, and is no figure.
    [times] = trained["rank_times"]
    assert (times["rank"], times["host"], times["num_steps"]) == (0, socket.gethostname(), len(steps) - 1)
    assert list(times["seconds"]) == ["input_wait", "compute", "allreduce", "checkpoint"]
    assert times["seconds"]["compute"] > 0
    # Of memory nothing is looked at where nothing is trained.
    reason, within, _ = trained["strategy_reason"].rpartition("; a rank may use ")
    assert within and trained["memory"].startswith("memory: ")
    assert skipped == {**trained, "rank_times": [], "memory": "", "strategy_reason": reason}
    assert second[2]["sections"]["promotion"]["decision"] == "already_current"


def test_it_stops_at_the_requested_step(job, tmp_path):
    assert [each["stage"] for each in records_of(*job("--until", "train"))] == ["train"]
    assert not (tmp_path / "models" / "exports").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--set", "train.epoch=3"], 2, "unknown config key train.epoch; did you mean train.epochs?"),
        (["--set", "train.global_batch_size=25"], 2, "nearest: 24"),
        (["--set", "dataset.uri=/nowhere"], 2, "there is no dataset at /nowhere"),
        (
            ["--set", "gate.min_accuracy=1", "--set", "train.learning_rate=1e-9", "--require"],
            9,
            "gate.min_accuracy = 1",
        ),
    ],
)
def test_an_error_is_one_line_and_its_exit_code(job, arguments, code, said):
    returned, _, stderr = job(*arguments)
    assert returned == code, stderr
    [line] = [line for line in stderr.splitlines() if line.startswith("ERROR")]
    assert line.startswith(f"ERROR {code}: ") and said in line


@pytest.mark.drill
@pytest.mark.parametrize("launch", [(sys.executable,), ("spark-submit", "--master", "local[2]")])
def test_as_a_command_it_runs_wherever_a_train_py_lies_and_under_spark_submit_ranks_are_tasks(
    config_file, tmp_path, launch
):
    (away := tmp_path / "away").mkdir()
    (away / "train.py").write_text("raise SystemExit('the wrong train')\n")
    command = [*launch, ROOT / "train/job.py", "--config", config_file, "--workdir", tmp_path / "work"]
    arguments = ["--run-id", "one", "--until", "train"]
    if launch[0] == "spark-submit":
        ranks = ["launcher=horovod_spark", "strategy=horovod", "num_workers=2"]
        arguments += ["--set=spark.master=local[1]", *(f"--set=train.{each}" for each in ranks)]
    environment = {**os.environ, "PYSPARK_PYTHON": sys.executable}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run([*map(str, command), *arguments], cwd=away, env=environment, capture_output=True, text=True)
    [record] = records_of(done.returncode, done.stdout, done.stderr)
    assert record["sections"]["train"]["world_size"] == (2 if launch[0] == "spark-submit" else 1)
    steps = [json.loads(line) for line in (tmp_path / "work/runs/one/steps.jsonl").read_text().splitlines()]
    of_epoch = [sample_id for step in steps if step["epoch"] == 0 for sample_id in step["sample_ids"]]
    num_rows = open_dataset(str(tmp_path / "dataset")).manifest.splits["train"].num_rows
    assert len(of_epoch) == len(set(of_epoch)) == num_rows
