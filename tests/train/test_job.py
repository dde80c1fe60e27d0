"""The story of training: what is trained on which version, what is resumed or skipped, `train/job.py` as a command."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from shardmill.checksummed import with_checksum
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import IntegrityError, SecurityRefusal, TrainingError, UsageError
from shardmill.jobs.config import ModelsConfig, SparkConfig
from shardmill.jobs.observer import WARNING, SilentObserver
from shardmill.stores import open_store
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.train.driver_process import hearing_signals
from tests.train.training import ETL, DriverRecorder, tree_of
from train.backends.keras.runtime import standardize
from train.backends.model_spec import InputScale, model_spec
from train.config import TrainConfig
from train.contracts.values import RESULT
from train.job import main
from train.models.user import framework_of, imported_packages, source_sha256
from train.planning.checks import window_memory
from train.planning.plan import TrainingPlan, keep_plan
from train.planning.setup import Setup, resolve
from train.planning.trainings import PlanRecord, as_begun, choose_training, read_plan, training_id
from train.published.export import export_training
from train.published.gate import promote_export
from train.published.predict import predict_images
from train.reporting.run_log import RunLog
from train.results import read_result
from train.settings import ReadingConfig
from train.stage_record import train_record
from train.strategies import mesh_of
from train.training import finished_training, train_model
from train.tree import TrainTree

ROOT = Path(__file__).parents[2]


@pytest.fixture
def dataset_uri(tmp_path) -> str:
    return make_dataset(tmp_path)


@pytest.mark.needs("horovod")
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
    first = train_model(tree, DriverRecorder())
    recorder = DriverRecorder()
    second = train_model(tree, recorder)
    assert (first.skipped, second.skipped) == (False, True)
    assert second.result == first.result == finished_training(tree).result
    # The summary shows how it was trained, not how it would be planned today.
    other = tree.model_copy(update={"train": tree.train.model_copy(update={"strategy": "mirrored"})})
    for skipped in (train_model(other, DriverRecorder()), finished_training(other)):
        section = train_record(skipped).sections["train"]
        assert section["strategy"] == "single" and "; single: one worker; inline: " in section["strategy_reason"]
    assert recorder.steps == []
    # Other settings are another training.
    assert not train_model(tree_of(dataset_uri, tmp_path / "models", seed=1), RunLog(SilentObserver())).skipped


def test_each_question_about_a_training_is_asked_once(dataset_uri, tmp_path):
    questions = {each.__code__: each.__name__ for each in (resolve, mesh_of, imported_packages, framework_of)}
    asked: Counter[str] = Counter()

    def count(frame, event: str, _) -> None:
        if event == "call" and frame.f_code in questions:
            asked[questions[frame.f_code]] += 1

    sys.setprofile(count)
    try:
        train_model(tree_of(dataset_uri, tmp_path / "models", epochs=1), DriverRecorder())
    finally:
        sys.setprofile(None)
    assert asked == dict.fromkeys(questions.values(), 1)


def test_a_run_trains_its_own_version_and_reports_an_older_unfinished_one(dataset_uri, tmp_path):
    whole = DriverRecorder()
    expected = train_model(tree_of(dataset_uri, tmp_path / "never_stopped", epochs=1), whole).result
    tree = tree_of(dataset_uri, tmp_path / "models", epochs=1, backend="keras")
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree, DriverRecorder(fail_after_steps=3))

    # Meanwhile the dataset grows.
    write_images(tmp_path / "images", num_images=180)
    build_here(str(tmp_path / "images"), dataset_uri, ETL)
    latest = open_dataset(dataset_uri).pin
    assert latest.version == 2
    choice = choose_training(open_store(tmp_path / "models"), tree.train, latest)
    assert (choice.dataset, choice.result, choice.unfinished_versions) == (latest, None, (1,))

    # The same command again trains the version that it finds, and says what is left over and how to finish it.
    newer = DriverRecorder()
    assert train_model(tree, newer).result.dataset == latest
    assert newer.named("unfinished")[-1] == {"rank": 0, "version": 1, "dataset": f"{dataset_uri}@1", "trains": 2}
    assert "resumed" not in newer.names

    # Somebody who asks for the older version goes on where its last checkpoint is, and ends as if nothing had been.
    rest = DriverRecorder()
    resumed = train_model(tree_of(f"{dataset_uri}@1", tmp_path / "models", epochs=1), rest).result
    assert "resumed" in rest.names
    assert list(rest.losses.items()) == list(whole.losses.items())[2:]
    assert (resumed.dataset.version, resumed.weights_sha256) == (1, expected.weights_sha256)
    assert choose_training(open_store(tmp_path / "models"), tree.train, latest).unfinished_versions == ()


def test_a_missing_shard_is_named_before_anything_starts(dataset_uri, tmp_path):
    shard = next(Path(dataset_uri, "shards", "train").glob("*.parquet"))
    shard.unlink()
    recorder = DriverRecorder()
    with pytest.raises(IntegrityError, match=shard.name.split(".")[0]):
        train_model(tree_of(dataset_uri, tmp_path / "models"), recorder)
    assert (recorder.steps, recorder.names) == ([], [])


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


def test_each_stage_reports_what_it_did_and_skips_what_is_done(job, tmp_path):
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
        (["--set", "gate.min_accuracy=1", "--set", "train.learning_rate=1e-9", "--require"], 9,
         "gate.min_accuracy = 1"),
    ],
)  # fmt: skip
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


FACTORY = """
import keras
import {helper}
def model(image_shape, num_classes):
    layers = [keras.layers.Flatten(), keras.layers.Activation("{activation}"), keras.layers.Dense(num_classes)]
    return keras.Sequential([keras.Input(image_shape), *layers])
