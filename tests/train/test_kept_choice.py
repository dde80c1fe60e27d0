"""The choices of `auto` are kept by every resume with the same settings."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, TrainingError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from tests.train.test_job import Recorder, tree_of
from train.config import TrainConfig
from train.planning.auto import resolve
from train.planning.make import plan_training
from train.planning.plan import TrainingPlan
from train.planning.record import PLAN, keep_plan, read_plan
from train.stage_record import train_record
from train.strategies.options import MirroredOptions
from train.training import train_model

HERE = SparkConfig(master="local[2]")
TWO = TrainConfig(num_workers=2)
ANY = TrainConfig()


@pytest.fixture
def begun(tiny_uri, tmp_path, choice_of):
    """begun(plan, asked, spark) -> the plan of a resume that asks so, after a training was begun by `plan`."""
    _, _, choice, store = choice_of(tmp_path, tree_of(tiny_uri, tmp_path, num_workers=2))

    def again(plan: TrainingPlan, asked: TrainConfig = TWO, spark: SparkConfig = HERE) -> TrainingPlan:
        keep_plan(store, choice.training_dir, plan, HERE)
        return plan_training(asked, spark, None, read_plan(store, choice.folders))

    return again


def chosen_elsewhere() -> TrainingPlan:
    """On a machine without Horovod, which is here."""
    now = resolve(TWO, HERE)
    assert now.config.strategy == "horovod"
    return now.with_strategy("multi_worker_mirrored", "2 TensorFlow workers, and Horovod is not installed")


def test_a_resume_continues_with_what_was_chosen(begun):
    found = begun(chosen_elsewhere())
    assert found.config.strategy == "multi_worker_mirrored"
    assert "as when this training began (2 TensorFlow workers, and Horovod is not installed)" in found.reason
    # Its reason does not grow from resume to resume.
    assert begun(found) == found


def test_a_longer_training_continues_with_the_choice_of_the_shorter_one(tiny_uri, tmp_path, choice_of, whole):
    _, _, shorter, store = choice_of(tmp_path, tree_of(tiny_uri, tmp_path))
    keep_plan(store, shorter.training_dir, chosen_elsewhere(), HERE)
    longer = replace(shorter, training_dir="longer", continues=replace(whole, training_dir=shorter.training_dir))
    kept = read_plan(store, longer.folders)
    assert kept is not None and kept.strategy == "multi_worker_mirrored"
    # With a record of its own: the shorter one may be collected.
    keep_plan(store, longer.training_dir, chosen_elsewhere(), HERE)
    assert read_plan(store, [longer.training_dir]) == kept
    assert read_plan(store, ["other"]) is None


@pytest.mark.parametrize(
    ("asked", "spark", "strategy", "launcher"),
    [
        (TWO.model_copy(update={"strategy": "horovod"}), HERE, "horovod", "local"),
        (TWO.model_copy(update={"num_workers": 3}), HERE, "horovod", "local"),
        (TWO, SparkConfig(master="yarn"), "multi_worker_mirrored", "spark_barrier"),
    ],
    ids=["set by hand", "other workers", "another place"],
)
def test_another_question_gets_another_answer(begun, asked, spark, strategy, launcher):
    found = begun(chosen_elsewhere(), asked, spark)
    assert (found.config.strategy, found.config.launcher) == (strategy, launcher)


def test_ranks_that_were_chosen_stay_until_they_are_set_or_run_elsewhere(begun):
    kept = replace(chosen_elsewhere(), ranks_reason="this machine has 2 GPUs")
    alone = resolve(ANY, HERE).config
    assert (alone.num_workers, alone.strategy, alone.launcher) == (1, "single", "inline")
    found = begun(kept, ANY)
    assert (found.config.num_workers, found.config.strategy) == (2, "multi_worker_mirrored")
    assert found.reason.startswith("2 ranks: as when this training began (this machine has 2 GPUs); multi_worker_mirr")
    assert begun(kept, ANY.model_copy(update={"num_workers": 1})).config.strategy == "single"
    assert begun(kept, ANY, SparkConfig(master="local[3]")).config == alone
    # The one process of `inline` is set, so that two ranks cannot go on.
    found = begun(kept, ANY.model_copy(update={"launcher": "inline"}))
    assert found.config.num_workers == 1 and "began with 2 ranks" in found.chosen_anew


def test_a_plan_that_no_longer_runs_is_replaced_with_a_message(begun):
    found = begun(chosen_elsewhere(), TWO.model_copy(update={"compression": "fp16"}))
    assert found.config.strategy == "horovod"
    said = found.chosen_anew
    assert "began with 2 ranks, multi_worker_mirrored (local), which cannot run now: train.compression" in said


def test_a_training_keeps_its_choice_and_an_altered_one_is_refused(tiny_uri, tmp_path):
    tree = tree_of(tiny_uri, tmp_path / "models", epochs=1)
    with pytest.raises(TrainingError, match="stopped here"):
        train_model(tree, Recorder(fail_after_steps=1))
    [path] = (tmp_path / "models").rglob(PLAN)
    kept = path.read_bytes()
    assert b'"strategy":"single"' in kept and b'"strategy_reason":"one worker"' in kept
    path.write_bytes(kept.replace(b"single", b"double"))
    with pytest.raises(IntegrityError, match=f"{PLAN} was altered; .*; delete it: `auto` is then resolved again"):
        train_model(tree, Recorder())
    path.write_bytes(kept)
    outcome = train_model(tree, Recorder())
    assert path.read_bytes() == kept
    reason = train_record(outcome).sections["train"]["strategy_reason"]
    assert "all devices of this machine; single: one worker; inline: in this process (" in reason
    # One paragraph with what was looked at.
    assert re.search(
        "\\(no GPU and \\d+ processors here; one host, because spark.master = local\\[\\*\\]; \\d+ rows to", reason
    )
    assert re.search(
        r"train on: \d+ steps of \d+ images an epoch, \d+ in all\); trained weights take [\d.]+ KiB", reason
    )
    assert re.search("KiB with the optimizer's state; a rank may use [\\d.]+ GiB \\(", reason)
    memory = train_record(outcome).sections["train"]["memory"]
    assert re.fullmatch(
        "memory: the \\d+ images of a step take .* and 1,000 times that fits into .* GiB \\(.*\\)", memory
    )


def test_the_reason_has_the_numbers_that_were_looked_at(tiny_uri):
    dataset = open_dataset(tiny_uri)
    config = TrainConfig(epochs=1000, global_batch_size=32)
    num_rows = dataset.manifest.splits["train"].num_rows
    steps = f"{num_rows} rows to train on: {-(-num_rows // 32)} steps of 32 images an epoch, "
    assert steps in resolve(config, SparkConfig(), dataset).reason
    two = config.with_options(MirroredOptions(num_devices=2))
    assert "(2 device(s) and " in resolve(two, SparkConfig(), dataset).reason
    places = {"spark.executor.instances": "4", "spark.executor.cores": "1"}
    yarn = SparkConfig(master="yarn", train=SparkApplicationConfig(conf=places))
    assert "; spark.master = yarn with slots for 4 ranks; " in resolve(config, yarn, dataset).reason
    everything_set = TrainConfig(num_workers=1, strategy="single", launcher="inline")
    assert resolve(everything_set, SparkConfig(), dataset).numbers == ()
