"""The choices of `auto`, a case for every row of the tables in docs/auto.md, and what `shardmill plan` says of them."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from pipeline.commands.plan import parse_bytes
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig, SparkApplicationConfig, SparkConfig
from tests.lab.commands import in_process
from tests.train.test_verdict import CASES as DIVISION_CASES
from tests.train.training import tree_of
from train.config import TrainConfig
from train.contracts.mesh import MeshShape
from train.launching import LAUNCHERS
from train.launching.side_process import ANSWERED_HERE
from train.launching.spark_slots import rank_slots_problem
from train.planning import setup
from train.planning.estimate import Pace, PaceTask, Shares, estimate_training
from train.planning.memory import Memory
from train.planning.memory_fit import FIT_RULES, MemoryFacts, MemoryRecord, fit
from train.planning.plan import TrainingPlan, keep_plan
from train.planning.setup import (
    FEW_STEPS,
    LAUNCHER_RULES,
    RANKS_RULES,
    Facts,
    choose,
    choose_ranks,
    resolve,
    strategy_rules,
)
from train.planning.shard import PARTS, begun_setup, division_rules, plan_memory
from train.planning.trainings import find_training, training_to_plan
from train.strategies import STRATEGIES
from train.tree import TrainTree

ALL = frozenset({*STRATEGIES.entries, *LAUNCHERS.entries})
ONE = Facts(
    num_workers=1, num_ranks=1, local_steps=1, backend="keras", is_keras_model=True, num_devices=0,
    spark_master="local[*]", installed=ALL,
)  # fmt: skip
FOUR = replace(ONE, num_workers=4, num_ranks=4)
SERVED = replace(ONE, num_ranks=3)
OPEN = replace(ONE, num_workers=0, num_ranks=0)
ON_YARN = replace(OPEN, spark_master="yarn", num_slots=8)
RANKS_CASES = [
    # Facts, row, ranks, and what must be among the words; 16 streams share 64 images of a step.
    (OPEN, "one", 1, "one process uses all devices of this machine"),
    (replace(OPEN, num_gpus=1), "one", 1, ""),
    (replace(OPEN, num_gpus=4), "gpus", 4, "this machine has 4 GPUs"),
    (replace(OPEN, num_gpus=6), "gpus", 4, "this machine has 6 GPUs, of which 4 get equal parts of train.num_streams"),
    (replace(OPEN, num_gpus=64), "gpus", 16, "of which 16 get equal parts"),
    (ON_YARN, "cluster", 8, "the Spark cluster yarn has slots for 8"),
    (replace(ON_YARN, num_gpus=2), "cluster", 8, ""),
    (replace(ON_YARN, may_use_cluster=False), "one", 1, ""),
    (replace(ON_YARN, num_slots=None, rank_slots_problem="it is new"), "unknown_cluster", 1, "it is new"),
    (replace(ON_YARN, num_steps=FEW_STEPS), "cluster", 8, ""),
    (replace(ON_YARN, num_steps=FEW_STEPS - 1), "few_steps", 1, "99 steps in total are too few"),
    (replace(OPEN, num_gpus=4, num_steps=5), "few_steps", 1, ""),
    (replace(OPEN, num_gpus=1, num_steps=5), "one", 1, ""),
    (replace(ON_YARN, num_slots=None, num_steps=5), "unknown_cluster", 1, ""),
    (replace(ON_YARN, only_one="train.launcher = 'inline'"), "one_unless_set", 1, "with train.launcher = 'inline'"),
    (replace(OPEN, mesh_ranks=2), "mesh", 2, "the sizes of train.mesh make 2 ranks"),
    (replace(ON_YARN, mesh_ranks=3, num_steps=5), "mesh", 6, ""),
    (replace(ON_YARN, num_named=3, num_steps=5), "named", 3, "has this many entries"),
    (replace(ON_YARN, num_started=3, num_steps=5), "started", 3, "an external launcher started this many"),
]  # fmt: skip
STRATEGY_CASES = [
    (replace(FOUR, axes=frozenset({"pipeline"})), "pipeline_parallel"),
    (replace(FOUR, axes=frozenset({"tensor", "fsdp"}), local_steps=4), "hybrid"),
    (replace(ONE, axes=frozenset({"tensor"})), "tensor_parallel"),
    (replace(FOUR, axes=frozenset({"fsdp"}), backend="torch"), "torch_fsdp"),
    (replace(FOUR, local_steps=4), "local_sgd"),
    (replace(ONE, num_devices=2), "mirrored"),
    (ONE, "single"),
    (replace(ONE, num_devices=1), "single"),
    (replace(ONE, num_devices=2, backend="torch"), "single"),
    (replace(FOUR, backend="torch"), "torch_ddp"),
    (FOUR, "horovod"),
    (replace(FOUR, installed=ALL - {"horovod"}), "multi_worker_mirrored"),
]
LAUNCHER_CASES = [
    (ONE, "inline"),
    (replace(ONE, backend="torch", is_keras_model=False), "inline"),
    (replace(ONE, backend="torch"), "local"),
    (replace(ONE, spark_master="spark://a:7077"), "inline"),
    (replace(FOUR, spark_master="spark://a:7077"), "spark_barrier"),
    (replace(FOUR, spark_master="yarn"), "spark_barrier"),
    (replace(FOUR, spark_master="yarn", installed=ALL - {"spark_barrier"}), "local"),
    (FOUR, "local"),
    (SERVED, "local"),
    (replace(SERVED, spark_master="yarn"), "spark_barrier"),
]
GIB = 2**30
# 64 images of 1 GiB each, in 20 GiB of which 4 are taken.
SHORT = MemoryFacts("one T4", 20 * GIB, fixed_bytes=4 * GIB, image_bytes=GIB, num_images=64)
# One image of 60 GiB, or of 2 GiB if activations are computed twice, which also needs a GiB more whatever the batch.
RECOMPUTED = replace(
    SHORT, device_bytes=21 * GIB, image_bytes=60 * GIB, recomputed_fixed_bytes=5 * GIB, recomputed_image_bytes=2 * GIB
)
short, twice = partial(replace, SHORT), partial(replace, RECOMPUTED)
FIT_CASES = [
    # Facts, choice, microbatches, and what must be among the words.
    (short(device_bytes=68 * GIB), "at_once", 1, "they fit"),
    (short(num_images=16), "at_once", 1, "16 images at once need 20.0 GiB (4.0 GiB for any batch size, 1.0"),
    (SHORT, "microbatches", 4, "train.accumulation_steps = 4, 16 images at a time need 20.0 GiB"),
    (short(may_change_precision=True), "microbatches", 4, "one T4 has 20.0 GiB"),
    # 24 images do not divide by 5: 6 microbatches of 4 where 5 images would fit.
    (short(device_bytes=9 * GIB, num_images=24), "microbatches", 6, "4 images at a time need 8.0 GiB"),
    (short(device_bytes=9 * GIB, num_images=24, max_microbatches=5), "too_large", 4, "6 images at a time still need"),
    (short(image_bytes=20 * GIB, may_change_precision=True), "bfloat16", 64, "1 images at a time with train.mi"),
    (short(max_microbatches=2, may_change_precision=True), "bfloat16", 2,
     "halve the memory of an image, need 20.0 GiB"),
    (short(max_microbatches=2), "too_large", 2,
     "set train.mixed_precision = 'auto' (chooses bfloat16, which starts a new run"),
    (short(max_microbatches=1), "too_large", 1, "need 68.0 GiB: a lower train.global_batch_size (starts a new run)"),
    (short(image_bytes=40 * GIB, may_change_precision=True), "too_large", 64, "smaller images or a smaller"),
    (short(fixed_bytes=21 * GIB), "too_large", 1,
     "64 images at a time still need 85.0 GiB: smaller images or a smaller model"),
    (RECOMPUTED, "activation_checkpointing", 8, "a step takes longer, and an image takes 2.0 GiB, need 21.0 GiB"),
    (twice(may_change_precision=True), "activation_checkpointing", 8, "smaller microbatches and bfloat16 alone"),
    (twice(max_microbatches=2), "too_large", 2, "(with recomputation, activations still take 2.0 GiB per"),
    (twice(max_microbatches=4, may_change_precision=True), "bfloat16_and_activation_checkpointing", 4,
     "an image takes 2.0 GiB in float32, need 21.0 GiB"),
    (short(max_microbatches=2, recompute_problem="so it is"), "too_large", 2, "are not recomputed: so it is)"),
    (short(image_bytes=40 * GIB, may_ask_to_recompute=True), "too_large", 64,
     "44.0 GiB: set train.memory.activation_checkpointing = 'on' (does not start a new run"),
    (short(fixed_bytes=21 * GIB, may_ask_to_recompute=True), "too_large", 1, "85.0 GiB: smaller images"),
    # The precision was changed by an earlier attempt.
    (twice(max_microbatches=4, is_halved=True), "bfloat16_and_activation_checkpointing", 4,
     "as chosen before the first step, and train.memory.activation_checkpointing = 'on': a step takes longer, and "
     "an image takes 2.0 GiB in float32, need 21.0 GiB"),
    (short(is_halved=True, num_images=32), "bfloat16", 1, "20.0 GiB in bfloat16 (4.0 GiB for any batch size"),
    (short(is_halved=True), "bfloat16", 2,
     "has 20.0 GiB: train.accumulation_steps = 2, 32 images at a time with train.mixed_precision = 'bfloat16', as "
     "chosen before the first step, need 20.0 GiB"),
    (short(is_halved=True, max_microbatches=1), "too_large", 1,
     "with train.mixed_precision = 'bfloat16', as chosen before the first step, still need 36.0 GiB"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "row", "num_ranks", "words"), RANKS_CASES)
def test_ranks(facts: Facts, row: str, num_ranks: int, words: str):
    assert next(rule.choice for rule in RANKS_RULES if rule.applies(facts)) == row
    found, because = choose_ranks(TrainConfig(num_streams=16, global_batch_size=64), facts)
    assert found == num_ranks and words in because and "{" not in because


def test_each_rank_has_enough_images_for_the_parts_of_its_step():
    config = TrainConfig(num_streams=16, global_batch_size=64, accumulation_steps=8)
    assert choose_ranks(config, replace(OPEN, num_gpus=16))[0] == 8


def test_no_more_ranks_are_chosen_than_there_are_rows():
    config = TrainConfig(num_streams=16, global_batch_size=64)
    found, because = choose_ranks(config, replace(OPEN, num_gpus=16, num_rows=7))
    assert found == 4 and because.endswith("of which 4 get equal parts of train.num_streams = 16 and of 7 rows")


@pytest.mark.parametrize(
    ("settings", "spark", "expected"),
    [
        ({}, {}, (1, "single", "inline")),
        ({"strategy": "horovod"}, {}, (1, "horovod", "inline")),
        # A Keras model on the PyTorch backend: a process can load only one Keras backend.
        ({"strategy": "torch_ddp"}, {}, (1, "torch_ddp", "local")),
        ({"rank_weights": (1.0, 2.0)}, {}, (2, "horovod", "local")),
        ({}, {"spark.executor.instances": "4"}, (4, "horovod", "spark_barrier")),
        ({"launcher": "local"}, {"spark.executor.instances": "4"}, (1, "single", "local")),
        ({"strategy": "mirrored"}, {"spark.executor.instances": "4"}, (1, "mirrored", "inline")),
        ({"epochs": 1}, {"spark.executor.instances": "4"}, (1, "single", "inline")),
        ({"local_sgd": {"local_steps": 2}}, {"spark.executor.instances": "4"}, (1, "local_sgd", "inline")),
        ({"strategy": "parameter_server"}, {"spark.executor.instances": "4"}, (1, "parameter_server", "spark_barrier")),
        ({"reader": "petastorm"}, {"spark.executor.instances": "4"}, (1, "single", "inline")),
    ],
)  # fmt: skip
def test_ranks_follow_from_the_config_the_cluster_and_the_dataset(tiny_uri, settings, spark, expected):
    section = SparkConfig(master="yarn" if spark else "local[*]", train=SparkApplicationConfig(conf=spark))
    asked = TrainConfig(**{"epochs": 1000, **settings})
    found = resolve(asked, section, open_dataset(tiny_uri)).config
    assert (found.num_workers, found.strategy, found.launcher) == expected
    if asked.epochs == 1:
        assert resolve(asked, section).config.num_workers == 4, "before there is a dataset"


@pytest.mark.parametrize("settings", [{"strategy": "torch_ddp"}, {"mesh": {"fsdp": 2}}], ids=str)
def test_gpus_are_those_of_the_framework_that_a_strategy_needs(settings, monkeypatch: pytest.MonkeyPatch):
    """TensorFlow's CPU build beside PyTorch sees none."""
    monkeypatch.setattr(setup, "gpus_here", lambda config, backend: ("gpu",) * 8 if backend == "torch" else ())
    assert resolve(TrainConfig(**settings), SparkConfig()).config.num_workers == 8


