"""What is trained does not depend on how many ranks train it, nor on how they share it: rows of one table."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardmill.stores import open_store
from tests.lab.scale import exhaustive
from tests.train.ranks import (
    LONG,
    ORDINARY_MODEL,
    SMOOTH_MODEL,
    TORCH_MODELS,
    VIT,
    Watcher,
    assert_weights_close,
    files_of_checkpoint,
    ids_of,
    kill_on_ranks,
    numbers,
    train_on_ranks,
)
from tests.train.training import MODELS, Recorder, task_of, train_here
from train.checkpoints.arrays import load_arrays
from train.checkpoints.checkpoint import FoundCheckpoint, complete_checkpoints
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, WholeModel, read_index, read_whole_model
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.metrics.evaluate import read_confusion
from train.planning.memory import model_size
from train.published.export import export_training
from train.strategies import STRATEGIES

# Smoothed labels keep the loss from 0, where a relative bound means nothing. Of 24 rows three ranks have 8, and the
# rows that an epoch's last batch lacks are padding. With averages what is evaluated are not the weights themselves.
COMMON = {"num_streams": 12, "global_batch_size": 24, "label_smoothing": 0.1, "record_samples": True,
          "checkpoint_every_steps": 3, "checkpoint": {"keep": 9}, "epochs": 4}  # fmt: skip
_LONG = {**LONG, **COMMON, "epochs": LONG["epochs"]}
# Adam would make whole steps of gradients that are rounding alone.
NORMED = {**COMMON, "optimizer": "sgd", "learning_rate": 0.05, "sync_batch_norm": True}
SIXTEEN_BITS = {"learning_rate": 0.001, "label_smoothing": 0.0}
_VIT = {**VIT, **COMMON, "epochs": 3}
_FROZEN = {"freeze": ["blocks.0.*", "embedding.*"], "optimizer": "sgd", "learning_rate": 0.05}
_HEAD_FIRST = {"freeze": ["all_but_head"], "unfreeze_epoch": 1, "optimizer": "sgd", "learning_rate": 0.02}
# What is trained: all that a single rank has to be told to train the same.
TRAININGS: dict[str, dict[str, Any]] = {
    "keras smooth": {**_LONG, "model": SMOOTH_MODEL["keras"]},
    "keras norms": {**NORMED, "model": f"{MODELS}:normed"},
    "keras head first": {**COMMON, **_HEAD_FIRST, "model": "small_cnn"},
    "keras bfloat16": {**COMMON, "model": SMOOTH_MODEL["keras"], "mixed_precision": "bfloat16"},
    "keras ordinary": {**COMMON, "epochs": 2, "model": ORDINARY_MODEL["keras"]},
    "routed": {**_LONG, "model": SMOOTH_MODEL["torch"]},
    "torch smooth": {**_LONG, "model": f"{TORCH_MODELS}:smooth"},
    # Weights that not all ranks use in a step, the first whose gradients are complete among them.
    "routed norms": {**NORMED, "model": f"{TORCH_MODELS}:routed_normed"},
    "torch ordinary": {**COMMON, "epochs": 2, "model": ORDINARY_MODEL["torch"]},
    "vit": _VIT,
    "vit averaged": {**_VIT, "ema_decay": 0.9},
    "vit frozen": {**_VIT, **_FROZEN},
    "vit unfrozen": {**_VIT, **_FROZEN, "unfreeze_epoch": 1},
    "vit bfloat16": {**_VIT, **SIXTEEN_BITS, "mixed_precision": "bfloat16"},
    "vit float16": {**_VIT, **SIXTEEN_BITS, "mixed_precision": "float16"},
    "torchvision's": {**_VIT, "optimizer": "sgd", "model": "tests.train.sharded_models:torchvisions_vit"},
}


@dataclass(frozen=True)
class Row:
    """One training on several ranks, which is killed near its end and resumed."""

    training: str
    strategy: str
    num_ranks: int
    resumed_on: int = 1
    """By as many ranks of the same strategy, or by one alone, without a strategy."""
    how: dict[str, Any] = field(default_factory=dict)
    """What changes nothing: the settings of a strategy, parts of a step, activations that are computed twice."""
    shares: tuple[float, float] = (1.0, 1.0)
    """What a rank holds of the weights and of the optimizer's state, at most."""
    steps_per_epoch = 4

    def __str__(self) -> str:
        how = ", ".join(f"{name}={value}" for name, value in self.how.items())
        return f"{self.training}, {self.strategy} {self.num_ranks} then {self.resumed_on}{how and f', {how}'}"

    @property
    def what(self) -> dict[str, Any]:
        return TRAININGS[self.training]

    @property
    def config(self) -> dict[str, Any]:
        return {**self.what, **self.how, "strategy": self.strategy}

    @property
    def num_replicas(self) -> int:
        """How many have a state of their own: ranks, or the devices of one rank."""
        return self.how.get("mirrored", {"num_devices": self.num_ranks})["num_devices"]

    @property
    def num_steps(self) -> int:
        return self.steps_per_epoch * self.what["epochs"]

    @property
    def killed_at(self) -> int:
        """Behind a checkpoint in the middle of an epoch: each third step, and each fourth, writes one."""
        return self.num_steps - 5

    @property
    def is_exact(self) -> bool:
        """But for the order in which numbers of 32 bits are added."""
        return "mixed_precision" not in self.what

    @property
    def is_smooth(self) -> bool:
        """Without ReLU and max pooling, where a rounding error may cross a kink: after some steps losses go apart."""
        return "ordinary" not in self.training

    @property
    def has_telling_weights(self) -> bool:
        """Whether they are sums of gradients: of a gradient that is rounding alone, as of the biases of attention's
        keys, Adam makes whole steps."""
        is_sum = self.what.get("optimizer") == "sgd" or "vit" not in self.training
        return self.is_exact and self.is_smooth and is_sum

    @property
    def tolerance(self) -> float:
        """Relative, of losses: ranks round before it is added up."""
        return 1e-5 if self.is_exact else 0.02