"""


@pytest.fixture
def factory(tmp_path, monkeypatch):
    """factory(activation) -> (over)writes a user's model, as an editor does, and gives its name."""
    module = f"users_model_{os.getpid()}_{random.randrange(10**9)}"
    helper = f"{module}_helper"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"{helper}.py").write_text("")

    def write(activation: str = "relu") -> str:
        (tmp_path / f"{module}.py").write_text(FACTORY.format(helper=helper, activation=activation))
        sys.modules.pop(module, None)
        return f"{module}:model"

    return write


def test_the_source_of_a_model_is_its_module_and_what_lies_beside_it(factory, tmp_path):
    name = factory()
    helper = tmp_path / f"{name.partition(':')[0]}_helper.py"
    before = source_sha256(name)
    assert before == source_sha256(name)
    helper.write_text("WIDTH = 3\n")
    with_helper = source_sha256(name)
    # Of another length: Python takes the compiled file of a source that was edited within the second at equal size.
    factory("sigmoid")
    assert len({before, with_helper, source_sha256(name)}) == 3
    assert source_sha256("small_cnn") == ""
    with pytest.raises(UsageError, match="there is no module 'no_such.module'"):
        source_sha256("no_such.module:model")


def test_the_source_of_a_package_covers_relative_imports(tmp_path, monkeypatch):
    package = tmp_path / "users_package" / "nets"
    package.mkdir(parents=True)
    for file, text in {
        "__init__.py": "",
        "net.py": "from . import blocks\nfrom ..common import width",
        "blocks.py": "",
    }.items():
        (package / file).write_text(text)
    (package.parent / "common.py").write_text("width = 1")
    (package.parent / "unused.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    seen = set()
    for file in ("nets/net.py", "nets/blocks.py", "common.py", "nets/__init__.py"):
        with open(package.parent / file, "a") as text:
            text.write("\n")
        seen.add(source_sha256("users_package.nets.net:model"))
    assert len(seen) == 4
    (package.parent / "unused.py").write_text("changed")
    assert source_sha256("users_package.nets.net:model") in seen


@pytest.mark.starts("program")
def test_finding_the_source_imports_nothing(tmp_path):
    (tmp_path / "heavy_model.py").write_text("import tensorflow\nraise SystemExit(1)\n")
    code = (
        "import sys; from train.models.user import source_sha256; print(source_sha256('heavy_model:f'));"
        "assert not {'tensorflow', 'keras', 'heavy_model'} & sys.modules.keys()"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and len(done.stdout.strip()) == 64, done.stderr


def test_an_edited_factory_is_another_model(tiny_uri, tmp_path, factory):
    """No layer's weights change their shape: only the model's own words tell the difference."""
    tree = tree_of(tiny_uri, tmp_path / "models", model=factory("relu"), epochs=1)
    first = train_model(tree, DriverRecorder())
    assert train_model(tree, DriverRecorder()).skipped
    # Of another length: Python takes the compiled file of a source that was edited within the second at equal size.
    factory("sigmoid")
    with pytest.raises(UsageError, match="a different model than train.model = .* builds now: source of train.model"):
        export_training(first.models_uri, tree.train, first.result, "run")
    second = train_model(tree, DriverRecorder())
    assert not second.skipped and second.result.training_dir != first.result.training_dir
    assert second.result.model.config_sha256 != first.result.model.config_sha256


@pytest.fixture(scope="module")
def finished_once(tiny_uri, tmp_path_factory) -> TrainTree:
    """A finished training: its tree. To be read only."""
    tree = tree_of(tiny_uri, tmp_path_factory.mktemp("finished"), schedule="constant")
    train_model(tree, DriverRecorder())
    return tree


@pytest.fixture
def finished(finished_once, tmp_path) -> TrainTree:
    """The tree of a copy of it, to work in."""
    models = shutil.copytree(finished_once.models.uri, tmp_path / "models")
    return finished_once.model_copy(update={"models": ModelsConfig(uri=str(models))})


def result_file(tree: TrainTree) -> Path:
    return Path(tree.models.uri, train_model(tree, DriverRecorder()).result.training_dir, RESULT)


def test_a_result_with_any_bit_flipped_is_refused_and_never_trained_again(finished):
    file = result_file(finished)
    good = file.read_bytes()
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    places = random.Random(seed).sample(range(len(good) * 8), 60)
    for place in places:
        altered = bytearray(good)
        altered[place // 8] ^= 1 << place % 8
        file.write_bytes(altered)
        observer = DriverRecorder()
        with pytest.raises(IntegrityError, match=r"result.json was altered"):
            train_model(finished, observer)
        assert not observer.steps
    file.write_bytes(good[:100])
    with pytest.raises(IntegrityError, match=r"result.json was altered"):
        train_model(finished, DriverRecorder())


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"checkpoint": "../../other"}, SecurityRefusal),
        ({"last_checkpoint": "/etc"}, SecurityRefusal),
        ({"training_dir": "trainings/another"}, IntegrityError),
    ],
)
def test_a_result_whose_paths_lead_elsewhere_is_refused(finished, tmp_path, change, error):
    body = json.loads(result_file(finished).read_bytes())["body"]
    folder = body["training_dir"]
    open_store(tmp_path).put(f"{folder}/{RESULT}", with_checksum(json.dumps({**body, **change}).encode()))
    with pytest.raises(error):
        read_result(open_store(tmp_path), folder)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_more_epochs_continue_a_finished_training(tiny_uri, tmp_path, schedule):
    base = {"schedule": schedule, "optimizer": "sgd", "learning_rate": 0.01, "export": "last"}
    short = train_model(tree_of(tiny_uri, tmp_path / "models", **base), DriverRecorder()).result
    kept = {path: path.read_bytes() for path in (tmp_path / "models").rglob("*.*") if path.is_file()}
    rest, whole = DriverRecorder(), DriverRecorder()
    longer = train_model(tree_of(tiny_uri, tmp_path / "models", epochs=4, **base), rest).result
    expected = train_model(tree_of(tiny_uri, tmp_path / "whole", epochs=4, **base), whole).result
    assert {step.epoch for step in rest.steps} == {2, 3}
    assert longer.continued_from == short.last_checkpoint and expected.continued_from == ""
    assert [record.epoch for record in longer.history] == [0, 1, 2, 3]
    # A constant rate does not know how long it is: continued is as never stopped. A cosine does, and the event says so.
    assert (longer.weights_sha256 == expected.weights_sha256) == (schedule == "constant")
    [told] = rest.named("continues")
    assert ("new length" in told["note"]) == (schedule == "cosine")
    # The shorter training is still there, untouched, and found again.
    assert all(path.read_bytes() == data for path, data in kept.items())
    again = train_model(tree_of(tiny_uri, tmp_path / "models", **base), DriverRecorder())
    assert again.skipped and again.result == short


