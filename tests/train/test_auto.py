"""What `auto` chooses: a case for every row of the tables in docs/training.md, and the rows themselves."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from train.auto import LAUNCHER_RULES, STRATEGY_RULES, Facts, choose, resolve
from train.config import TrainConfig
from train.exchange import EXCHANGE_RULES, ExchangeFacts, weigh
from train.fit import FIT_RULES, MemoryFacts, fit
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
GIB = 2**30
# 64 images of 1 GiB each, in 20 GiB of which 4 are taken.
SHORT = MemoryFacts("one T4", 20 * GIB, fixed_bytes=4 * GIB, image_bytes=GIB, num_images=64)
# One image of 60 GiB, or of 2 GiB if activations are computed twice, which also needs a GiB more whatever the batch.
RECOMPUTED = replace(
    SHORT, device_bytes=21 * GIB, image_bytes=60 * GIB, recomputed_fixed_bytes=5 * GIB, recomputed_image_bytes=2 * GIB
)
FIT_CASES = [
    # Facts, choice, parts, and what must be among the words.
    (replace(SHORT, device_bytes=68 * GIB), "at_once", 1, "they fit"),
    (replace(SHORT, num_images=16), "at_once", 1, "16 images at once need 20.0 GiB (4.0 GiB whatever the batch, 1.0"),
    (SHORT, "parts", 4, "train.accumulation_steps = 4, 16 images at a time need 20.0 GiB"),
    (replace(SHORT, may_change_precision=True), "parts", 4, "one T4 has 20.0 GiB"),
    # 24 images have no fourth or fifth part: 6 parts of 4 where 5 images would fit.
    (replace(SHORT, device_bytes=9 * GIB, num_images=24), "parts", 6, "4 images at a time need 8.0 GiB"),
    (replace(SHORT, device_bytes=9 * GIB, num_images=24, max_parts=5), "too_large", 4, "6 images at a time still need"),
    (
        replace(SHORT, image_bytes=20 * GIB, may_change_precision=True),
        "bfloat16",
        64,
        "1 images at a time with train.mi",
    ),
    (replace(SHORT, max_parts=2, may_change_precision=True), "bfloat16", 2, "halve what an image needs, need 20.0 GiB"),
    (
        replace(SHORT, max_parts=2),
        "too_large",
        2,
        "set train.mixed_precision = 'auto' (bfloat16 then, which is another",
    ),
    (replace(SHORT, max_parts=1), "too_large", 1, "need 68.0 GiB: a lower train.global_batch_size (another training)"),
    (replace(SHORT, image_bytes=40 * GIB, may_change_precision=True), "too_large", 64, "smaller images or a smaller"),
    (
        replace(SHORT, fixed_bytes=21 * GIB),
        "too_large",
        1,
        "64 images at a time still need 85.0 GiB: smaller images or a smaller model",
    ),
    (RECOMPUTED, "activation_checkpointing", 8, "by which a step takes longer and an image 2.0 GiB, need 21.0 GiB"),
    (
        replace(RECOMPUTED, may_change_precision=True),
        "activation_checkpointing",
        8,
        "smaller parts and bfloat16 alone",
    ),
    (replace(RECOMPUTED, max_parts=2), "too_large", 2, "(activations that are computed twice still take 2.0 GiB an"),
    (
        replace(RECOMPUTED, max_parts=4, may_change_precision=True),
        "bfloat16_and_activation_checkpointing",
        4,
        "an image 2.0 GiB in float32, need 21.0 GiB",
    ),
    (replace(SHORT, max_parts=2, why_not_recomputed="so it is"), "too_large", 2, "are not computed twice: so it is)"),
    (
        replace(SHORT, image_bytes=40 * GIB, may_ask_to_recompute=True),
        "too_large",
        64,
        "44.0 GiB: set train.activation_checkpointing = 'on' (the same training",
    ),
    (replace(SHORT, fixed_bytes=21 * GIB, may_ask_to_recompute=True), "too_large", 1, "85.0 GiB: smaller images"),
    # The precision was changed by an earlier attempt.
    (
        replace(RECOMPUTED, max_parts=4, is_halved=True),
        "bfloat16_and_activation_checkpointing",
        4,
        "as decided before the first step, and train.activation_checkpointing = 'on', by which a step takes longer and "
        "an image 2.0 GiB in float32, need 21.0 GiB",
    ),
    (replace(SHORT, is_halved=True, num_images=32), "bfloat16", 1, "20.0 GiB in bfloat16 (4.0 GiB whatever the batch"),
    (
        replace(SHORT, is_halved=True),
        "bfloat16",
        2,
        "has 20.0 GiB: train.accumulation_steps = 2, 32 images at a time with train.mixed_precision = 'bfloat16', as "
        "decided before the first step, need 20.0 GiB",
    ),
    (
        replace(SHORT, is_halved=True, max_parts=1),
        "too_large",
        1,
        "with train.mixed_precision = 'bfloat16', as decided before the first step, still need 36.0 GiB",
    ),
]


EXCHANGE_CASES = [
    # Milliseconds of a step and of its exchange, choice, and what must be among the words.
    (100, 19, "exchange_small", "19.0 ms of a step of 100.0 ms (19%), measured here: nothing would be gained"),
    (100, 21, "exchange_large", "(21%), measured here: kept, as every step exchanges once"),
    (3, 2.5, "exchange_large", "fewer ranks (now 4)"),
    # A step in which no time was measured.
    (0, 0, "exchange_small", "0.0 ms of a step of 0.0 ms"),
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
    assert rows == [rule.choice for rule in (*STRATEGY_RULES, *LAUNCHER_RULES, *FIT_RULES, *EXCHANGE_RULES)]
    reached = {name for _, name in (*STRATEGY_CASES, *LAUNCHER_CASES)}
    reached |= {case[1] for case in FIT_CASES} | {case[2] for case in EXCHANGE_CASES}
    assert reached == set(rows)
    never = re.search(r"(.*) are never chosen", table)
    assert never is not None and set(re.findall(r"`(\w+)`", never[1])) == ALL - reached


@pytest.mark.parametrize(("facts", "choice", "num_parts", "words"), FIT_CASES)
def test_memory(facts: MemoryFacts, choice: str, num_parts: int, words: str):
    found = fit(facts)
    assert (found.choice, found.num_parts) == (choice, num_parts)
    assert (found.to_bfloat16, found.recomputes) == ("bfloat16" in choice, "activation_checkpointing" in choice)
    assert words in found.reason


@pytest.mark.parametrize(("step_ms", "exchange_ms", "choice", "words"), EXCHANGE_CASES)
def test_exchange(step_ms: float, exchange_ms: float, choice: str, words: str):
    found = weigh(ExchangeFacts(step_ms / 1000, exchange_ms / 1000, 4, "measured here"))
    assert found.choice == choice and words in found.reason


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