RECOMPUTED = {"memory": {"activation_checkpointing": "on"}}
PROFILED = {"log": {"profile_steps": "3:5"}}


def in_parts(number: int) -> dict[str, Any]:
    return {"accumulation_steps": number}


def stages(schedule: str, num_microbatches: int = 0) -> dict[str, Any]:
    return {"pipeline_parallel": {"schedule": schedule, "num_microbatches": num_microbatches}}


# What a rank holds of weights and of the optimizer's state, at most. Norms and position embeddings stay whole without
# FSDP; each weight's number of steps is everywhere; two blocks and their neighbours do not divide evenly.
HALF, THIRD, DIVIDED, HYBRID = (0.52, 0.52), (1.0, 0.36), (0.75, 0.75), (0.4, 0.4)
OF_TWO_STAGES, OF_FOUR_STAGES = (0.6, 0.6), (0.45, 0.45)
# Both blocks lie in the middle of the V, which is one rank's.
OF_A_V = (0.9, 0.9)
ROWS = [
    Row("keras smooth", "horovod", 2, 1, {**in_parts(4), **PROFILED}),
    Row("keras norms", "horovod", 3, 2),
    Row("keras bfloat16", "horovod", 2, 1, RECOMPUTED),
    Row("keras smooth", "multi_worker_mirrored", 2, 1, RECOMPUTED),
    Row("keras head first", "mirrored", 1, 1, {"mirrored": {"num_devices": 5}}),
    Row("routed", "torch_ddp", 3, 2, {**in_parts(4), "bucket_bytes": 2000, **PROFILED}),
    Row("routed norms", "torch_ddp", 2, 1, {**RECOMPUTED, "bucket_bytes": 2000}),
    Row("vit", "zero1", 3, 1, RECOMPUTED, THIRD),
    Row("vit bfloat16", "torch_fsdp", 2, 1, {**in_parts(2), **RECOMPUTED}, HALF),
    Row("vit averaged", "torch_fsdp", 3, 2, {}, (0.36, 0.36)),
    Row("torchvision's", "tensor_parallel", 2, 1, in_parts(2), DIVIDED),
    Row("vit unfrozen", "hybrid", 4, 1, in_parts(2)),
    Row("vit", "pipeline_parallel", 2, 2, {**in_parts(2), **stages("1f1b", 6)}, OF_TWO_STAGES),
    Row("torch smooth", "pipeline_parallel", 3, 1, {**stages("gpipe"), **RECOMPUTED}),
]
LAYOUTS: list[tuple[str, int, dict[str, Any], tuple[float, float]]] = [
    ("zero1", 3, {}, THIRD),
    ("torch_fsdp", 2, {}, HALF),
    ("torch_fsdp", 4, {"mesh": {"data": 2}}, HALF),
    ("tensor_parallel", 2, {}, DIVIDED),
    ("tensor_parallel", 4, {"mesh": {"data": 2}}, DIVIDED),
    ("hybrid", 4, {}, HYBRID),
    ("pipeline_parallel", 2, stages("gpipe"), OF_TWO_STAGES),
    ("pipeline_parallel", 2, stages("interleaved_1f1b"), OF_TWO_STAGES),
    ("pipeline_parallel", 2, stages("zero_bubble"), OF_A_V),
    ("pipeline_parallel", 4, {**stages("1f1b"), "mesh": {"data": 2}}, OF_TWO_STAGES),
    ("pipeline_parallel", 4, {**stages("zero_bubble"), "mesh": {"pipeline": 2}}, OF_A_V),
    ("pipeline_parallel", 4, stages("1f1b"), OF_FOUR_STAGES),
]