@pytest.mark.parametrize(
    ("master", "conf", "why"),
    [
        ("yarn", {}, "do not show how many executors yarn has (spark.executor.instances; or set train.num_workers)"),
        ("yarn", {"spark.executor.instances": "4", "spark.dynamicAllocation.enabled": "true"},
         (
             "adds and removes executors, which ranks cannot use (set spark.dynamicAllocation.enabled = false and "
             "spark.executor.ins"
         )),
        ("yarn", {"spark.task.resource.gpu.amount": "1", "spark.executor.instances": "4"},
         "do not show how many ranks yarn has GPUs for (spark.executor.cores; or"),
        ("spark://a:7077", {}, "how many executors spark://a:7077 has (spark.cores.max and spark.executor.cores; "),
        ("spark://a:7077", {"spark.cores.max": "8", "spark.executor.instances": "4"}, "has (spark.executor.cores; or"),
        ("spark://a:7077", {"spark.task.resource.gpu.amount": "1"}, "has GPUs for (spark.cores.max; or"),
        ("spark://a:7077", {"spark.cores.max": "2", "spark.executor.cores": "4"}, "spark://a:7077 has no slot for a"),
        ("spark://a:7077", {"spark.cores.max": "8", "spark.executor.cores": "4"}, ""),
        ("local[4]", {}, ""),
    ],
)  # fmt: skip
def test_why_the_slots_of_a_cluster_are_not_known(master: str, conf: dict[str, str], why: str):
    assert why in (rank_slots_problem(master, conf) or "") and bool(why) == bool(rank_slots_problem(master, conf))
    reason = resolve(TrainConfig(), SparkConfig(master=master, train=SparkApplicationConfig(conf=conf))).reason
    assert why in reason


