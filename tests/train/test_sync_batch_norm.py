"""`train.sync_batch_norm`: a model with batch norms trains on several ranks as on one, padding or not."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.values import Batch
from tests.lab.scale import exhaustive
from tests.train.learners import LINEAR, SHAPE, TORCH_MODELS, batch_of, learner
from tests.train.ranks import Watcher, train_on_ranks
from tests.train.training import MODELS, Recorder, check_terms, train_here
from train.backends import BACKENDS
from train.backends.backend import Learner, StatePart
from train.checkpoints.state import WEIGHTS, load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.values import TrainResult
from train.identity import settings_that_matter
from train.published.export import export_training
from train.strategies import STRATEGIES

# PyTorch's has weights, the first whose gradients are complete, that not all ranks use in a step.
NORMED = {"keras": f"{MODELS}:normed", "torch": f"{TORCH_MODELS}:routed_normed"}
# An epoch's last batch is padded. Adam would make whole steps of gradients that are rounding alone.
STEPS = {"epochs": 4, "num_streams": 12, "global_batch_size": 24, "optimizer": "sgd", "learning_rate": 0.05,
         "checkpoint_every_steps": 3, "checkpoint": {"keep": 9}, "export": "last", "label_smoothing": 0.1}  # fmt: skip


def padded(batch: Batch, num_rows: int) -> Batch:
    """With copies of rows as rows of weight 0."""
    there = len(batch.labels_N)
    rows = np.arange(num_rows) % there
    weights_N = (np.arange(num_rows) < there).astype(np.float32)
    names = ("images_NHWC", "labels_N", "sample_ids_N")
    return replace(batch, weights_N=weights_N, **{name: getattr(batch, name)[rows] for name in names})


def after_a_step(one: Learner, batch: Batch) -> list[np.ndarray]:
    addends = [np.array(each) for each in one.gradients(batch, 6, 1.0)]
    return [*addends, *one.arrays(StatePart.OWN)]


def difference(found: list[np.ndarray], expected: list[np.ndarray]) -> float:
    """The largest in relation to the largest number of its array."""
    pairs = zip(found, expected, strict=True)
    return max(float(np.abs(one - other).max() / max(np.abs(other).max(), 1e-6)) for one, other in pairs)


@pytest.mark.parametrize("name", BACKENDS)
def test_padding_does_not_count(name):
    """The framework's own batch norm without padding is the reference."""
    batch = batch_of(SHAPE, num_rows=6)
    expected = after_a_step(learner(name, NORMED[name]), batch)
    one = learner(name, NORMED[name], sync_batch_norm=True)
    assert difference(after_a_step(one, padded(batch, 8)), expected) < 3e-6
    assert difference(after_a_step(learner(name, NORMED[name]), padded(batch, 8)), expected) > 1e-2

    # What is evaluated is the framework's own layer.
    stock = learner(name, NORMED[name])
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        stock.assign(part, one.arrays(part), "the test")
    assert np.array_equal(one.outputs(batch.images_NHWC), stock.outputs(batch.images_NHWC))
    assert one.config_sha256 == stock.config_sha256


@pytest.fixture(scope="module")
def at_one_rank(tiny_uri, tmp_path_factory):
    """at_one_rank(backend) -> the training under `single`, what was seen of it, and its models folder."""

    @functools.cache
    def train(backend: str) -> tuple[TrainResult, Recorder, Path]:
        models, recorder = tmp_path_factory.mktemp("one"), Recorder()
        result = train_here(tiny_uri, models, recorder, **STEPS, model=NORMED[backend], sync_batch_norm=True)
        if backend == "torch":
            from tests.train.torch_models import Routed

            # Of two ranks neither takes the second way in some steps, and one alone in others.
            assert {0, 1} <= Routed.num_bright
        return result, recorder, models

    return train


def state_of(result: TrainResult, models: Path) -> list[np.ndarray]:
    folder = models / result.last_checkpoint
    return [array for name in (WEIGHTS, rank_file(0)) for array in load_arrays((folder / name).read_bytes())]