def test_other_weights_of_a_finished_training_cost_no_step(finished):
    last = finished.model_copy(update={"train": finished.train.model_copy(update={"export": "last"})})
    observer = DriverRecorder()
    outcome = train_model(last, observer)
    assert (outcome.skipped, outcome.result.exported, observer.steps) == (False, "last", [])
    assert outcome.result.weights_epoch == finished.train.epochs - 1


def test_a_fresh_training_starts_anew_once_for_each_run_that_asks(tiny_uri, tmp_path):
    tree = tree_of(tiny_uri, tmp_path / "models", epochs=1)
    first = train_model(tree, DriverRecorder())
    observer = DriverRecorder()
    fresh = train_model(tree, observer, fresh_for="run-1")
    assert not fresh.skipped and observer.steps[0].step == 0
    assert fresh.result.weights_sha256 == first.result.weights_sha256
    assert read_result(open_store(tree.models.uri), first.result.training_dir) == first.result
    # Its retry finds it, a later run without the wish takes the newest, and another wish is another training.
    for fresh_for in ("run-1", ""):
        again = train_model(tree, DriverRecorder(), fresh_for=fresh_for)
        assert again.skipped and again.result == fresh.result
    other = train_model(tree, DriverRecorder(), fresh_for="run-2")
    assert not other.skipped and other.result.training_dir > fresh.result.training_dir


