"""Trainings that were begun by other rules than today's go on by those."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from shardmill.jobs.config import SparkConfig
from tests.train.training import DriverRecorder, Killed, check_terms, tree_of
from train.config import TrainConfig
from train.training import finished_training, train_model


class Dying(DriverRecorder):
    """Ends the training at its sixth step, as a crash would."""

    def step(self, step) -> None:
        super().step(step)
        if len(self.steps) == 6:
            raise Killed


def test_a_training_of_the_first_recipe_continues_by_its_rules(tiny_uri, tmp_path):
    """Its config does not name the recipe, and what `auto` stands for has changed since: images were mirrored, and SGD
    had no weight decay and Keras's momentum."""
    settings = {"optimizer": "sgd", "checkpoint_every_steps": 3}
    first = tree_of(tiny_uri, tmp_path / "models", **settings, recipe_version=1)
    expected = train_model(tree_of(tiny_uri, tmp_path / "whole", **settings, recipe_version=1), DriverRecorder()).result
    with pytest.raises(Killed):
        train_model(first, Dying())

    now, observer = tree_of(tiny_uri, tmp_path / "models", **settings), DriverRecorder()
    resumed = train_model(now, observer)
    assert resumed.result.weights_sha256 == expected.weights_sha256 and resumed.result.resumed_from is not None
    assert [told["training_dir"] for told in observer.named("first_recipe")] == [resumed.result.training_dir]
    assert finished_training(now).result == resumed.result
    # More epochs go on with it, too; --fresh begins by the rules of today, and is found from then on.
    more = now.model_copy(update={"train": now.train.model_copy(update={"epochs": 3})})
    assert train_model(more, DriverRecorder()).result.continued_from == resumed.result.last_checkpoint
    anew = train_model(now, DriverRecorder(), fresh_for="run-1").result
    assert anew.training_dir.split("/")[1] != resumed.result.training_dir.split("/")[1]
    assert train_model(now, DriverRecorder()).result == anew


def test_the_record_of_a_run_before_there_were_recipes_is_of_the_first():
    """It names every setting, among them those that its optimizer does not use."""
    [former, *_] = json.loads((Path(__file__).parent / "former_trainings.json").read_text(encoding="utf-8"))
    recorded = tomllib.loads(former["config_toml"])["train"] | {"momentum": 0.9, "weight_decay": 1e-4}
    recorded["augment"] = {"random_crop_padding": 4, "random_flip": True}
    del recorded["recipe_version"]
    config = TrainConfig.model_validate(recorded)
    assert config.recipe_version == 1
    check_terms(config, SparkConfig())
    assert TrainConfig.model_validate(TrainConfig().model_dump(mode="json")).recipe_version == 2