def largest_differences(
    one: tuple[TrainResult, Recorder | Watcher, Path], several: tuple[TrainResult, Watcher, Path]
) -> tuple[float, float]:
    """Relative: of the losses of all steps, and of weights and moving statistics at the end."""
    losses = {step: float.fromhex(loss) for step, loss in one[1].losses.items()}
    assert several[1].losses.keys() == losses.keys() and len(losses) > 12
    of_losses = max(abs(float.fromhex(several[1].losses[step]) / loss - 1) for step, loss in losses.items())
    return of_losses, difference(state_of(several[0], several[2]), state_of(one[0], one[2]))


@pytest.mark.exhaustive
def test_a_keras_model_on_pytorch_does_likewise(tiny_uri, tmp_path):
    """One rank of it needs a process of its own, too."""
    config = {**STEPS, "strategy": "torch_ddp", "model": NORMED["keras"], "sync_batch_norm": True}
    one, watcher_of_one = train_on_ranks(tiny_uri, tmp_path / "one", 1, config)
    several, watcher = train_on_ranks(tiny_uri, tmp_path / "several", 2, config)
    of_losses, of_state = largest_differences(
        (one, watcher_of_one, tmp_path / "one"), (several, watcher, tmp_path / "several")
    )
    assert of_losses < 1e-5 and of_state < 1e-5


@pytest.mark.drill
@pytest.mark.parametrize("strategy", ["torch_ddp", exhaustive("horovod")])
def test_without_it_ranks_train_otherwise(tiny_uri, tmp_path, at_one_rank, strategy):
    backend = STRATEGIES[strategy].backends[0]
    result, watcher = train_on_ranks(tiny_uri, tmp_path, 2, {**STEPS, "strategy": strategy, "model": NORMED[backend]})
    of_losses, of_state = largest_differences(at_one_rank(backend), (result, watcher, tmp_path))
    assert of_losses > 1e-3 and of_state > 1e-2

    # What the synchronized one exports is loaded back without us, and has its figures.
    one, _, models = at_one_rank(backend)
    config = TrainConfig(**STEPS, model=NORMED[backend], sync_batch_norm=True)
    record = export_training(str(models), config, one, "run").export.record
    assert record.weights_sha256 == one.weights_sha256 and record.parity_max_abs_diff <= 1e-5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (
            {"strategy": "parameter_server", "launcher": "local"},
            r"'parameter_server'; .*; set train.strategy to 'single'",
        ),
        (
            {"strategy": "local_sgd", "local_sgd": {"local_steps": 2}},
            "'local_sgd'; expected a strategy that sums statistics of batch norms over ranks within a step; set",
        ),
        (
            {"strategy": "torch_fsdp", "num_workers": 2, "launcher": "local", "model": "vit"},
            r"'torch_fsdp'; .*; set train.strategy to 'torch_ddp', or train.sync_batch_norm = false",
        ),
        ({"accumulation_steps": 2}, r"accumulation_steps = 2; .*; set train.accumulation_steps = 1"),
    ],
)
def test_what_cannot_synchronize_refuses_it(how, message):
    with pytest.raises(UsageError, match=rf"train.sync_batch_norm = true with train.*{message}"):
        check_terms(TrainConfig(**how, sync_batch_norm=True), SparkConfig())


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_that_it_does_not_fit_is_refused(name):
    with pytest.raises(UsageError, match=r"linear' has no batch normalization; expected at least one BatchNorm"):
        learner(name, LINEAR[name], sync_batch_norm=True)
    own = LINEAR[name].replace("linear", "with_own_norm")
    with pytest.raises(UsageError, match=r"OwnNorm of train.model = .* has its own (call|forward)\(\)"):
        learner(name, own, sync_batch_norm=True)
    of_patches = learner(name, LINEAR[name].replace("linear", "with_norm_of_patches"), sync_batch_norm=True)
    with pytest.raises(UsageError, match=r"normalizes \d+ rows of a batch of 6; expected one row for each sample"):
        of_patches.gradients(batch_of(SHAPE, num_rows=6), 6, 1.0)


def test_synchronized_it_is_another_training():
    assert "sync_batch_norm" not in settings_that_matter(TrainConfig())
    assert settings_that_matter(TrainConfig(sync_batch_norm=True))["sync_batch_norm"] == "true"
