"""`train.ema_decay`: what is evaluated and exported is the moving average of the weights; what is trained is not."""

# pyright: reportArgumentType=false
from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.train.learners import LINEAR, SHAPE, STATEFUL, batch_of, learner
from tests.train.training import Killed, Recorder, check_terms, task_of, train_here
from train.backends import BACKENDS
from train.backends.backend import Learner, StatePart
from train.checkpoints.state import OPTIMIZER, WEIGHTS, load_arrays
from train.config import TrainConfig
from train.identity import settings_that_matter
from train.published.export import export_training


def in_model(one: Learner) -> list[np.ndarray]:
    """What the model itself has, whatever the state calls weights."""
    return [array.copy() for array in one.named_weights().arrays().values()]


def shares(num_updates: int, limit: float) -> list[float]:
    return [1 - min(limit, (1 + each) / (10 + each)) for each in range(num_updates)]


@pytest.mark.parametrize("name", BACKENDS)
def test_averages_follow_the_weights_which_train_as_without_them(name):
    settings, limit, batch = {"optimizer": "adam"}, 0.25, batch_of(SHAPE, num_rows=6)
    plain = learner(name, STATEFUL[name], **settings)
    weights = plain.arrays(StatePart.WEIGHTS)
    expected = [array.astype(np.float64) for array in weights]
    # The bound counts from the fourth update on.
    for share in shares(5, limit):
        assert plain.apply(plain.gradients(batch, 6, 1.0), 0.1).is_applied
        weights = plain.arrays(StatePart.WEIGHTS)
        expected = [old + share * (now - old) for old, now in zip(expected, weights, strict=True)]
    # Behind it, because PyTorch's dropout draws from one generator.
    one = learner(name, STATEFUL[name], **settings, ema_decay=limit)
    for _ in range(5):
        one.apply(one.gradients(batch, 6, 1.0), 0.1)
    averages = one.arrays(StatePart.WEIGHTS)
    for average, right, weight in zip(averages, expected, weights, strict=True):
        np.testing.assert_allclose(average, right, rtol=1e-4, atol=1e-6)
        assert not np.allclose(average, weight, rtol=1e-3)
    assert all(map(np.array_equal, in_model(one), in_model(plain)))
    # The optimizer's part has them: how many updates, and the weights.
    assert all(map(np.array_equal, one.arrays(StatePart.OPTIMIZER)[-len(weights) :], weights))

    outputs_NK = one.outputs(batch.images_NHWC)
    with one.averaged():
        averaged_NK, sha256 = one.outputs(batch.images_NHWC), one.weights_sha256()
        assert not np.allclose(outputs_NK, averaged_NK)
    assert np.array_equal(one.outputs(batch.images_NHWC), outputs_NK)
    exported = learner(name, STATEFUL[name], seed=1)
    for part in (StatePart.WEIGHTS, StatePart.OWN):
        exported.assign(part, one.arrays(part), "the test")
    assert exported.weights_sha256() == sha256
    assert np.array_equal(exported.outputs(batch.images_NHWC), averaged_NK)


@pytest.mark.parametrize("name", BACKENDS)
def test_averages_leave_out_what_was_not_applied_and_begin_with_given_weights(name):
    one = learner(name, STATEFUL[name], ema_decay=0.9)
    named = one.named_weights()
    given = {key: np.full_like(array, 0.5) for key, array in named.arrays().items()}
    named.assign(given)
    assert all((array == 0.5).all() for array in one.arrays(StatePart.WEIGHTS))

    batch = batch_of(SHAPE)
    one.apply(one.gradients(batch, 4, 1.0), 0.1)
    before = [array.tobytes() for part in StatePart for array in one.arrays(part)]
    *gradients, figures = one.gradients(batch, 4, 1.0)
    own = one.arrays(StatePart.OWN)
    assert not one.apply([*gradients, figures * float("nan")], 0.1).is_applied
    after = {part: one.arrays(part) for part in StatePart} | {StatePart.OWN: own}
    changed = [array.tobytes() for array in (*after[StatePart.WEIGHTS], *after[StatePart.OPTIMIZER])]
    assert changed == before[: len(changed)]


@pytest.mark.parametrize("name", BACKENDS)
def test_a_killed_training_continues_with_its_averages_and_exports_them(name, tiny_uri, tmp_path):
    how = {"model": LINEAR[name], "checkpoint_every_steps": 1, "checkpoint": {"keep": 9}, "ema_decay": 0.9,
           "export": "last"}  # fmt: skip
    whole, killed, resumed = Recorder(), Recorder(killed_at=3), Recorder()
    result = train_here(tiny_uri, tmp_path / "whole", whole, **how)
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "parts", killed, **how)
    again = train_here(tiny_uri, tmp_path / "parts", resumed, **how)
    assert again.resumed_from is not None and killed.losses | resumed.losses == whole.losses
    assert (again.weights_sha256, again.evaluation) == (result.weights_sha256, result.evaluation)
    assert [each.validation for each in again.history] == [each.validation for each in result.history]

    # Against the weights of every step, as the checkpoints have them.
    *folders, _ = sorted((tmp_path / "whole" / "t" / "checkpoints").iterdir())
    assert len(folders) >= 3
    kept = [
        (load_arrays((folder / WEIGHTS).read_bytes()), load_arrays((folder / OPTIMIZER).read_bytes()))
        for folder in folders
    ]
    for number, ((before, _), (after, optimizer)) in enumerate(pairwise(kept), start=1):
        weights = optimizer[-len(after) :]
        share = shares(number + 1, 0.9)[-1]
        for old, average, weight in zip(before, after, weights, strict=True):
            np.testing.assert_allclose(average, old + share * (weight - old), rtol=1e-4, atol=1e-6)

    # Without them the same losses, and other figures.
    plain = train_here(tiny_uri, tmp_path / "plain", bare := Recorder(), **{**how, "ema_decay": 0.0})
    assert bare.losses == whole.losses and plain.weights_sha256 != result.weights_sha256
    config = task_of(tiny_uri, tmp_path, **how).config
    outcome = export_training(str(tmp_path / "whole"), config, result, "run")
    # Loaded back it has the figures that were recorded, or it would not be there.
    assert outcome.export.record.weights_sha256 == result.weights_sha256


def test_averages_are_another_training_and_none_are_the_same():
    assert "ema_decay" not in settings_that_matter(TrainConfig())
    assert settings_that_matter(TrainConfig(ema_decay=0.9))["ema_decay"] == "0.9"


@pytest.mark.parametrize(
    "how",
    [
        {"strategy": "parameter_server"},
        {"strategy": "local_sgd", "local_sgd": {"silos": ("a@1", "b@1")}, "num_workers": 2},
    ],
)
def test_strategies_without_averages_refuse_ema(how):
    with pytest.raises(UsageError, match="train.ema_decay = 0.9 with .*; remove train.ema_decay"):
        check_terms(TrainConfig(**how, launcher="local", ema_decay=0.9), SparkConfig())
