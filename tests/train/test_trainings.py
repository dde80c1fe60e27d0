"""The training that a job resumes: matched by the model's source and by length, and never a result that was altered."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardmill.checksummed import with_checksum
from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, SecurityRefusal, UsageError
from shardmill.jobs.config import ModelsConfig, SparkConfig
from shardmill.jobs.observer import WARNING
from shardmill.stores import open_store
from tests.train.training import DriverRecorder, tree_of
from train.backends.backend import InputScale, model_spec
from train.backends.keras.standardize import standardize
from train.config import TrainConfig
from train.models.user import source_sha256
from train.planning.make import plan_training
from train.planning.plan import TrainingPlan
from train.planning.preflight import window_memory
from train.planning.record import PlanRecord, keep_plan, read_plan
from train.planning.trainings import RESULT, choose_training, training_id
from train.published.export import export_training
from train.results import read_result
from train.settings.reading import ReadingConfig
from train.training import train_model
from train.tree import TrainTree

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


def test_the_windows_of_a_rank_are_what_must_fit_the_budget(tiny_uri, tmp_path):
    dataset = open_dataset(tiny_uri)
    chunk = dataset.index("train").max_chunk_bytes
    reading = ReadingConfig(window_budget_bytes=8 * chunk)
    config = TrainConfig(num_streams=64, num_workers=8, reading=reading, strategy="horovod")
    memory = window_memory(config, dataset)
    assert (memory.streams_per_rank, memory.window_chunks, memory.bytes_per_rank) == (8, 1, 8 * chunk)
    # Of more than 8 ranks, each shuffles within all of its budget.
    many = window_memory(config.model_copy(update={"num_workers": 64}), dataset)
    assert (many.streams_per_rank, many.window_chunks, many.bytes_per_rank) == (1, 8, 8 * chunk)
    tree = tree_of(tiny_uri, tmp_path / "models", num_streams=24, num_workers=2, reading=reading,
                   strategy="horovod", launcher="local")  # fmt: skip
    observer = DriverRecorder()
    with pytest.raises(UsageError, match=rf"12 of 24 streams needs 12 x 1 chunk.* to {chunk} bytes.*num_workers to 3 "):
        train_model(tree, observer)
    assert not (tmp_path / "models").exists() and observer.events == []


def test_a_training_keeps_its_window_on_other_ranks(tiny_uri, tmp_path):
    dataset, store, spark = open_dataset(tiny_uri), open_store(tmp_path), SparkConfig()
    reading = ReadingConfig(window_budget_bytes=4 * dataset.index("train").max_chunk_bytes)

    def planned(num_workers: int, begun: PlanRecord | None = None) -> TrainingPlan:
        asked = TrainConfig(num_streams=16, num_workers=num_workers, strategy="horovod", launcher="local",
                            reading=reading)  # fmt: skip
        plan = plan_training(asked, spark, dataset, begun)
        return plan.with_window(window_memory(plan.config, dataset).window_chunks)

    first = planned(16)
    keep_plan(store, "t", first, spark)
    fewer, anew = planned(2, read_plan(store, ["t"])), planned(4)
    assert [each.config.reading.window_chunks for each in (first, fewer, anew)] == [4, 4, 1]
    assert fewer.config.plan_spec(dataset) == first.config.plan_spec(dataset)
    assert len({training_id(each.named_by, "d", "") for each in (first, fewer, anew)}) == 1
    told = window_memory(fewer.config, dataset).as_fields()[WARNING]
    assert "windows of 4 chunks, with which this training began, take" in told and "on a rank with 8 streams" in told
    assert WARNING not in window_memory(first.config, dataset).as_fields()


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


def test_another_number_of_ranks_is_no_other_training_and_that_is_reported(finished):
    observer = DriverRecorder()
    more = finished.train.model_copy(update={"num_workers": 2, "strategy": "horovod", "launcher": "local"})
    assert train_model(finished.model_copy(update={"train": more}), observer).skipped
    assert [(told["world_size"], told["num_workers"]) for told in observer.named("other_world_size")] == [(1, 2)]
    assert observer.named("other_strategy") == [{"rank": 0, "trained_by": "single", "strategy": "horovod"}]
    again = DriverRecorder()
    assert train_model(finished, again).skipped and not again.named("other_world_size") + again.named("other_strategy")