@pytest.mark.parametrize(("facts", "strategy"), STRATEGY_CASES)
def test_strategies(facts: Facts, strategy: str):
    chosen, because = choose(strategy_rules(), facts, "train.strategy")
    assert chosen == strategy and "{" not in because


@pytest.mark.parametrize(("facts", "launcher"), LAUNCHER_CASES)
def test_launchers(facts: Facts, launcher: str):
    assert choose(LAUNCHER_RULES, facts, "train.launcher")[0] == launcher


def test_every_row_is_reached_by_a_case_and_stands_in_the_docs():
    table = (Path(__file__).parents[2] / "docs" / "auto.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    of_ranks = {rule.choice for rule in RANKS_RULES}
    tables = (RANKS_RULES, strategy_rules(), LAUNCHER_RULES, division_rules(), FIT_RULES)
    assert rows == [rule.choice for table in tables for rule in table]
    reached = {case[1] for case in RANKS_CASES}
    assert reached == of_ranks
    reached |= {name for _, name in (*STRATEGY_CASES, *LAUNCHER_CASES)}
    reached |= {case[1] for case in (*DIVISION_CASES, *FIT_CASES)}
    assert reached == set(rows)
    never = re.search(r"(.*) are never chosen", table)
    assert never is not None and set(re.findall(r"`(\w+)`", never[1])) == ALL - reached


@pytest.mark.parametrize(("facts", "choice", "num_microbatches", "words"), FIT_CASES)
def test_memory(facts: MemoryFacts, choice: str, num_microbatches: int, words: str):
    found = fit(facts)
    assert (found.choice, found.num_microbatches) == (choice, num_microbatches)
    assert (found.to_bfloat16, found.recomputes) == ("bfloat16" in choice, "activation_checkpointing" in choice)
    assert words in found.reason


def test_a_strategy_with_servers_gets_a_launcher_of_processes():
    chosen = resolve(TrainConfig(strategy="parameter_server"), SparkConfig()).config
    assert (chosen.num_workers, chosen.launcher, chosen.backend) == (1, "local", "keras")


@pytest.mark.needs("horovod")
def test_what_is_set_stays_and_what_is_resolved_stays_as_it_is():
    spark = SparkConfig()
    once = resolve(TrainConfig(num_workers=2, launcher="horovod_spark"), spark)
    assert (once.config.strategy, once.config.launcher, once.config.backend) == ("horovod", "horovod_spark", "keras")
    assert once.reason.startswith(
        "horovod: 2 TensorFlow workers, one grouped allreduce per step; horovod_spark: set by train.launcher ("
    )
    assert resolve(once.config, spark).config == once.config


def test_missing_packages_are_named():
    nothing = replace(FOUR, installed=frozenset({"local"}))
    with pytest.raises(UsageError):
        choose(strategy_rules(), nothing, "train.strategy")


@pytest.mark.needs("horovod")
def test_the_choice_is_said_in_short():
    chosen = resolve(TrainConfig(num_workers=2, strategy="horovod", launcher="local"), SparkConfig())
    assert chosen.in_short == "2 ranks (strategy horovod, launcher local): set by train.strategy"
    for config in (TrainConfig(), TrainConfig(num_workers=1)):
        assert len(resolve(config, SparkConfig()).in_short) <= 150


HERE = pytest.mark.usefixtures("asked_here")


@pytest.mark.parametrize("how", ["here", pytest.param("by processes", marks=pytest.mark.drill)])
def test_a_model_is_measured_and_nothing_is_trained(tiny_uri, tmp_path, how, request):
    if how == "here":
        request.getfixturevalue("asked_here")
    models = {"models": {"uri": str(tmp_path / "models")}}
    tree = TrainTree.model_validate(
        {**models, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig(), "train": {"global_batch_size": 24,
         "num_streams": 6, "num_workers": 4, "model": "tests.train.torch_models:linear"}}
    )  # fmt: skip
    planned = estimate_training(tree)
    assert (planned.strategy, planned.launcher, planned.backend) == ("torch_ddp", "local", "torch")
    assert (
        planned.cost.num_weights == (16 * 16 * 3 + 1) * 3 and planned.cost.weights_bytes == 4 * planned.cost.num_weights
    )
    # Weights, gradients and Adam's two moments, and a few bytes for the generators and the number of steps.
    assert 4 <= planned.cost.state_bytes / planned.cost.weights_bytes < 6
    rows = dict(planned.rows())
    assert rows["model"] == "2,307 weights, 9.0 KiB; trainable weights 9.0 KiB"
    assert planned.fit is None and rows["fit"].startswith("memory: the 8 images of a step take 24.0 KiB: ")
    assert planned.local_batch_size == 8, "of six streams with four images each, the largest rank has two"
    assert planned.speed.computed_images_per_second == pytest.approx(24 / planned.cost.step_seconds)
    assert "excluding the start of the ranks, their exchanges" in rows["speed"]
    assert not (tmp_path / "models").exists()


@HERE
def test_a_training_that_has_begun_is_planned_as_its_resume(tiny_uri, tmp_path):
    tree = tree_of(tiny_uri, tmp_path, model="tests.train.torch_models:linear")
    assert estimate_training(tree).strategy == "single"
    found = find_training(tree)
    then = {"num_workers": 2, "strategy": "torch_ddp", "launcher": "local"}
    begun = found.setup.changed({"ranks_reason": "there were 2 GPUs"}, **then)
    record = MemoryRecord(device="a T4", rank_bytes=2**30, host_bytes=0, on_gpu=False, fixed_bytes=1, image_bytes=2,
                          to_bfloat16=False)  # fmt: skip
    keep_plan(found.models, found.choice.training_dir, TrainingPlan(begun, Memory(record)))
    planned = estimate_training(tree)
    assert (planned.num_workers, planned.strategy, planned.launcher) == (2, "torch_ddp", "local")
    assert "2 ranks: as when this training began (there were 2 GPUs)" in planned.reason
    assert planned.fit is not None and "a T4 has 1.0 GiB" in planned.fit.reason
    assert plan_memory(tree, 2**30).choice == "torch_ddp"
    assert begun_setup(training_to_plan(tree)).config.num_workers == 2, "a rehearsal starts these ranks"
    # Another question gets another answer.
    asked = tree.model_copy(update={"train": tree.train.model_copy(update={"num_workers": 1})})
    assert estimate_training(asked).strategy == "single"


@HERE
def test_the_predicted_speed_counts_input_and_validation(tiny_uri, tmp_path):
    train = {"global_batch_size": 24, "num_streams": 6, "epochs": 3, "model": "tests.train.torch_models:linear"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    planned = estimate_training(TrainTree.model_validate({**tree, "train": train}))
    speed = planned.speed
    assert speed.pace is not None and speed.training_seconds is not None
    pace = speed.pace
    assert 0 < pace.input_wait_seconds < pace.step_seconds and pace.validation_seconds > 0
    # The share is that of the figures beside it.
    said = re.search(r"input costs ([0-9.]+) of ([0-9.]+) ms, (\d+)%$", dict(planned.rows())["speed"])
    assert pace.cached_step_seconds > 0 and said
    cost, step, percent = map(float, said.groups())
    # One decimal of each is shown.
    assert percent == pytest.approx(100 * cost / step, abs=0.5 + 10 / step)
    assert step == round(1000 * pace.step_seconds, 1)
    epoch_seconds = planned.steps_per_epoch * pace.step_seconds + pace.validation_seconds
    first_seconds = pace.compile_seconds + pace.first_validation_seconds
    assert speed.training_seconds == pytest.approx(3 * epoch_seconds + first_seconds)
    num_rows = open_dataset(tiny_uri).manifest.splits["train"].num_rows
    assert speed.images_per_second == pytest.approx(3 * num_rows / speed.training_seconds)
    assert "validation; excluding the start of the ranks" in dict(planned.rows())["speed"]
    # Servers have each worker take a batch of its own: as many updates in a fraction of the time.
    assert Pace(5.0, 2.0, 0.0, 2.0, 1.0, 10.0).training_seconds(3, 100 / 4) == 5.0 + 3 * (25 * 2.0 + 10.0) + 1.0
    # Two ranks that compute the model together share the 1.5 seconds of computation, not the 0.5 of reading.
    halved = Shares.of(MeshShape(tensor=2))
    assert Pace(0.0, 2.0, 0.5, 1.5).training_seconds(1, 10, halved) == 10 * (0.5 + 0.75)
    # And the 6 of 10 seconds that validation computes; in a pipeline two halves of each batch pass two stages.
    validated = Pace(0.0, 2.0, 0.5, 1.5, 0.0, 10.0, 6.0)
    assert validated.training_seconds(1, 0, halved) == 4 + 6 / 2
    staged = Shares.of(MeshShape(pipeline=2))
    assert validated.training_seconds(1, 0, staged) == 4 + 6 * 3 / 4


@HERE
@pytest.mark.parametrize(("num_workers", "slower"), [(1, 1), (2, 1), (4, 2), (6, 3)])
def test_ranks_that_are_more_than_the_processors_here_take_turns(tiny_uri, tmp_path, monkeypatch, num_workers, slower):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1})
    alone = Pace(1.0, 2.0, 0.5, 1.5, 0.25, 10.0, 6.0)
    monkeypatch.setitem(ANSWERED_HERE, "train.planning.estimate", (PaceTask, lambda task: alone))
    train = {"global_batch_size": 24, "num_streams": 6, "num_workers": num_workers, "launcher": "local"}
    train["model"] = "tests.train.torch_models:linear"
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "train": train}
    planned = estimate_training(TrainTree.model_validate(tree))
    speed = planned.speed
    assert speed.pace is not None
    assert (speed.pace.step_seconds, speed.pace.validation_seconds) == (slower * 2.0, slower * 10.0)
    assert speed.training_seconds == slower * alone.training_seconds(speed.num_epochs, planned.steps_per_epoch)


