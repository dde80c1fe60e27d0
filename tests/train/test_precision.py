"""Sixteen bits on PyTorch; what float16's scaled loss changes, which is nothing but which small gradients survive."""

# pyright: reportArgumentType=false, reportOptionalMemberAccess=false
from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from shardmill.errors import IntegrityError, TrainingError
from tests.processes import in_own_process
from tests.train.learners import SHAPE, batch_of, learner
from tests.train.ranks import train_on_ranks
from tests.train.training import Killed, Recorder, train_here
from train.backends.backend import Learner, StatePart
from train.backends.torch.precision import FIRST_SCALE, LARGEST_SCALE, NUM_UPDATES_TO_DOUBLE, Precision
from train.checkpoints.state import OPTIMIZER, WEIGHTS, load_arrays
from train.config import TrainConfig
from train.published.export import LOSS_TOLERANCE, export_training

MODELS = "tests.train.torch_models"
STEEPNESS = "SHARDMILL_TEST_STEEPNESS"
# Overflows at the first scale, and not at a sixteenth of it or so; whatever else can act on gradients does.
STEEP = {"model": f"{MODELS}:steep", "mixed_precision": "float16", "num_streams": 4, "global_batch_size": 24,
         "epochs": 4, "accumulation_steps": 4, "gradient_clip_norm": 0.5, "ema_decay": 0.9, "learning_rate": 0.01,
         "non_finite": {"action": "skip"}}  # fmt: skip


def scale_of(one: Learner) -> float:
    # Followed by the number of updates since it changed.
    return float(one.arrays(StatePart.OPTIMIZER)[-2])


def with_scale(one: Learner, scale: float) -> None:
    arrays = one.arrays(StatePart.OPTIMIZER)
    one.assign(StatePart.OPTIMIZER, [*arrays[:-2], np.array(scale, np.float32), arrays[-1]], "the test")


def test_an_export_is_compared_in_the_precision_that_was_trained_and_not_in_auto(tiny_uri, tmp_path):
    config = {"model": f"{MODELS}:smooth", "epochs": 1}
    result = train_here(tiny_uri, tmp_path, **config)
    # Twice the tolerance of float32; that of bfloat16 is five times as large.
    loss = result.evaluation.loss + 2 * LOSS_TOLERANCE * max(1.0, result.evaluation.loss)
    recorded = replace(result, evaluation=replace(result.evaluation, loss=loss))
    asked = TrainConfig(**config, mixed_precision="auto", backend="torch")
    with pytest.raises(IntegrityError, match="the export has loss"):
        export_training(str(tmp_path), asked, recorded, "run-1")


@pytest.mark.parametrize("mixed_precision", ["off", "bfloat16", "float16"])
def test_every_precision_trains_with_float32_weights(tiny_uri, tmp_path, mixed_precision):
    config = {"model": f"{MODELS}:smooth", "mixed_precision": mixed_precision, "epochs": 3, "learning_rate": 0.005}
    result = train_here(tiny_uri, tmp_path, **config)
    assert result.history[-1].train_loss < result.history[0].train_loss
    weights = load_arrays((tmp_path / result.checkpoint / WEIGHTS).read_bytes())
    assert {str(array.dtype) for array in weights} == {"float32"}


def test_gradients_and_their_clipping_know_no_scale(monkeypatch):
    monkeypatch.setenv(STEEPNESS, "0")
    batch, norms, changes = batch_of(SHAPE, num_rows=6), {}, {}
    for precision in ("off", "float16"):
        config = {"optimizer": "sgd", "gradient_clip_norm": 0.5, "momentum": 0.0, "mixed_precision": precision}
        one = learner("torch", f"{MODELS}:steep", **config)
        before = one.arrays(StatePart.WEIGHTS)
        outcome = one.apply(one.gradients(batch, 6, 1.0), 1.0)
        norms[precision] = outcome.gradient_norm
        changes[precision] = np.concatenate(
            [(after - old).ravel() for old, after in zip(before, one.arrays(StatePart.WEIGHTS), strict=True)]
        )
        assert outcome.is_applied and not outcome.overflowed
    assert norms["off"] > 0.5 and norms["float16"] == pytest.approx(norms["off"], rel=1e-2)
    assert np.linalg.norm(changes["float16"]) == pytest.approx(0.5, rel=1e-3)
    np.testing.assert_allclose(changes["float16"], changes["off"], atol=2e-3)


def test_an_overflow_halves_the_scale_and_nothing_else_until_it_cannot(monkeypatch):
    monkeypatch.setenv(STEEPNESS, "1e7")
    one = learner("torch", f"{MODELS}:steep", mixed_precision="float16", optimizer="adam")
    batch = batch_of(SHAPE)
    before = [array.tobytes() for array in (*one.arrays(StatePart.WEIGHTS), *one.arrays(StatePart.OPTIMIZER)[:-2])]
    for exponent in range(14, -1, -1):
        outcome = one.apply(one.gradients(batch, 4, 1.0), 0.1)
        assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (True, True, 2.0**exponent)
        assert np.isfinite(outcome.loss) and not np.isfinite(outcome.gradient_norm)
    outcome = one.apply(one.gradients(batch, 4, 1.0), 0.1)
    assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (False, False, 1.0)
    after = [array.tobytes() for array in (*one.arrays(StatePart.WEIGHTS), *one.arrays(StatePart.OPTIMIZER)[:-2])]
    assert after == before

    # A loss that is not finite is a fault at any scale, and no reason to lower it.
    with_scale(one, 8.0)
    *gradients, figures = one.gradients(batch, 4, 1.0)
    outcome = one.apply([*gradients, figures * float("nan")], 0.1)
    assert (outcome.is_applied, outcome.overflowed, scale_of(one)) == (False, False, 8.0)


