"""What `auto` chooses: a case for every row of the table in docs/training.md, and the rows themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from train.auto import LAUNCHER_RULES, STRATEGY_RULES, Facts, choose, resolve
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.strategies import STRATEGIES

ALL = frozenset({*STRATEGIES.entries, *LAUNCHERS.entries})
ONE = Facts(
    num_workers=1, num_ranks=1, local_steps=1, backend="keras", is_keras_model=True, num_devices=0,
    spark_master="local[*]", installed=ALL,
)  # fmt: skip
FOUR = replace(ONE, num_workers=4, num_ranks=4)
SERVED = replace(ONE, num_ranks=3)

STRATEGY_CASES = [
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


@pytest.mark.parametrize(("facts", "strategy"), STRATEGY_CASES)
def test_strategies(facts: Facts, strategy: str):
    chosen, because = choose(STRATEGY_RULES, facts, "train.strategy")
    assert chosen == strategy and "{" not in because


@pytest.mark.parametrize(("facts", "launcher"), LAUNCHER_CASES)
def test_launchers(facts: Facts, launcher: str):
    assert choose(LAUNCHER_RULES, facts, "train.launcher")[0] == launcher


def test_every_row_is_reached_by_a_case_and_stands_in_the_docs():
    documented = Path(__file__, "../../../docs/training.md").resolve().read_text()
    table = documented.partition("## What `auto` chooses")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert rows == [rule.choice for rule in (*STRATEGY_RULES, *LAUNCHER_RULES)]
    reached = {name for _, name in (*STRATEGY_CASES, *LAUNCHER_CASES)}
    assert reached == set(rows)
    never = re.search(r"(.*) are never chosen", table)
    assert never is not None and set(re.findall(r"`(\w+)`", never[1])) == ALL - reached


def test_a_strategy_with_servers_gets_a_launcher_of_processes():
    chosen = resolve(TrainConfig(strategy="parameter_server"), SparkConfig()).config
    assert (chosen.num_workers, chosen.launcher, chosen.backend) == (1, "local", "keras")


def test_what_is_set_stays_and_what_is_resolved_stays_as_it_is():
    spark = SparkConfig()
    once = resolve(TrainConfig(num_workers=2, launcher="horovod_spark"), spark)
    assert (once.config.strategy, once.config.launcher, once.config.backend) == ("horovod", "horovod_spark", "keras")
    assert once.reason == (
        "horovod: 2 workers of TensorFlow, one grouped allreduce a step; horovod_spark: set by train.launcher"
    )
    assert resolve(once.config, spark).config == once.config


def test_missing_packages_are_named():
    nothing = replace(FOUR, installed=frozenset({"local"}))
    with pytest.raises(UsageError):
        choose(STRATEGY_RULES, nothing, "train.strategy")