@pytest.mark.parametrize(
    "strategy", ["single", "torch_ddp", pytest.param("torch_fsdp", marks=pytest.mark.starts("ranks"))]
)
def test_a_model_that_is_too_large_to_be_timed_here_is_refused_before_it_is_built(
    tiny_uri, tmp_path, strategy, request
):
    """Counted by another process once."""
    if strategy != "torch_fsdp":
        request.getfixturevalue("asked_here")
    train = {"strategy": strategy, "num_workers": 1 + (strategy != "single"), "model": "tests.train.torch_models:huge"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    with pytest.raises(
        UsageError,
        match=r"takes 18,\d{3}\.\d GiB, and this host has .* free; .* with --memory SIZE, .* nothing; or plan on",
    ):
        estimate_training(TrainTree.model_validate({**tree, "train": {"global_batch_size": 24, **train}}))


@HERE
def test_a_step_of_ranks_that_share_layers_is_theirs(tiny_uri, tmp_path):
    train = {"global_batch_size": 24, "num_workers": 2, "model": "tests.train.torch_models:tiny_vit"}
    tree = {"models": {"uri": str(tmp_path)}, "dataset": DatasetConfig(uri=tiny_uri), "spark": SparkConfig()}
    train |= {"strategy": "pipeline_parallel", "pipeline_parallel": {"num_microbatches": 6}}
    planned = estimate_training(TrainTree.model_validate({**tree, "train": train}))
    assert planned.speed.computed_images_per_second == pytest.approx(2 * 24 / planned.cost.step_seconds)
    step = dict(planned.rows())["step"]
    assert f"a part of 2 of the {1000 * planned.cost.step_seconds:.1f} ms of one rank (measured on" in step


@HERE
def test_the_command_prints_json_and_one_line_for_what_cannot_run(tiny_uri, tmp_path):
    wrong = in_process("plan", tiny_uri, "--set", "train.model=tests.train.torch_models:no_model", cwd=tmp_path)
    begun, error = wrong.stderr.splitlines()
    assert wrong.returncode == 2 and begun.startswith("plan: ") and "no_model" in error
    model = ("--set", "train.model=tests.train.torch_models:stateful")
    config = tmp_path / "flowers.toml"
    config.write_text(f'[dataset]\nuri = "{tiny_uri}"\n[models]\nuri = "{tmp_path}/models"\n'
                      '[train]\nmodel = "tests.train.torch_models:linear"\nnum_streams = 8\n')  # fmt: skip
    table = in_process("plan", str(config), "--world-size", "8", cwd=tmp_path)
    assert table.returncode == 0, table.stderr
    assert all(each in table.stdout for each in ("torch_ddp", "8 workers", "2,307 weights")), table.stdout
    done = in_process("plan", tiny_uri, "--json", "--world-size", "2", *model, cwd=tmp_path)
    document = json.loads(done.stdout)
    assert "local: in processes on one machine (" in document["reason"] and "spark.master" in document["reason"]
    # A batch norm's moving statistics, of which no gradient exists.
    assert document["cost"]["model_bytes"] > document["cost"]["weights_bytes"] > 0
    assert document["fit"] is None and document["fit_reason"] and document["images_per_second"] > 0
    assert document["mesh"]["data"] == 2


@pytest.mark.exhaustive
def test_strategies_are_compared_by_the_memory_of_ranks_that_do_not_exist(tiny_uri, tmp_path):
    """ViT-Base on four devices."""
    config = tmp_path / "flowers.toml"
    config.write_text(f'[dataset]\nuri = "{tiny_uri}"\n[train]\nmodel = "vit_base"\n')
    four = ("plan", str(config), "--world-size", "4")
    done = in_process(*four, "--memory", "80GB", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    rows = {row["strategy"]: row for row in document["strategies"]}
    assert {"torch_ddp", "zero1", "torch_fsdp", "tensor_parallel", "hybrid"} <= set(rows)
    assert not {"single", "horovod", "mirrored"} & set(rows), "those cannot train it on 4 ranks"
    assert document["memory_bytes"] == 80 * 10**9 and document["choice"] == "torch_ddp"
    assert "4 PyTorch workers, each with the whole model: parameters 324.7 MiB + " in document["reason"]
    assert {name: rows[name]["mesh"] for name in ("torch_ddp", "torch_fsdp", "tensor_parallel", "hybrid")} == {
        "torch_ddp": "data 4", "torch_fsdp": "fsdp 4", "tensor_parallel": "tensor 4", "hybrid": "fsdp 2 x tensor 2"
    }  # fmt: skip
    assert rows["torch_ddp"]["parameters"] == pytest.approx(4 * 85.1e6, rel=0.01)
    assert rows["torch_fsdp"]["optimizer"] == pytest.approx(2 * 4 * 85.1e6 / 4, rel=0.01)
    for row in rows.values():
        assert row["fits"] and row["activations"] > 0 and row["input"] > 0
        assert row["total"] == sum(row[part] for part in PARTS)

    eight = ("plan", str(config), "--world-size", "8")
    short = in_process(*eight, "--memory", "2 GB", cwd=tmp_path)
    assert short.returncode == 0, short.stderr
    title, header, *lines = short.stdout.splitlines()
    assert "vit_base, 8 ranks, 64 images of 16 x 16 x 3 a step" in title
    assert header.split("\t")[:3] == ["strategy", "mesh", "parameters"]
    assert header.endswith("fits in 2 GB (1.9 GiB)")
    verdicts = {line.split("\t")[0]: line.rpartition("\t")[2] for line in lines[:-1]}
    assert verdicts["torch_ddp"] == verdicts["zero1"] == "no" and verdicts["torch_fsdp"].startswith("yes")
    assert lines[-1].startswith("torch_fsdp: one device does not hold the model: parameters 324.7 MiB + ")
    assert "12 heads, and 8 ranks divide each layer" in short.stdout

    refused = in_process(*four, "--memory", "80 giga", cwd=tmp_path)
    assert refused.returncode == 2 and "expected a size in B, KB" in refused.stderr.splitlines()[-1]


def test_a_size_has_a_unit():
    for text, num_bytes in {"80GB": 80 * 10**9, "1.5 gib": 3 * 2**29, "1000 B": 1000, " 2kb ": 2000}.items():
        assert parse_bytes(text) == num_bytes
    for wrong in ("80", "0 GB", "80 giga", "GB", ""):
        with pytest.raises(UsageError, match=f"--memory {wrong}; expected a size in B, KB.* give for example 80GB"):
            parse_bytes(wrong)


@pytest.mark.starts("ranks")
def test_a_keras_model_is_measured_for_the_comparison(tiny_uri, tmp_path):
    done = in_process("plan", tiny_uri, "--world-size", "2", "--memory", "1GiB", "--json", cwd=tmp_path)
    rows = {row["strategy"]: row for row in json.loads(done.stdout)["strategies"]}
    assert {"horovod", "multi_worker_mirrored", "torch_ddp"} <= set(rows)
    horovod = rows["horovod"]
    # Of its twin, which is a module.
    assert 0 < rows["torch_fsdp"]["parameters"] < horovod["parameters"]
    assert horovod["parameters"] == horovod["gradients"] > 0 and horovod["activations"] > 0
    assert horovod["optimizer"] == pytest.approx(2 * horovod["parameters"], rel=0.1)
