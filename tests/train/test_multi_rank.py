"""The promises that only real ranks can break: equal bits in every run, exact resume, one loss at any world size.

Which strategy is held to which promise follows from what it declares.
"""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import functools
import json
import shutil
from dataclasses import dataclass, field

import numpy as np
import pytest

from shardmill.errors import TrainingError
from shardmill.jobs.config import SparkConfig
from tests.train.forked_ranks import launch_forked
from tests.train.multi_rank_workers import KILL_AT
from tests.train.training import MODELS, Recorder, task_of, train_here
from train.checkpoints.shards import INDEX, OPTIMIZER_PART, WEIGHTS_PART, shard_file
from train.checkpoints.state import MARKER, OPTIMIZER, WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.values import BEFORE_CHECKPOINT, TrainResult
from train.launching import LAUNCHERS
from train.reporting.observer import GlobalStep
from train.strategies import STRATEGIES, mesh_of
from train.strategies.strategy import all_members

WORKERS = "tests.train.multi_rank_workers"
STATEFUL = {"checkpoint_every_steps": 2, "num_streams": 6, "global_batch_size": 24, "record_samples": True,
            "epochs": 3}  # fmt: skip
# 100 steps and more of the demo's model. Smoothed labels keep the loss from 0, where a relative bound means nothing.
# What is evaluated are averages of weights; losses of steps are those of the weights themselves.
SMALL_CNN = {"num_streams": 12, "global_batch_size": 24, "epochs": 27, "label_smoothing": 0.1, "record_samples": True,
             "checkpoint_every_steps": 5, "ema_decay": 0.9}  # fmt: skip

TORCH_MODELS = "tests.train.torch_models"
STATEFUL_MODEL = {"keras": f"{MODELS}:stateful", "torch": f"{TORCH_MODELS}:stateful"}
# PyTorch's does not use all of its weights in every step, on no rank or on some.
SMOOTH_MODEL = {"keras": f"{MODELS}:smooth", "torch": f"{TORCH_MODELS}:routed"}
ORDINARY_MODEL = {"keras": "tests.train.ordinary_models:relu_cnn", "torch": f"{TORCH_MODELS}:relu_cnn"}

# Whose ranks all run the loop; the others have tests of their own (test_parameter_server.py).
OF_EQUALS = {name: each for name, each in STRATEGIES.items() if each.roles is all_members}
EXACT = [name for name, strategy in STRATEGIES.items() if strategy.exact_resume]
# Three: with two ranks a sum has one order only. Of two axes, three ranks would leave one undivided.
RANKS = {name: 4 if len(STRATEGIES[name].axes) > 1 else 3 for name in EXACT}
EXACT_WORLDS = [(name, ranks) for name, ranks in RANKS.items() if STRATEGIES[name].allows_world_size(ranks)]
SYNCHRONOUS_WORLDS = [
    (name, ranks)
    for name, strategy in STRATEGIES.items()
    for ranks in (2, 3)
    if strategy.synchronous and strategy.allows_world_size(ranks)
]
# local_sgd meets by the collectives of horovod and torch_ddp.
WITH_A_MEETING_OF_THEIR_OWN = [
    name for name, strategy in STRATEGIES.items() if strategy.synchronous and strategy.allows_world_size(2)
]


def files_of(config: TrainConfig) -> set[str]:
    """Of a checkpoint. Ranks that compute the same layers with the same rows have one state of their own, which the
    first of them writes."""
    ranks, mesh = range(config.num_workers), mesh_of(config)
    own = {rank_file(rank) for rank in ranks if mesh.shape.place(rank)["tensor"] == 0}
    if STRATEGIES[config.strategy].needs_module:
        shards = {shard_file(part, rank) for part in (WEIGHTS_PART, OPTIMIZER_PART) for rank in ranks}
        return {MARKER, INDEX, *own, *shards}
    return {MARKER, WEIGHTS, OPTIMIZER, *own}


# What makes a strategy do what others do not.
OF_STRATEGY: dict[str, dict] = {
    "local_sgd": {"local_sgd": {"local_steps": 2}, "ema_decay": 0.9},
    # Several buckets: in which place a value lies decides the order in which three ranks are added.
    "torch_ddp": {"ema_decay": 0.9, "bucket_bytes": 2000},
}