@pytest.mark.needs("horovod")
def test_the_windows_of_a_rank_are_what_must_fit_the_budget(tiny_uri, tmp_path):
    dataset = open_dataset(tiny_uri)
    chunk = dataset.index("train").max_chunk_bytes
    reading = ReadingConfig(window_budget_bytes=8 * chunk)
    config = TrainConfig(num_streams=64, num_workers=8, reading=reading, strategy="horovod")
    memory = window_memory(resolve(config, SparkConfig(), dataset))
    assert (memory.streams_per_rank, memory.window_chunks, memory.bytes_per_rank) == (8, 1, 8 * chunk)
    # Of more than 8 ranks, each shuffles within all of its budget.
    many = window_memory(resolve(config.model_copy(update={"num_workers": 64}), SparkConfig(), dataset))
    assert (many.streams_per_rank, many.window_chunks, many.bytes_per_rank) == (1, 8, 8 * chunk)
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=24, num_workers=2, reading=reading,
                   strategy="horovod", launcher="local")  # fmt: skip
    observer = DriverRecorder()
    with pytest.raises(UsageError, match=rf"12 of 24 streams needs 12 x 1 chunk.* to {chunk} bytes.*num_workers to 3 "):
        train_model(tree, observer)
    assert not (tmp_path / "models").exists() and observer.events == []


