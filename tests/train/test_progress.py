"""Findings from a training's metrics: whether a model learns, and what to change if it does not."""

from __future__ import annotations

from tests.train.training import Recorder, train_here
from train.config import TrainConfig
from train.contracts.progress import Progress, TimeSpent, has_not_learned
from train.contracts.values import EpochRecord
from train.models.identity import inputs_hint


def test_a_model_that_learns_nothing_is_reported_once(tiny_uri, tmp_path):
    observer = Recorder()
    # Without dropout and augmentation its loss is the same in every epoch.
    model = "tests.train.torch_models:linear"
    still = {"model": model, "augment": {"random_crop_padding": 0}, "optimizer": "sgd", "learning_rate": 1e-12}
    still |= {"epochs": 6, "global_batch_size": 24, "schedule": "constant"}
    train_here(tiny_uri, tmp_path / "still", observer, **still)
    # Four steps an epoch: the fifth epoch is the first one with enough of them behind it, and the warning comes once.
    [told] = observer.named("loss_stuck")
    assert told["epoch"] == 4 and told["warning"].startswith("the loss has not fallen by the end of epoch 5 (now ")
    assert told["warning"].endswith(f"): change train.learning_rate{inputs_hint(TrainConfig(model=model))}")
    learning = Recorder()
    train_here(tiny_uri, tmp_path / "learning", learning, epochs=6, global_batch_size=24)
    assert learning.named("loss_stuck") == []


def test_too_few_steps_say_nothing_about_a_model():
    def history(*losses: float, num_steps: int) -> tuple[EpochRecord, ...]:
        return tuple(EpochRecord(epoch, num_steps, loss, 0.3, 1e-3, 1.0, None) for epoch, loss in enumerate(losses))

    assert not has_not_learned(history(1.8852, 2.3616, num_steps=2))
    assert has_not_learned(history(1.8852, 2.3616, num_steps=10))
    assert not has_not_learned(history(1.8852, 2.3616, 2.4, num_steps=10)), "it was said after the second epoch"
    assert not has_not_learned(history(1.8852, 1.5530, num_steps=10))


def test_an_epoch_that_begins_again_has_no_batch_left_out_yet():
    spent = TimeSpent(0.0, 0.0, 0.0)
    skipped = Progress().after_skip(8, spent).after_skip(8, spent).at_epoch_start()
    assert (skipped.skipped.total, skipped.skipped.num_rows) == (2, 0)


def test_the_hint_at_the_inputs_is_about_a_users_model_and_its_setting():
    assert inputs_hint(TrainConfig()) == ""
    assert "wants train.standardize = false" in inputs_hint(TrainConfig(model="mine:build"))
    unscaled = inputs_hint(TrainConfig(model="mine:build", standardize=False))
    assert "from 0 to 255" in unscaled and "wants train.standardize = true" in unscaled