def stateful(strategy: str) -> dict:
    model = STATEFUL_MODEL[STRATEGIES[strategy].backends[0]]
    if "pipeline" in STRATEGIES[strategy].axes:
        # Stages take no batch norm.
        model = "tests.train.torch_chain_models:stateful_chain"
    # Where the model has batch norms; the others keep statistics of their own.
    shared = {"sync_batch_norm": strategy == "horovod"}
    return {**STATEFUL, **OF_STRATEGY.get(strategy, {}), **shared, "strategy": strategy, "model": model}


def smooth(strategy: str) -> dict:
    model = SMOOTH_MODEL[STRATEGIES[strategy].backends[0]]
    if STRATEGIES[strategy].needs_module:
        # Ranks gather the weights of a block together, so all must use the same blocks.
        model = f"{TORCH_MODELS}:smooth"
    return {**SMALL_CNN, **OF_STRATEGY.get(strategy, {}), "strategy": strategy, "model": model}


@dataclass
class Watcher:
    """An observer that remembers."""

    losses: dict[tuple[int, int], str] = field(default_factory=dict)
    sample_ids: dict[tuple[int, int], tuple[str, ...]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    before_checkpoint: set[tuple[int, int]] = field(default_factory=set)
    """The steps that were told before the last checkpoint counted."""

    def step(self, step: GlobalStep) -> None:
        assert {report.loss_hex for report in step.reports} == {step.loss_hex}, "every rank has the same global loss"
        self.losses[step.epoch, step.step] = step.loss_hex
        self.sample_ids[step.epoch, step.step] = step.sample_ids

    def event(self, name: str, fields: dict) -> None:
        self.events.append(name)
        if name == BEFORE_CHECKPOINT:
            self.before_checkpoint = set(self.losses)


def train_on_ranks(
    uri, models, world_size, config, worker="every_rank_tells_its_weights"
) -> tuple[TrainResult, Watcher]:
    task = task_of(uri, models, num_workers=world_size, launcher="local", **config)
    watcher = Watcher()
    result = launch_forked(task, watcher, f"{WORKERS}:{worker}")
    told = {(models / "told" / f"rank-{rank}").read_text() for rank in range(world_size)}
    assert told == {result.weights_sha256}, "every rank ends with the same weights and moving statistics"
    return result, watcher


def kill_on_ranks(uri, models, world_size, config, monkeypatch, killed_at) -> Watcher:
    """The same training, but the last rank is killed in the middle of global step `killed_at`."""
    monkeypatch.setenv(KILL_AT, str(killed_at))
    task = task_of(uri, models, num_workers=world_size, launcher="local", **config)
    watcher = Watcher()
    # Not another death, before the one that is meant.
    with pytest.raises(TrainingError, match=f"rank {world_size - 1} .*SIGKILL"):
        launch_forked(task, watcher, f"{WORKERS}:last_rank_dies")
    return watcher


@pytest.mark.parametrize("strategy", EXACT)
def test_a_killed_process_resumes_exactly(tiny_uri, tmp_path, monkeypatch, strategy):
    recorder, resumed = Recorder(), Recorder()
    config = stateful(strategy)
    fresh = train_here(tiny_uri, tmp_path / "fresh", recorder, **config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 1, config, monkeypatch, killed_at=7)
    result = train_here(tiny_uri, tmp_path / "killed", resumed, **config)
    assert result.weights_sha256 == fresh.weights_sha256
    assert result.resumed_from is not None
    assert killed.losses | resumed.losses == recorder.losses


@pytest.mark.drill
@pytest.mark.parametrize(("strategy", "world_size"), EXACT_WORLDS)
def test_ranks_with_state_of_their_own_resume_exactly(tiny_uri, tmp_path, monkeypatch, strategy, world_size):
    """And from one checkpoint back, all together, if one rank cannot read its own file of the newest."""
    config = stateful(strategy)
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", world_size, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", world_size, config, monkeypatch, killed_at=9)
    expected = files_of(task_of(tiny_uri, tmp_path, num_workers=world_size, launcher="local", **config).config)
    of_rank_1 = min(expected & {rank_file(1), shard_file(WEIGHTS_PART, 1)}, key=len)
    damaged = sorted((tmp_path / "killed").glob(f"t/checkpoints/*/{MARKER}"))[-1].with_name(of_rank_1)
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    resumed_result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", world_size, config)

    assert {place for place in undisturbed.losses if place < (2, 0)} <= killed.before_checkpoint
    assert {"checkpoint_discarded", "resumed"} <= set(resumed.events)
    # In the middle of an epoch.
    assert (resumed_result.resumed_from.epoch, resumed_result.resumed_from.step) == (1, 2)
    assert len(killed.losses.keys() & resumed.losses.keys()) == 3
    for part in (killed, resumed):
        assert part.losses.items() <= undisturbed.losses.items(), "several processes' runs agree bit for bit"
        assert part.sample_ids.items() <= undisturbed.sample_ids.items()
    assert killed.losses.keys() | resumed.losses.keys() == undisturbed.losses.keys()
    assert resumed_result.weights_sha256 == fresh.weights_sha256
    assert resumed_result.evaluation == fresh.evaluation
    files = {file.name for file in (tmp_path / "killed" / resumed_result.checkpoint).iterdir()}
    assert files == expected