def products() -> Iterator[Row]:
    """Each strategy with each number of ranks, each layout, each precision, whatever is frozen or normalized."""
    for name, strategy in STRATEGIES.installed().items():
        of_keras = strategy.backends[0] == "keras"
        for ranks in (2, 3):
            if not strategy.synchronous or not strategy.allows_world_size(ranks):
                continue
            how = {**(in_parts(4) if ranks == 3 else RECOMPUTED),
                   **({"bucket_bytes": 2000} if name == "torch_ddp" else {})}  # fmt: skip
            # Ranks that gather the weights of a block together must all use the same blocks.
            smooth = "keras smooth" if of_keras else "torch smooth" if strategy.needs_module else "routed"
            yield Row(smooth, name, ranks, 1, {**how, **(PROFILED if name != "multi_worker_mirrored" else {})})
            yield Row("keras ordinary" if of_keras else "torch ordinary", name, ranks, ranks)
        if strategy.needs_module:
            yield from (Row(f"vit {precision}", name, 2, 2) for precision in ("bfloat16", "float16"))
        if strategy.syncs_batch_norm and strategy.synchronous and strategy.allows_world_size(2):
            yield from (Row("keras norms" if of_keras else "routed norms", name, ranks, ranks) for ranks in (2, 3))
    for devices in (2, 4, 5):
        how = {"mirrored": {"num_devices": devices}}
        yield from (Row(training, "mirrored", 1, 1, how) for training in ("keras smooth", "keras norms"))
    for name, ranks, how, shares in LAYOUTS:
        yield Row("vit", name, ranks, ranks, how, shares)
    for name, ranks, _, _ in LAYOUTS[0], LAYOUTS[1], LAYOUTS[3], LAYOUTS[5]:
        yield from (Row(training, name, ranks, ranks) for training in ("vit frozen", "vit unfrozen"))
    yield from (Row("torchvision's", name, 2, 2) for name in ("torch_fsdp", "tensor_parallel", "zero1"))


def rows() -> list[object]:
    """For `parametrize`: those of `make test`, and those that only `make test-all` trains."""
    usual = [pytest.param(row, id=str(row)) for row in ROWS]
    return usual + [exhaustive(row, id=str(row)) for row in products() if row not in ROWS]


