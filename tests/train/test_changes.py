"""A wrong resume is refused with each difference; one that is safe goes on when it is allowed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.dataset.open import open_dataset
from shardmill.errors import TrainingError, UsageError
from shardmill.stores import open_store
from shardmill.values import Cursor
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.train.test_job import ETL, Recorder, tree_of
from train.identity import fields_of_settings, settings_of
from train.planning.changes import Again, BegunTraining, check_allowed
from train.settings.kinds import DURATION, EXECUTION, RESUMABLE
from train.training import train_model


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """begun(folder) -> a dataset's URI, its models and the run's file, in `folder`: stopped after 7 of 8 steps."""
    made = tmp_path_factory.mktemp("begun")
    uri = make_dataset(made)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree_of(uri, made / "models"), Recorder(fail_after_steps=7), again=Again(begun=file_of(made)))

    def copy(folder: Path) -> Path:
        shutil.copytree(made / "models", folder / "models")
        shutil.copy(made / "training.begun", folder)
        # The run's file names the models' root.
        text = (folder / "training.begun").read_text().replace(str(made), str(folder))
        (folder / "training.begun").write_text(text)
        return folder

    return uri, made, copy


def file_of(folder: Path) -> BegunTraining:
    return BegunTraining(open_store(folder), "training.begun")


def train(uri: str, folder: Path, recorder: Recorder | None = None, *, allow_change=(), is_run=True, **settings):
    again = Again(allow_change=tuple(allow_change), begun=file_of(folder) if is_run else None)
    return train_model(tree_of(uri, folder / "models", **settings), recorder or Recorder(), again=again)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"seed": 1}, ["train.seed: then 0, now 1"]),
        ({"global_batch_size": 30, "optimizer": "sgd"}, [
            "train.global_batch_size: then 24, now 30", 'train.optimizer: then "auto", now "sgd"',
        ]),
        ({"model": "resnet50"}, ['train.model: then "small_cnn", now "resnet50"']),
        ({"learning_rate": 0.01, "seed": 2}, ["train.learning_rate: then 0.001, now 0.01", "train.seed: then 0, now"]),
    ],
)  # fmt: skip
def test_the_same_run_with_other_settings_is_refused_with_each_difference(begun, tmp_path, settings, said):
    uri, _, copy = begun
    recorder = Recorder()
    with pytest.raises(UsageError) as caught:
        train(uri, copy(tmp_path), recorder, **settings)
    assert all(part in caught.value.what for part in said), caught.value
    assert "--fresh" in caught.value.fix and "--allow-change" not in caught.value.fix
    assert recorder.steps == []


def test_a_safe_change_continues_where_it_is_allowed_and_nowhere_else(begun, tmp_path):
    uri, _, copy = begun
    folder = copy(tmp_path)
    with pytest.raises(UsageError, match="resume from its last checkpoint with --allow-change learning_rate"):
        train(uri, folder, learning_rate=0.01)
    with pytest.raises(UsageError, match="train.seed: then 0, now 1"):
        train(uri, folder, learning_rate=0.01, seed=1, allow_change=["learning_rate"])
    recorder = Recorder()
    result = train(uri, folder, recorder, learning_rate=0.01, allow_change=["train.learning_rate"]).result
    assert recorder.fields["changed"]["changes"] == "train.learning_rate: then 0.001, now 0.01"
    assert result.resumed_from == Cursor(1, 2)
    assert recorder.steps[0][:2] == (1, 2) and result.num_epochs == 2
    # It is a training of its own now: the same command finds it done, and the older one can still go on.
    assert train(uri, folder, learning_rate=0.01, allow_change=["learning_rate"]).skipped
    assert not train(uri, folder, is_run=False).skipped


def test_another_run_starts_anew_unless_it_asks_to_continue(begun, tmp_path):
    uri, _, copy = begun
    folder = copy(tmp_path)
    # A longer one of other settings, from the middle of the shorter.
    recorder = Recorder()
    changes = {"label_smoothing": 0.1, "epochs": 3}
    result = train(uri, folder, recorder, is_run=False, allow_change=["label_smoothing,epochs"], **changes).result
    assert recorder.steps[0][:2] == (1, 2) and result.num_epochs == 3
    anew = Recorder()
    own = {"model": "tests.train.models_under_test:stateful", "freeze": ("all_but_head",), "unfreeze_epoch": 1}
    train(uri, folder, anew, is_run=False, epochs=1, **own)
    assert anew.steps[0][:2] == (0, 0)
    assert "the weights that train.freeze names stay frozen" in anew.fields["freeze"]["warning"]
    with pytest.raises(
        UsageError, match="differs only in these settings; the nearest, trainings/.*train.seed: then 0, now 5"
    ):
        train(uri, folder, is_run=False, seed=5, allow_change=["learning_rate"])


def test_the_command_continues_where_a_change_is_allowed(begun, tmp_path):
    uri, _, copy = begun
    settings = {"epochs": 2, "global_batch_size": 24, "num_streams": 6, "checkpoint_every_steps": 2}
    sets = [f"--set=train.{name}={value}" for name, value in {**settings, "learning_rate": 0.01}.items()]
    sets += [f"--set=models.uri={copy(tmp_path)}/models", f"--workdir={tmp_path}/work", "--json"]

    def invoke(*options: str) -> Result:
        return CliRunner().invoke(app, ["train", uri, *sets, *options])

    refused = invoke("--allow-change", "seed")
    assert refused.exit_code == 2 and "--allow-change seed" in refused.stderr, refused.output
    document = json.loads(invoke("--allow-change", "learning_rate").stdout)
    assert document["sections"]["train"]["resumed_from"] == {"epoch": 1, "step": 2}


def test_a_run_on_another_version_of_its_dataset_is_refused(tmp_path):
    uri = make_dataset(tmp_path)
    with pytest.raises(TrainingError, match="stopped here"):
        train(uri, tmp_path, Recorder(fail_after_steps=3))
    write_images(tmp_path / "images", num_images=180)
    build_here(str(tmp_path / "images"), uri, ETL)
    assert open_dataset(uri).pin.version == 2
    with pytest.raises(UsageError, match="dataset: then version 1, now version 2"):
        train(uri, tmp_path)
    assert train(f"{uri}@1", tmp_path).result.dataset.version == 1


def test_only_settings_that_are_declared_safe_can_be_allowed():
    assert check_allowed(["learning_rate,train.schedule", "epochs"]) == ("learning_rate", "schedule", "epochs")
    for name, said in (("seed", "is not safe to change"), ("sead", "is not a key of")):
        with pytest.raises(UsageError, match=rf"--allow-change {name}: it {said}.*augment, class_weights, early_stop"):
            check_allowed([name])
    # Those without a meaning make another training, and none of the data's or model's is safe.
    assert not settings_of(RESUMABLE) & (settings_of(EXECUTION) | settings_of(DURATION))
    decisive = {"model", "global_batch_size", "seed", "num_streams", "standardize", "optimizer"}
    decisive |= {"reading.window_budget_bytes"}
    assert not decisive & settings_of(RESUMABLE) and decisive <= fields_of_settings().keys()