def test_the_scale_grows_after_many_updates_and_not_without_end():
    precision = Precision("float16")
    scale, num_updates = precision.state()
    for _ in range(NUM_UPDATES_TO_DOUBLE - 1):
        precision.after_update()
    assert (float(scale), int(num_updates)) == (FIRST_SCALE, NUM_UPDATES_TO_DOUBLE - 1)
    precision.after_update()
    assert (float(scale), int(num_updates)) == (2 * FIRST_SCALE, 0)
    for _ in range(20 * NUM_UPDATES_TO_DOUBLE):
        precision.after_update()
    assert float(scale) == LARGEST_SCALE
    # An overflow breaks the row.
    precision.after_update()
    assert precision.lower() and (float(scale), int(num_updates)) == (LARGEST_SCALE / 2, 0)
    precision.begin()
    assert float(scale) == FIRST_SCALE
    assert Precision("bfloat16").state() == [] and not Precision("bfloat16").lower()


@pytest.fixture(scope="module")
def alone(tiny_uri, tmp_path_factory):
    """A whole training at one rank, and what was seen of it."""
    recorder, folder = Recorder(), tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STEEPNESS, "100")
        return train_here(tiny_uri, folder, recorder, **STEEP), recorder, folder


def test_a_killed_training_continues_with_its_scale(tiny_uri, tmp_path, monkeypatch, alone):
    monkeypatch.setenv(STEEPNESS, "100")
    result, recorder, folder = alone
    assert 2 <= result.num_overflowed_steps <= 9 and result.num_skipped_steps == 0
    assert result.history[-1].train_loss < result.history[0].train_loss
    scale = float(load_arrays((folder / result.last_checkpoint / OPTIMIZER).read_bytes())[-5])
    assert scale == FIRST_SCALE / 2**result.num_overflowed_steps

    # The first overflows are over by then, and a fresh scale would bring them again.
    first, second = Recorder(killed_at=10), Recorder()
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path, first, **STEEP, checkpoint_every_steps=9)
    again = train_here(tiny_uri, tmp_path, second, **STEEP, checkpoint_every_steps=9)
    assert again.resumed_from is not None and first.losses | second.losses == recorder.losses
    assert again.weights_sha256 == result.weights_sha256
    assert again.num_overflowed_steps == result.num_overflowed_steps


def test_gradients_too_large_for_any_scale_are_a_fault(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(STEEPNESS, "1e8")
    recorder = Recorder()
    with pytest.raises(TrainingError, match=r"gradient norm (inf|nan) .*\(global step 15\); the update was not"):
        train_here(tiny_uri, tmp_path, recorder, **{**STEEP, "non_finite": {"action": "stop"}})
    assert len(recorder.steps) == 15, "half the scale each time, from 2**15 to 1"


@pytest.mark.drill
def test_ranks_agree_on_what_overflowed(tiny_uri, tmp_path, monkeypatch, alone):
    monkeypatch.setenv(STEEPNESS, "100")
    result, recorder, _ = alone
    # The parts of a step are those of one rank: what overflows in float16 depends on them. That all ranks end with the
    # same weights is looked at there.
    config = {**STEEP, "strategy": "torch_ddp", "accumulation_steps": 2}
    several, watched = train_on_ranks(tiny_uri, tmp_path, 2, config)
    assert several.num_overflowed_steps == result.num_overflowed_steps and several.num_skipped_steps == 0
    for step, loss in recorder.losses.items():
        # What ranks round in sixteen bits before it is added up.
        assert float.fromhex(watched.losses[step]) == pytest.approx(float.fromhex(loss), rel=0.02, abs=1e-3)


@pytest.mark.drill
def test_a_keras_model_on_pytorch_trains_in_float16_as_in_float32(tiny_uri, tmp_path):
    config = {"backend": "torch", "model": "small_cnn", "epochs": 2, "learning_rate": 0.01, "accumulation_steps": 2}
    plain = in_own_process("torch", train_here, tiny_uri, tmp_path / "float32", **config)
    half = in_own_process("torch", train_here, tiny_uri, tmp_path / "float16", **config, mixed_precision="float16")
    assert half.num_overflowed_steps <= 2 and half.num_skipped_steps == 0
    assert half.weights_sha256 != plain.weights_sha256
    for one, other in zip(half.history, plain.history, strict=True):
        assert one.train_loss == pytest.approx(other.train_loss, rel=0.05)
    assert half.history[-1].train_loss < half.history[0].train_loss