def newest(models: Path) -> FoundCheckpoint:
    return next(complete_checkpoints(open_store(models), "t"))


@dataclass
class Trained:
    """A training that has ended, with its models below `models`."""

    models: Path
    result: TrainResult
    losses: dict[tuple[int, int], float]
    sample_ids: dict[tuple[int, int], tuple[str, ...]]

    @functools.cached_property
    def whole(self) -> WholeModel:
        """Weights and statistics at the end."""
        return read_whole_model(newest(self.models).files(open_store(self.models)))


@dataclass
class OnRanks(Trained):
    """A row: almost all of it by `config`, the rest by `last_config`."""

    row: Row
    killed: Watcher
    left: FoundCheckpoint
    """The newest checkpoint of the ranks of which one was killed; its files are there."""
    config: TrainConfig
    last_config: TrainConfig

    @property
    def left_files(self) -> set[str]:
        return {file.name for file in (self.models / self.left.path).iterdir()}

    def read(self, name: str) -> bytes:
        return self.left.read(open_store(self.models), name)

    def assert_close(self, found: object, expected: object, times: float = 1) -> None:
        assert found == pytest.approx(expected, rel=times * self.row.tolerance)


@pytest.fixture(scope="module")
def alone(tiny_uri, tmp_path_factory) -> Callable[[str], Trained]:
    """alone(name of a training) -> it at one rank."""

    @functools.cache
    def train(name: str) -> Trained:
        models, recorder = tmp_path_factory.mktemp("alone"), Recorder()
        result = train_here(tiny_uri, models, recorder, **TRAININGS[name])
        return Trained(models, result, numbers(recorder.losses), ids_of(recorder))

    return train


@pytest.fixture(scope="module", params=rows())
def trained(request, tiny_uri, tmp_path_factory) -> OnRanks:
    row: Row = request.param
    models = tmp_path_factory.mktemp("ranks")
    killed = kill_on_ranks(tiny_uri, models, row.num_ranks, row.config, row.killed_at)
    left = newest(models)
    assert left.marker.global_step % row.steps_per_epoch, "it goes on in the middle of an epoch"
    last = {**row.config, "num_workers": row.resumed_on, "launcher": "local"} if row.resumed_on > 1 else row.what
    if row.resumed_on > 1:
        result, rest = train_on_ranks(tiny_uri, models, row.resumed_on, row.config)
        sample_ids = rest.sample_ids
    else:
        result = train_here(tiny_uri, models, rest := Recorder(), **row.what)
        sample_ids = ids_of(rest)
    config, last_config = (
        task_of(tiny_uri, models, **each).config
        for each in ({**row.config, "num_workers": row.num_ranks, "launcher": "local"}, last)
    )
    losses = numbers(killed.losses | rest.losses)
    ids = killed.sample_ids | sample_ids
    return OnRanks(models, result, losses, ids, row, killed, left, config, last_config)


@pytest.mark.starts("ranks")
def test_every_synchronous_strategy_of_several_has_a_row():
    assert {row.strategy for row in ROWS} == {
        name for name, each in STRATEGIES.installed().items() if each.synchronous
    } - {"single"}


@pytest.mark.starts("ranks")
def test_each_loss_is_that_of_one_rank(trained, alone):
    row, one = trained.row, alone(trained.row.training)
    assert trained.result.resumed_from is not None and len(trained.killed.losses) == row.killed_at
    assert len(one.losses) == row.num_steps
    trained.assert_close(trained.losses, one.losses)
    if row.training.startswith("routed"):
        from tests.train.torch_models import Routed

        # Of two ranks neither takes the second way in some steps, and one alone in others.
        assert {0, 1} <= Routed.num_bright


@pytest.mark.starts("ranks")
def test_each_step_has_the_samples_of_one_rank(trained, alone):
    assert trained.sample_ids == alone(trained.row.training).sample_ids


