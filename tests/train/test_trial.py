"""Several ranks that `auto` chose try themselves out: what they leave is what was there, or one rank goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from tests.train.test_job import tree_of
from tests.train.test_multi_rank import stateful
from tests.train.training import Recorder, StepWatcher, task_of, train_here
from train.choosing.fit import MemoryFacts, fit
from train.choosing.kept_choice import CHOSEN
from train.choosing.memory import Fitted, Memory
from train.choosing.trial import TrialFacts, TrialSteps, facts_of, judge, trial_of
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.stage_record import train_record
from train.training import train_model
from train.values import Trial

FOUR = TrialFacts(num_ranks=4, step_seconds=0.1, exchange_seconds=0.09, num_steps=251, may_go_on_alone=True)
TRIAL_CASES = [
    # 15 s is what beginning once more takes; one rank saves 0.06 s a step.
    (replace(FOUR, exchange_seconds=0.06), "ranks_pay", "one rank would take 160.0 ms at most, so 4 are faster"),
    (replace(FOUR, num_steps=249), "soon_over", "one rank would take 40.0 ms at most, which in 249 steps"),
    (replace(FOUR, may_go_on_alone=False), "memory_unknown", "set train.num_workers = 1, or say how much there is"),
    (FOUR, "one_is_faster", "trial: a step of 4 ranks took 100.0 ms, of it 90.0 ms for the exchange, and one rank"),
]


@pytest.mark.parametrize(("facts", "choice", "words"), TRIAL_CASES)
def test_one_rank_goes_on_if_that_saves_more_than_beginning_once_more_takes(facts, choice, words):
    tried = judge(facts)
    assert (tried.choice, tried.is_alone) == (choice, choice == "one_is_faster") and words in tried.reason


def test_the_first_step_compiles_and_waiting_for_another_rank_is_no_exchange():
    early = TrialSteps(total_seconds=(9.0, 0.10, 0.10, 0.10), exchange_seconds=(9.0, 0.06, 0.06, 0.08))
    late = TrialSteps(total_seconds=(9.0, 0.11, 0.11, 0.11), exchange_seconds=(9.0, 0.01, 0.02, 0.01))
    assert facts_of([early, late], 7, may_go_on_alone=True) == TrialFacts(2, 0.11, 0.01, 7, True)


TWO = TrainConfig(num_workers=2, strategy="horovod", launcher="local")
UNKNOWN = Memory(None, SparkConfig(), lambda config: 0)
AMPLE = replace(UNKNOWN, ample=lambda config: "it is ample")
AMPLE_FOR_HALF = replace(UNKNOWN, ample=lambda config: "it is ample" if config.num_workers > 1 else "")


class Measured(Memory):
    """Two of 8 images are more than a rank has memory for, and no step has parts."""

    def fitted(self, config: TrainConfig) -> Fitted:
        num_images = 8 // config.num_workers
        facts = MemoryFacts("a rank", device_bytes=5, fixed_bytes=0, image_bytes=1, num_images=num_images, max_parts=1)
        return Fitted(config, fit(facts))


def no_single_rank(config: TrainConfig) -> None:
    if config.num_workers == 1:
        raise UsageError("its windows exceed train.memory_budget_bytes")


@pytest.mark.parametrize(
    ("asked", "changes", "memory", "check", "expected"),
    [
        (TrainConfig(), {}, AMPLE, str, "decides"),
        (TrainConfig(), {}, UNKNOWN, str, "told"),
        (TrainConfig(), {}, AMPLE_FOR_HALF, str, "told"),
        (TrainConfig(), {}, Measured(None, SparkConfig(), lambda config: 0), str, "told"),
        (TrainConfig(), {}, AMPLE, no_single_rank, "none"),
        (TWO, {}, AMPLE, str, "none"),
        (TrainConfig(), {"num_workers": 1, "strategy": "mirrored"}, AMPLE, str, "none"),
        (TrainConfig(rank_weights=[1, 0.5]), {}, AMPLE, str, "none"),
        (TrainConfig(launcher="attach"), {"launcher": "attach"}, AMPLE, str, "none"),
        (TrainConfig(), {"compression": "powersgd"}, AMPLE, str, "none"),
    ],
    ids=["ample", "unknown", "half is ample", "too large", "windows", "asked", "one", "named", "attach", "powersgd"],
)
def test_only_ranks_that_nobody_asked_for_are_tried(asked, changes, memory, check, expected):
    assert trial_of(asked, TWO.model_copy(update=changes), memory, check) == expected


@pytest.mark.parametrize("strategy", ["horovod", pytest.param("torch_ddp", marks=pytest.mark.drill)])
def test_a_trial_leaves_no_trace_in_the_training(tiny_uri, tmp_path, strategy):
    """Weights, optimizer, batch norm, dropout and the scale of the loss are as if it had not been."""
    more = {"mixed_precision": "float16"} if strategy == "torch_ddp" else {}
    config = {**stateful(strategy), "num_workers": 2, "launcher": "local", **more}

    def train(trial: Trial):
        watcher, task = StepWatcher(), task_of(tiny_uri, tmp_path / trial, **config)
        return LAUNCHERS["local"].launch(replace(task, trial=trial), SparkConfig(), watcher), watcher

    (tried, seen), (untried, unseen) = train("decides"), train("none")
    [trial] = [fields for name, fields in seen.events if name == "trial"]
    # The training is short: whatever was measured, it goes on.
    assert trial["rank"] == 0 and trial["choice"] in ("ranks_pay", "soon_over")
    assert not [name for name, _ in unseen.events if name == "trial"]
    assert seen.losses == unseen.losses
    assert tried.weights_sha256 == untried.weights_sha256


@pytest.mark.drill
def test_over_a_slow_network_one_rank_goes_on_and_a_resume_asks_no_more(tiny_uri, tmp_path, own_jvm):
    """Horovod's ranks agree once in 0.2 s, as if that were how long messages take."""
    slow = {"spark.executorEnv.HOROVOD_CYCLE_TIME": "200", "spark.executor.memory": "512m"}
    spark = SparkConfig(master="local-cluster[2,1,512]", train=SparkApplicationConfig(conf=slow))
    settings = {"epochs": 45, "global_batch_size": 24, "augment": {"random_crop_padding": 1},
                "memory_budget_bytes": 4_000_000_000}  # fmt: skip
    tree = tree_of(tiny_uri, tmp_path / "models", **settings).model_copy(update={"spark": spark})
    watcher = StepWatcher()
    outcome = train_model(tree, watcher)

    [trial] = [fields for name, fields in watcher.events if name == "trial"]
    assert trial["choice"] == "one_is_faster" and trial["exchange_seconds"] > 0.1
    assert (outcome.result.world_size, outcome.chosen.config.launcher) == (1, "spark_barrier")
    reason = train_record(outcome).sections["train"]["strategy_reason"]
    assert reason.startswith(f"1 rank(s): {trial['reason']}; horovod: ")
    [chosen] = (tmp_path / "models").rglob(CHOSEN)
    assert b'"num_workers":1' in chosen.read_bytes() and b"so it continues with one" in chosen.read_bytes()

    one = Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **{**settings, "num_streams": 6})
    assert len(watcher.losses) == len(one.losses) >= 100
    # Losses near 0 are rounding.
    for step, loss in list(one.losses.items())[:20]:
        assert float.fromhex(watcher.losses[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)
