"""What is trained does not depend on how many ranks train it, nor on how they share it: the rows of array.py.

Ranks train almost all of a row; the last of them is killed, and one or several others go on from the checkpoint.
Losses, samples, weights, figures and export are those of a single rank that nothing disturbed.
"""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.stores import open_store
from tests.train.array import ROWS, TRAININGS, Row, rows
from tests.train.ranks import (
    Watcher,
    assert_weights_close,
    files_of_checkpoint,
    ids_of,
    kill_on_ranks,
    numbers,
    train_on_ranks,
)
from tests.train.training import Recorder, task_of, train_here
from train.checkpoints.checkpoint import FoundCheckpoint, complete_checkpoints
from train.checkpoints.shards import OPTIMIZER_PART, WEIGHTS_PART, WholeModel, read_index, read_whole_model
from train.checkpoints.state import load_arrays
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.evaluation.evaluate import read_confusion
from train.planning.memory import model_size
from train.published.export import export_training
from train.strategies import STRATEGIES

pytestmark = pytest.mark.starts("ranks")


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


def test_every_synchronous_strategy_of_several_has_a_row():
    assert {row.strategy for row in ROWS} == {name for name, each in STRATEGIES.items() if each.synchronous} - {
        "single"
    }


def test_each_loss_is_that_of_one_rank(trained, alone):
    row, one = trained.row, alone(trained.row.training)
    assert trained.result.resumed_from is not None and len(trained.killed.losses) == row.killed_at
    assert len(one.losses) == row.num_steps
    trained.assert_close(trained.losses, one.losses)
    if row.training.startswith("routed"):
        from tests.train.torch_models import Routed

        # Of two ranks neither takes the second way in some steps, and one alone in others.
        assert {0, 1} <= Routed.num_bright


def test_each_step_has_the_samples_of_one_rank(trained, alone):
    assert trained.sample_ids == alone(trained.row.training).sample_ids


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


def test_figures_are_those_of_one_rank(trained, alone):
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


def test_an_export_has_the_weights_and_figures_that_the_training_ended_with(trained):
    """It is compared with both before it is there; the state of several ranks is put together for it."""
    record = export_training(str(trained.models), trained.last_config, trained.result, "run").export.record
    assert record.weights_sha256 == trained.result.weights_sha256 and record.parity_num_images > 0


def test_every_rank_records_its_steps(trained):
    if "log" not in trained.row.how:
        return
    profile = trained.models / "t/profiles/steps-3-5"
    assert all(any((profile / f"rank-{rank}").iterdir()) for rank in range(trained.row.num_ranks))
    if trained.row.strategy == "horovod":
        exchanges = json.loads((profile / "rank-0/horovod_timeline.json").read_text())
        assert "ALLREDUCE" in {each.get("name") for each in exchanges}
