"""The choices of `auto`: a case for every row of the tables in docs/auto.md, and the rows themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from tests.train.test_divide import CASES as DIVISION_CASES
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.launching.spark_slots import why_no_places
from train.planning.auto import choose, choose_ranks, resolve, strategy_rules
from train.planning.auto_rules import FEW_STEPS, LAUNCHER_RULES, RANKS_RULES, Facts
from train.planning.divide import division_rules
from train.planning.memory_fit import FIT_RULES, MemoryFacts, fit
from train.strategies import STRATEGIES

ALL = frozenset({*STRATEGIES.entries, *LAUNCHERS.entries})
ONE = Facts(
    num_workers=1, num_ranks=1, local_steps=1, backend="keras", is_keras_model=True, num_devices=0,
    spark_master="local[*]", installed=ALL,
)  # fmt: skip
FOUR = replace(ONE, num_workers=4, num_ranks=4)
SERVED = replace(ONE, num_ranks=3)

OPEN = replace(ONE, num_workers=0, num_ranks=0)
ON_YARN = replace(OPEN, spark_master="yarn", num_places=8)

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
    (replace(ON_YARN, num_places=None, why_no_places="it is new"), "unknown_cluster", 1, "it is new"),
    (replace(ON_YARN, num_steps=FEW_STEPS), "cluster", 8, ""),
    (replace(ON_YARN, num_steps=FEW_STEPS - 1), "few_steps", 1, "99 steps in total are too few"),
    (replace(OPEN, num_gpus=4, num_steps=5), "few_steps", 1, ""),
    (replace(OPEN, num_gpus=1, num_steps=5), "one", 1, ""),
    (replace(ON_YARN, num_places=None, num_steps=5), "unknown_cluster", 1, ""),
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
    (
        short(max_microbatches=2, may_change_precision=True),
        "bfloat16",
        2,
        "halve the memory of an image, need 20.0 GiB",
    ),
    (
        short(max_microbatches=2),
        "too_large",
        2,
        "set train.mixed_precision = 'auto' (chooses bfloat16, which starts a new run",
    ),
    (short(max_microbatches=1), "too_large", 1, "need 68.0 GiB: a lower train.global_batch_size (starts a new run)"),
    (short(image_bytes=40 * GIB, may_change_precision=True), "too_large", 64, "smaller images or a smaller"),
    (
        short(fixed_bytes=21 * GIB),
        "too_large",
        1,
        "64 images at a time still need 85.0 GiB: smaller images or a smaller model",
    ),
    (RECOMPUTED, "activation_checkpointing", 8, "a step takes longer, and an image takes 2.0 GiB, need 21.0 GiB"),
    (twice(may_change_precision=True), "activation_checkpointing", 8, "smaller microbatches and bfloat16 alone"),
    (twice(max_microbatches=2), "too_large", 2, "(with recomputation, activations still take 2.0 GiB per"),
    (
        twice(max_microbatches=4, may_change_precision=True),
        "bfloat16_and_activation_checkpointing",
        4,
        "an image takes 2.0 GiB in float32, need 21.0 GiB",
    ),
    (short(max_microbatches=2, why_not_recomputed="so it is"), "too_large", 2, "are not recomputed: so it is)"),
    (
        short(image_bytes=40 * GIB, may_ask_to_recompute=True),
        "too_large",
        64,
        "44.0 GiB: set train.memory.activation_checkpointing = 'on' (does not start a new run",
    ),
    (short(fixed_bytes=21 * GIB, may_ask_to_recompute=True), "too_large", 1, "85.0 GiB: smaller images"),
    # The precision was changed by an earlier attempt.
    (
        twice(max_microbatches=4, is_halved=True),
        "bfloat16_and_activation_checkpointing",
        4,
        "as chosen before the first step, and train.memory.activation_checkpointing = 'on': a step takes longer, and "
        "an image takes 2.0 GiB in float32, need 21.0 GiB",
    ),
    (short(is_halved=True, num_images=32), "bfloat16", 1, "20.0 GiB in bfloat16 (4.0 GiB for any batch size"),
    (
        short(is_halved=True),
        "bfloat16",
        2,
        "has 20.0 GiB: train.accumulation_steps = 2, 32 images at a time with train.mixed_precision = 'bfloat16', as "
        "chosen before the first step, need 20.0 GiB",
    ),
    (
        short(is_halved=True, max_microbatches=1),
        "too_large",
        1,
        "with train.mixed_precision = 'bfloat16', as chosen before the first step, still need 36.0 GiB",
    ),
]


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
def test_why_the_places_of_a_cluster_are_not_known(master: str, conf: dict[str, str], why: str):
    assert why in why_no_places(master, conf) and bool(why) == bool(why_no_places(master, conf))
    reason = resolve(TrainConfig(), SparkConfig(master=master, train=SparkApplicationConfig(conf=conf))).reason
    assert why in reason


def test_a_setting_of_spark_that_is_no_number_is_named():
    conf = {"spark.executor.instances": "four"}
    with pytest.raises(UsageError, match=r"spark.executor.instances = 'four'.*expected a whole number"):
        resolve(TrainConfig(), SparkConfig(master="yarn", train=SparkApplicationConfig(conf=conf)))


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


def test_the_choice_is_said_in_short():
    chosen = resolve(TrainConfig(num_workers=2, strategy="horovod", launcher="local"), SparkConfig())
    assert chosen.in_short == "horovod on 2 ranks by local (set by train.strategy)"
    for config in (TrainConfig(), TrainConfig(num_workers=1)):
        assert len(resolve(config, SparkConfig()).in_short) <= 150