@pytest.mark.needs("horovod")
def test_a_training_keeps_its_window_on_other_ranks(tiny_uri, tmp_path):
    dataset, store = open_dataset(tiny_uri), open_store(tmp_path)
    reading = ReadingConfig(window_budget_bytes=4 * dataset.index("train").max_chunk_bytes)

    def set_up(num_workers: int, begun: PlanRecord | None = None) -> Setup:
        asked = TrainConfig(num_streams=16, num_workers=num_workers, strategy="horovod", launcher="local",
                            reading=reading)  # fmt: skip
        setup = as_begun(resolve(asked, SparkConfig(), dataset), begun)
        return setup.with_window(window_memory(setup).window_chunks)

    first = set_up(16)
    keep_plan(store, "t", TrainingPlan(first))
    fewer, anew = set_up(2, read_plan(store, ["t"])), set_up(4)
    assert [each.config.reading.window_chunks for each in (first, fewer, anew)] == [4, 4, 1]
    assert fewer.config.plan_spec(dataset) == first.config.plan_spec(dataset)
    assert len({training_id(each.identity_config, "d", "") for each in (first, fewer, anew)}) == 1
    told = window_memory(fewer).as_fields()[WARNING]
    assert "windows of 4 chunks, with which this training began, take" in told and "on a rank with 8 streams" in told
    assert WARNING not in window_memory(first).as_fields()


def test_the_budget_is_reported(finished):
    observer = DriverRecorder()
    tree = finished.model_copy(update={"train": finished.train.model_copy(update={"seed": 5, "epochs": 1})})
    train_model(tree, observer)
    [told] = observer.named("plan")
    assert told["window_chunks"] > 10, "more than there are"
    assert told["bytes_per_rank"] == told["split_bytes"] < told["streams_per_rank"] * told["chunk_bytes"] * 10
    assert told["budget_bytes"] == tree.train.reading.window_budget_bytes


def test_without_standardize_the_model_gets_pixels(tiny_uri):
    manifest = open_dataset(tiny_uri).manifest
    scaled = model_spec(manifest, TrainConfig(standardize=True)).scale
    assert (scaled.mean, scaled.std) == (manifest.channel_mean, manifest.channel_std)
    raw = model_spec(manifest, TrainConfig(standardize=False)).scale
    images = np.arange(12, dtype=np.uint8).reshape(1, 2, 2, 3)
    assert np.array_equal(np.asarray(standardize(images, raw)), images.astype(np.float32))


def test_each_channel_is_standardized_by_its_own_mean_and_deviation():
    scale = InputScale((120.1, 99.7, 3.0), (60.3, 70.9, 7.0))
    images_NHWC = np.arange(2 * 4 * 5 * 3, dtype=np.uint8).reshape(2, 4, 5, 3)
    expected = (images_NHWC.astype(np.float32) - np.float32(scale.mean)) / np.float32(scale.std)
    assert np.array_equal(np.asarray(standardize(images_NHWC, scale)), expected)


def test_a_damaged_shorter_training_blocks_no_longer_one(finished):
    file = result_file(finished)
    config = finished.train.model_copy(update={"epochs": finished.train.epochs + 1, "backend": "keras"})
    store, pin = open_store(finished.models.uri), open_dataset(finished.dataset.uri).pin
    assert choose_training(store, config, pin).continues is not None
    file.write_bytes(file.read_bytes()[:-1])
    choice, observer = choose_training(store, config, pin), DriverRecorder()
    choice.report(config, observer)
    assert choice.continues is None
    [fields] = observer.named("training_discarded")
    assert "result.json was altered" in fields["reason"]


@pytest.mark.needs("horovod")
def test_another_number_of_ranks_is_no_other_training_and_that_is_reported(finished):
    observer = DriverRecorder()
    more = finished.train.model_copy(update={"num_workers": 2, "strategy": "horovod", "launcher": "local"})
    assert train_model(finished.model_copy(update={"train": more}), observer).skipped
    assert [(told["world_size"], told["num_workers"]) for told in observer.named("other_world_size")] == [(1, 2)]
    assert observer.named("other_strategy") == [{"rank": 0, "trained_by": "single", "strategy": "horovod"}]
    again = DriverRecorder()
    assert train_model(finished, again).skipped and not again.named("other_world_size") + again.named("other_strategy")