def last_weights(models, result):
    return load_arrays((models / result.last_checkpoint / WEIGHTS).read_bytes())


def assert_weights_close(found, expected):
    for several, one in zip(found, expected, strict=True):
        assert np.linalg.norm(several - one) <= 1e-5 * np.linalg.norm(one)


@pytest.fixture(scope="module")
def at_one_rank(tiny_uri, tmp_path_factory):
    """at_one_rank(model) -> the training under `single`, what was seen of it, and its last weights."""

    @functools.cache
    def train(model):
        models, recorder = tmp_path_factory.mktemp("one"), Recorder()
        result = train_here(tiny_uri, models, recorder, **SMALL_CNN, model=model)
        return result, recorder, last_weights(models, result)

    return train


@pytest.mark.parametrize(("strategy", "world_size"), SYNCHRONOUS_WORLDS)
def test_losses_of_an_ordinary_network_agree_in_its_first_steps(tiny_uri, tmp_path, strategy, world_size):
    """With ReLU and max pooling. Later a rounding error may cross a kink, and losses go apart: nothing is promised."""
    model = ORDINARY_MODEL[STRATEGIES[strategy].backends[0]]
    config, one = {"num_streams": 12, "global_batch_size": 24, "epochs": 2, "model": model}, Recorder()
    train_here(tiny_uri, tmp_path / "one", one, **config)
    _, several = train_on_ranks(tiny_uri, tmp_path / "several", world_size, {**config, "strategy": strategy})
    assert len(several.losses) == len(one.losses) == 8
    for step, loss in one.losses.items():
        assert float.fromhex(several.losses[step]) == pytest.approx(float.fromhex(loss), rel=1e-5), step


@pytest.mark.parametrize(("strategy", "world_size"), SYNCHRONOUS_WORLDS)
def test_the_loss_does_not_depend_on_the_world_size(tiny_uri, tmp_path, monkeypatch, at_one_rank, strategy, world_size):
    """100 steps on several ranks, the rest resumed at one: all the way the losses of one rank alone, and its weights.

    Three ranks also compute their share of each step in parts, two compute activations twice. Every rank records two
    steps, if the strategy's ranks can.
    """
    how = {"accumulation_steps": 4} if world_size == 3 else {"memory": {"activation_checkpointing": "on"}}
    is_profiled = strategy != "multi_worker_mirrored"
    config = {**smooth(strategy), **how, "log": {"profile_steps": "3:5" if is_profiled else ""}}
    one_result, one, of_one = at_one_rank(config["model"])
    if config["model"] == SMOOTH_MODEL["torch"]:
        from tests.train.torch_models import Routed

        assert {0, 1} <= Routed.num_bright
    several = kill_on_ranks(tiny_uri, tmp_path / "killed", world_size, config, monkeypatch, killed_at=103)
    profile = tmp_path / "killed/t/profiles/steps-3-5"
    if is_profiled:
        assert all(any((profile / f"rank-{rank}").iterdir()) for rank in range(world_size))
    if strategy == "horovod":
        exchanges = json.loads((profile / "rank-0/horovod_timeline.json").read_text())
        assert "ALLREDUCE" in {each.get("name") for each in exchanges}
    rest = Recorder()
    shutil.copytree(tmp_path / "killed", tmp_path / "resumed")
    result = train_here(tiny_uri, tmp_path / "resumed", rest, **SMALL_CNN, model=config["model"])

    assert result.resumed_from is not None and len(several.losses) == 103
    assert len(one.steps) == 108 and len(rest.steps) < 10
    both = several.losses | rest.losses
    for report in one.steps:
        assert float.fromhex(both[report.epoch, report.step]) == pytest.approx(float.fromhex(report.loss_hex), rel=1e-5)
    ids = several.sample_ids | {(report.epoch, report.step): report.sample_ids for report in rest.steps}
    assert ids == {(report.epoch, report.step): report.sample_ids for report in one.steps}
    assert_weights_close(last_weights(tmp_path / "resumed", result), of_one)
    assert result.evaluation is not None and one_result.evaluation is not None
    assert result.evaluation.per_class == one_result.evaluation.per_class
    assert result.evaluation.loss == pytest.approx(one_result.evaluation.loss, rel=1e-4)


