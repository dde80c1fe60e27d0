"""A checkpoint belongs to one training: what would change the outcome is refused and named, all else may change."""

from __future__ import annotations

import pytest

from shardmill.checksummed import with_checksum
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from tests.lab.datasets import make_dataset
from tests.train.checkpoints import CONFIG, newest
from tests.train.training import Killed, Recorder, train_here
from train.checkpoints.checkpoint import (
    MARKER,
)
from train.config import TrainConfig
from train.contracts.values import to_json
from train.identity import fields_of_settings, settings_of, settings_that_matter
from train.settings.kinds import DEFAULTED, DURATION, EXECUTION
from train.strategies.options import LocalSgdOptions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, r"train.seed: then 0, now 1;"),
        ({"model": "small_cnn"}, r'train.model: then "tests.*:linear", now "small_cnn"'),
        (
            {"optimizer": "sgd", "momentum": 0.5, "schedule": "step", "schedule_step": {"factor": 0.5}},
            r'train.momentum: then absent, now 0.5; train.optimizer: then "auto", now "sgd"; train.schedule: .*; '
            r"train.schedule_step.factor: then absent, now 0.5; train.weight_decay: then absent, now 0.0001;",
        ),
        ({"global_batch_size": 16}, r"train.global_batch_size: then 32, now 16"),
        ({"augment": {"images": "photographs"}}, r"train.augment: then .*false.* now .*true"),
    ],
)
def test_another_training_is_refused_with_each_difference(tiny_uri, models, change, message):
    with pytest.raises(UsageError, match=f"belongs to another training: .*{message}"):
        train_here(tiny_uri, models, **{**CONFIG, **change})


def test_another_dataset_version_is_refused(models, tmp_path):
    other = make_dataset(tmp_path / "other", num_images=90)
    with pytest.raises(UsageError, match="dataset: then version 1, now version 1"):
        train_here(other, models, **CONFIG)


def test_a_factory_that_builds_something_else_is_refused(tiny_uri, tmp_path, monkeypatch):
    for width in (4, 8):
        (tmp_path / f"v{width}").mkdir()
        (tmp_path / f"v{width}" / "changing_factory.py").write_text(
            "import keras\n"
            "def model(image_shape, num_classes):\n"
            f"    layers = [keras.layers.Flatten(), keras.layers.Dense({width}), keras.layers.Dense(num_classes)]\n"
            "    return keras.Sequential([keras.Input(image_shape), *layers])\n"
        )
    import sys

    config = {"model": "changing_factory:model", "checkpoint_every_steps": 1}
    monkeypatch.syspath_prepend(tmp_path / "v4")
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "models", Recorder(killed_at=2), **config)
    del sys.modules["changing_factory"]
    monkeypatch.syspath_prepend(tmp_path / "v8")
    with pytest.raises(UsageError, match=r"source of train.model: then SHA-256 \w+, now \w+; built model: then"):
        train_here(tiny_uri, tmp_path / "models", **config)


def test_a_factory_that_builds_something_else_from_the_same_source_is_refused(tiny_uri, tmp_path, monkeypatch):
    """It reads a setting from the environment: nothing in its source shows it, and no shape of a weight."""
    (tmp_path / "swaying_factory.py").write_text(
        "import os\n"
        "import keras\n"
        "def model(image_shape, num_classes):\n"
        "    layers = [keras.layers.Activation(os.environ['ACTIVATION']), keras.layers.Flatten()]\n"
        "    return keras.Sequential([keras.Input(image_shape), *layers, keras.layers.Dense(num_classes)])\n"
    )
    config = {"model": "swaying_factory:model", "checkpoint_every_steps": 1}
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ACTIVATION", "relu")
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "models", Recorder(killed_at=2), **config)
    monkeypatch.setenv("ACTIVATION", "tanh")
    with pytest.raises(UsageError, match="belongs to another training: built model: then configuration"):
        train_here(tiny_uri, tmp_path / "models", **config)
    with pytest.raises(UsageError, match="the source here has SHA-256 .* which the driver found"):
        train_here(tiny_uri, tmp_path / "models", expect_source="0" * 64, **config)


def test_what_does_not_change_the_outcome_may_change(tiny_uri, models, whole):
    recorder = Recorder()
    free = {
        "format": "tfrecord",
        "reading": {"prefetch_bytes": 1, "threads": 1},
        "checkpoint_every_steps": 0,
        "strategy": "horovod",
    }
    assert {"reading.prefetch_bytes", "reading.threads", *free} - {"reading"} <= settings_of(EXECUTION)
    result = train_here(tiny_uri, models, recorder, **{**CONFIG, **free})
    assert recorder.named("resumed")
    assert result.weights_sha256 == whole.weights_sha256


def test_every_free_setting_exists():
    free = settings_of(EXECUTION) | settings_of(DURATION) | settings_of(DEFAULTED) | {"backend"}
    assert fields_of_settings().keys() >= free
    # Written out, because a new setting that is named here would rename every training there is: declare it DEFAULTED.
    assert sorted(settings_that_matter(TrainConfig())) == [
        "augment", "backend", "early_stop_epochs", "global_batch_size", "gradient_clip_norm", "label_smoothing",
        "learning_rate", "learning_rate_batch_size", "loss", "mixed_precision", "model", "model_outputs",
        "num_streams", "optimizer", "schedule", "seed", "standardize", "warmup_steps",
    ]  # fmt: skip


def test_a_setting_that_changes_nothing_makes_no_other_training():
    """What images are declared to be, if that decides nothing; the value of `auto`."""
    for one, other in (
        ({}, {"augment": {"random_flip": False}}),
        ({"augment": {"random_flip": True}}, {"augment": {"images": "photographs"}}),
        ({"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 1e-4}),
    ):
        assert settings_that_matter(TrainConfig(**one)) == settings_that_matter(TrainConfig(**other))


def test_what_makes_another_training_than_those_before_it_is_named():
    averaged = TrainConfig(strategy="local_sgd").with_options(LocalSgdOptions(local_steps=4))
    assert settings_that_matter(averaged).keys() - settings_that_matter(TrainConfig()).keys() == {
        "strategy",
        "local_sgd.local_steps",
    }
    assert settings_that_matter(TrainConfig(strategy="horovod")) == settings_that_matter(TrainConfig())


def test_a_marker_of_another_program_version_is_not_taken_for_damage(tiny_uri, models):
    marker = newest(models) / MARKER
    body = to_json(open_dataset(tiny_uri).pin)
    marker.write_bytes(with_checksum(body))
    with pytest.raises(UsageError, match="has a different layout"):
        train_here(tiny_uri, models, **CONFIG)
    assert marker.exists()
