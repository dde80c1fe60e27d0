"""Settings that have moved into sections: old names are refused with the new ones, and what is stored is still found.

Two files, each written by the last program before settings moved, hold for some trainings the `config.toml` of their
run, what their checkpoints recorded, and their ids: `former_trainings.json` when `[train.augment]` was the only section
in `[train]`, and `flat_trainings.json` when `[train.memory]`, `[train.reading]`, `[train.log]`, ... were not yet.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipeline.config_file import to_toml
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from train.checkpoints.checkpoint import TrainingIdentity
from train.config import TrainConfig
from train.contracts.values import DatasetPin, ModelIdentity
from train.identity import fields_of_settings, settings_that_matter
from train.planning.changes import check_allowed
from train.planning.trainings import training_id
from train.settings.moved import MOVED
from train.tree import TrainTree

FORMER: list[dict[str, Any]] = [
    former
    for name in ("former_trainings.json", "flat_trainings.json")
    for former in json.loads((Path(__file__).parent / name).read_text(encoding="utf-8"))
]
ALL = pytest.mark.parametrize("former", FORMER, ids=lambda former: ",".join(former["given"]) or "defaults")


def with_todays_names(given: dict[str, Any]) -> dict[str, Any]:
    # All of them had the usual number, whether it was given or not.
    values: dict[str, Any] = {"num_streams": 8}
    for former, value in given.items():
        section, dot, name = MOVED.get(former, former).rpartition(".")
        (values.setdefault(section, {}) if dot else values)[name] = value
    return values


@ALL
def test_a_training_keeps_its_id_and_its_record(former):
    config = TrainConfig.model_validate(with_todays_names(former["given"]))
    assert settings_that_matter(config) == former["settings"]
    assert training_id(config, "/data/photos", "0" * 64) == former["training_id"]


@ALL
def test_the_config_of_a_finished_run_still_works(former, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(former["config_toml"], encoding="utf-8")
    config = load_tree(TrainTree, file).train
    assert config == TrainConfig.model_validate(with_todays_names(former["given"]))
    # What is given beside it wins.
    other = load_tree(TrainTree, file, ("train.local_sgd.local_steps=7", "train.epochs=3")).train
    assert other.epochs == 3 and settings_that_matter(other)["local_steps"] == "7"
    # Today's record gives the same again.
    assert TrainConfig.model_validate(tomllib.loads(to_toml(config))) == config


@pytest.mark.parametrize("former", MOVED)
def test_a_former_name_is_refused_with_the_new_one(former, tmp_path):
    file = tmp_path / "config.toml"
    file.write_text(f"[train]\nepochs = 3\n{former} = 1\n", encoding="utf-8")
    said = rf"config key train\.{former} has moved; set train\.{MOVED[former]};"
    for source, overrides in ((file, ()), (None, (f"train.{former}=1",))):
        with pytest.raises(UsageError, match=said) as refused:
            load_tree(TrainTree, source, overrides)
        assert refused.value.exit_code == 2 and "\n" not in str(refused.value)


def test_every_new_name_is_a_setting():
    assert fields_of_settings().keys() >= set(MOVED.values())


def test_a_difference_is_named_as_it_is_set_now():
    pin, model = DatasetPin("/data", 1, "0" * 64), ModelIdentity("", "")
    then, now = (
        TrainingIdentity(pin, "plan", model, settings_that_matter(TrainConfig.model_validate(values)))
        for values in ({}, {"schedule": "step", "schedule_step": {"factor": 0.5}})
    )
    schedule, factor = 'train.schedule: then "cosine", now "step"', "train.schedule_step.factor: then 0.1, now 0.5"
    assert then.differences(now) == [schedule, factor]
    assert check_allowed(["train.schedule_step.factor"]) == ("schedule_step.factor",)
    assert then.differences(now, check_allowed(["schedule_step.factor"])) == [schedule]
    with pytest.raises(UsageError, match=r"--allow-change schedule_step_factor: .* expected schedule_step\.factor"):
        check_allowed(["schedule_step_factor"])