@pytest.mark.parametrize("strategy", [name for name, each in OF_EQUALS.items() if each.allows_world_size(2)])
def test_evaluation_on_ranks_is_that_of_one(tiny_uri, tmp_path, strategy):
    """Nothing to train is left, so the ranks only load the same weights and evaluate."""
    config = {**smooth(strategy), "epochs": 1}
    # Only a synchronous one may go on with what another has trained.
    alone = "single" if STRATEGIES[strategy].synchronous else strategy
    one = train_here(tiny_uri, tmp_path, **{**config, "strategy": alone})
    (tmp_path / "t" / "result.json").unlink()
    confusion = (tmp_path / "t" / "confusion.json").read_bytes()
    (tmp_path / "t" / "confusion.json").unlink()
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, config)
    assert not watcher.losses
    # A classifier of three classes, a quarter of the weights, is all that two ranks can divide.
    assert ("little_divided" in watcher.events) == ("tensor" in STRATEGIES[strategy].axes)
    assert result.weights_sha256 == one.weights_sha256
    assert result.evaluation.per_class == one.evaluation.per_class
    assert (tmp_path / "t" / "confusion.json").read_bytes() == confusion
    assert result.evaluation.top5_accuracy == one.evaluation.top5_accuracy
    assert result.evaluation.loss == pytest.approx(one.evaluation.loss, rel=1e-6)


@pytest.mark.drill
@pytest.mark.parametrize("strategy", EXACT)
def test_every_strategy_trains_in_a_barrier_stage_as_it_does_in_processes_here(tiny_uri, tmp_path, strategy):
    world_size = 2 if STRATEGIES[strategy].allows_world_size(2) else 1
    config = stateful(strategy) | ({"mirrored": {"num_devices": 2}} if strategy == "mirrored" else {})
    here, _ = train_on_ranks(tiny_uri, tmp_path / "here", world_size, config)
    task = task_of(tiny_uri, tmp_path / "spark", launcher="spark_barrier", num_workers=world_size, **config)
    watcher = Watcher()
    result = LAUNCHERS["spark_barrier"].launch(task, SparkConfig(master="local[2]"), watcher)
    assert (result.weights_sha256, result.final_loss_hex) == (here.weights_sha256, here.final_loss_hex)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("strategy", "worker"),
    [*((name, "last_rank_stalls") for name in WITH_A_MEETING_OF_THEIR_OWN), ("torch_ddp", "last_rank_reads_nothing")],
)
def test_the_rank_that_stands_still_is_named_and_not_the_one_that_waits_for_it(tiny_uri, tmp_path, strategy, worker):
    limits = {"progress_timeout_seconds": 2, "start_timeout_seconds": 120}
    task = task_of(tiny_uri, tmp_path, **stateful(strategy), num_workers=2, launcher="local", watch=limits)
    with pytest.raises(TrainingError, match=r"^rank 1 .* hangs .* rank 0 waiting in an? (allreduce|gather)"):
        launch_forked(task, Watcher(), f"{WORKERS}:{worker}")
