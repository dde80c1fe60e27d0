"""One tiny dataset for all training tests, and one training on it, whole and interrupted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from tests.lab.datasets import make_dataset
from tests.train.checkpoints import CONFIG, KILLED_AT
from tests.train.training import Killed, Recorder, train_here
from train.config import TrainConfig
from train.planning.setup import resolve
from train.planning.trainings import choose_training
from train.published.export import export_training


@pytest.fixture(scope="session")
def tiny_uri(tmp_path_factory) -> str:
    """120 images of 16 x 16 in 3 classes, in both formats, with all three splits."""
    return make_dataset(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def whole(tiny_uri, tmp_path_factory):
    """The result of a training that nothing disturbed."""
    return train_here(tiny_uri, tmp_path_factory.mktemp("whole"), **CONFIG)


@pytest.fixture(scope="session")
def interrupted(tiny_uri, tmp_path_factory) -> Path:
    """A models folder with three checkpoints, after 2, 3 and 4 steps; copy it before use."""
    models = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(Killed):
        train_here(tiny_uri, models, Recorder(killed_at=KILLED_AT), **CONFIG)
    return models


@pytest.fixture
def models(interrupted, tmp_path) -> Path:
    return Path(shutil.copytree(interrupted, tmp_path / "models"))


@pytest.fixture(scope="session")
def exported(tiny_uri, tmp_path_factory) -> Path:
    """A models folder with a training of `small_cnn` and export 1 of it; only to be read."""
    models = tmp_path_factory.mktemp("exported")
    config = TrainConfig(epochs=1, global_batch_size=32, augment={"random_crop_padding": 1})  # pyright: ignore[reportArgumentType]
    export_training(str(models), config, train_here(tiny_uri, models, model="small_cnn", epochs=1), "run")
    return models


@pytest.fixture(scope="session")
def choice_of(tiny_uri):
    """choice_of(models, tree) -> config without `auto`, dataset, what the driver chooses to do, the models' store."""

    def choose(models, tree):
        setup, dataset, store = resolve(tree.train, SparkConfig()), open_dataset(tiny_uri), open_store(str(models))
        return setup.config, dataset, choose_training(store, setup.identity_config, dataset.pin), store

    return choose


@pytest.fixture
def asked_here(monkeypatch):
    """What a plan asks other processes is answered in this one, of PyTorch; a step is timed three times, and no longer.

    Measured bytes are then those of pytest.
    """
    from train.launching.side_process import ANSWERED_HERE
    from train.planning import estimate, probe, state_bytes, state_program

    monkeypatch.setattr(estimate, "MEASURED_SECONDS", 0.0)
    monkeypatch.setattr(estimate, "CACHED_SECONDS", 0.0)
    for module, task, work in (
        (estimate, estimate.PaceTask, estimate.measure),
        (probe, probe.ProbeTask, probe.measure),
        (state_program, state_bytes.StateTask, state_program.count),
    ):
        monkeypatch.setitem(ANSWERED_HERE, module.__name__, (task, work))


@pytest.fixture
def own_jvm(monkeypatch):
    """A JVM of this test alone: what one was started with, also its environment, reaches every later application."""
    from pyspark import SparkContext

    monkeypatch.setattr(SparkContext, "_gateway", None)
    monkeypatch.setattr(SparkContext, "_jvm", None)
    yield
    if SparkContext._gateway is not None:
        SparkContext._gateway.shutdown()
        SparkContext._gateway.proc.kill()