@pytest.mark.starts("ranks")
def test_weights_and_moving_statistics_are_those_of_one_rank(trained, alone):
    one = alone(trained.row.training)
    if trained.row.has_telling_weights:
        assert_weights_close(trained.whole.weights, one.whole.weights)
    if trained.row.what.get("sync_batch_norm"):
        assert_weights_close(*map(statistics, (trained.whole.own, one.whole.own)))
        # In the middle of an epoch, before anything averages them.
        of_ranks = [load_arrays(trained.read(name)) for name in trained.left_files if name.startswith("rank-")]
        of_ranks = [[array.tobytes() for array in statistics(own)] for own in of_ranks]
        assert len(of_ranks) == trained.row.num_replicas and of_ranks[0]
        assert all(own == of_ranks[0] for own in of_ranks)


def statistics(own: list[np.ndarray]) -> list[np.ndarray]:
    """Moving ones, without the states of generators."""
    return [array for array in own if array.dtype.kind == "f"]


@pytest.mark.starts("ranks")
def test_metrics_are_those_of_one_rank(trained, alone):
    """Of the last evaluation, and of those that the ranks did while they trained."""
    one = alone(trained.row.training)
    if not trained.row.is_smooth:
        return
    trained.assert_close(trained.result.evaluation.loss, one.result.evaluation.loss, times=10)
    found, expected = ([each.validation.loss for each in which.result.history] for which in (trained, one))
    trained.assert_close(found, expected, times=10)
    if trained.row.is_exact:
        assert trained.result.evaluation.per_class == one.result.evaluation.per_class
        assert trained.result.evaluation.top5_accuracy == one.result.evaluation.top5_accuracy
        cells, expected = (read_confusion(open_store(str(which.models)), "t") for which in (trained, one))
        # How confident a mistake is depends on the last bits.
        assert cells is not None and expected is not None
        assert replace(cells, mistakes=()) == replace(expected, mistakes=())


@pytest.mark.starts("ranks")
def test_ranks_hold_their_shares_of_the_state(trained):
    row = trained.row
    assert trained.left_files == files_of_checkpoint(trained.config, row.num_replicas)
    if not STRATEGIES[row.strategy].needs_module:
        return
    index = read_index(trained.read)
    for part, share in zip((WEIGHTS_PART, OPTIMIZER_PART), row.shares, strict=True):
        whole = sum(math.prod(shard.shape) for shard in index.whole(part))
        for shards in index.of_ranks:
            assert sum(math.prod(each.shape) for each in shards if each.part == part) <= share * whole
    weights = sum(4 * math.prod(shard.shape) for shard in index.whole(WEIGHTS_PART))
    said = re.match(r"trained weights take ([\d.]+) KiB, ", model_size(open_store(trained.models), trained.left.path))
    # FSDP pads the first dimension of each weight to a multiple of its ranks.
    assert said is not None and 1 < float(said[1]) * 1024 / weights < 1.6
    files = [name for name in trained.left_files if name.startswith(WEIGHTS_PART)]
    assert {str(array.dtype) for file in files for array in load_arrays(trained.read(file))} == {"float32"}


@pytest.mark.starts("ranks")
def test_an_export_has_the_weights_and_metrics_that_the_training_ended_with(trained):
    """It is compared with both before it is there; the state of several ranks is put together for it."""
    record = export_training(str(trained.models), trained.last_config, trained.result, "run").export.record
    assert record.weights_sha256 == trained.result.weights_sha256 and record.parity_num_images > 0


@pytest.mark.starts("ranks")
def test_every_rank_records_its_steps(trained):
    if "log" not in trained.row.how:
        return
    profile = trained.models / "t/profiles/steps-3-5"
    assert all(any((profile / f"rank-{rank}").iterdir()) for rank in range(trained.row.num_ranks))
    if trained.row.strategy == "horovod":
        exchanges = json.loads((profile / "rank-0/horovod_timeline.json").read_text())
        assert "ALLREDUCE" in {each.get("name") for each in exchanges}
