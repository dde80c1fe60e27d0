"""Silos: each rank trains on a dataset of its own, only weights travel, and those that drop out are not waited for."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etl.config import EtlConfig, SplitFractions
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig
from tests.lab.datasets import build_here, write_images
from tests.train.forked_ranks import launch_forked
from tests.train.ranks import WORKERS
from tests.train.training import StepWatcher, check_terms, task_of
from train.config import TrainConfig
from train.launching import LAUNCHERS
from train.readers.silos import SiloSteps
from train.reporting.observer import GlobalStep
from train.strategies.local_sgd import mean_of

ALL_TRAIN = SplitFractions(train=1.0, validation=0.0, test=0.0)
TORCH: dict[str, Any] = {"model": "tests.train.torch_models:smooth", "strategy": "local_sgd", "launcher": "local"}

KERAS: dict[str, Any] = {**TORCH, "model": "tests.train.models_under_test:smooth"}


@pytest.fixture(scope="module")
def silos(tmp_path_factory) -> tuple[str, ...]:
    """Three of different sizes, none of which has all three classes; two of them have only one."""
    found = []
    for number, (classes, num_images) in enumerate((((0, 1), 90), ((1,), 120), ((2,), 150))):
        folder = tmp_path_factory.mktemp(f"silo{number}")
        write_images(folder / "images", num_images=num_images, seed=number + 1)
        for label in {0, 1, 2} - set(classes):
            for path in (folder / "images" / f"class_{label}").iterdir():
                path.unlink()
        config = EtlConfig(image_size=16, encoding="png", chunk_bytes=8_000, split_fractions=ALL_TRAIN)
        found.append(build_here(str(folder / "images"), str(folder / "dataset"), config) + "@1")
    return tuple(found)


class Disturbing:
    """An observer that stops one silo for some rounds, and kills another one later."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.events: list[tuple[str, Mapping[str, Any]]] = []
        self.steps: list[GlobalStep] = []
        self._steps_until_back = 2

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        self.events.append((name, fields))
        if name == "rank_started":
            self.pids[fields["rank"]] = fields["pid"]
        if name == "silo_back":
            os.kill(self.pids[1], signal.SIGKILL)

    def step(self, step: GlobalStep) -> None:
        self.steps.append(step)
        if len(self.steps) == 3:
            os.kill(self.pids[2], signal.SIGSTOP)
        if self.silos("silo_missing") == [2] and not self.silos("silo_back"):
            self._steps_until_back -= 1
            if self._steps_until_back == 0:
                os.kill(self.pids[2], signal.SIGCONT)

    def silos(self, name: str) -> list[int]:
        return [fields["silo"] for event, fields in self.events if event == name]


@pytest.mark.starts("ranks")
def test_a_silo_away_for_two_rounds_comes_back_and_one_that_is_killed_does_not(tiny_uri, tmp_path, silos):
    """The figures are those on the pinned dataset, of whose classes no silo has all."""
    of_silos = {"silos": silos, "local_steps": 4, "silo_timeout_seconds": 1.5}
    config = {**TORCH, "local_sgd": of_silos, "num_workers": 3, "global_batch_size": 48, "epochs": 16}
    task = task_of(tiny_uri, tmp_path, **config)
    disturbing = Disturbing()
    result = launch_forked(task, disturbing)

    assert disturbing.silos("silo_missing") == [2, 1] and disturbing.silos("silo_back") == [2]
    lost = [fields["rank"] for name, fields in disturbing.events if name == "rank_lost"]
    assert lost == [1], [event for event in disturbing.events if event[0] == "rank_lost"]
    steps = SiloSteps((60, 40, 50), 48)
    assert len(disturbing.steps) == 16 * steps.num_steps, "no round is left out or reported twice"
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9
    assert not list((tmp_path / "t" / "silos").rglob("*.npz")), "the exchanged weights are taken away"


@pytest.mark.starts("ranks")
def test_a_silo_opens_its_own_data_alone(tiny_uri, tmp_path, silos):
    """Rank 0 also reads what it evaluates on; of that dataset the others open no image."""
    config = {**TORCH, "local_sgd": {"silos": silos}, "num_workers": 3, "global_batch_size": 48, "epochs": 1}
    task = task_of(tiny_uri, tmp_path, **config)
    launch_forked(task, StepWatcher(), f"{WORKERS}:every_rank_tells_what_it_opens")
    pinned, *of_silos = (Path(uri.rpartition("@")[0] or uri).resolve() for uri in (tiny_uri, *silos))
    for rank, own in enumerate(of_silos):
        opened = {Path(line) for line in (tmp_path / "opened" / f"rank-{rank}").read_text().splitlines()}
        assert {path for path in opened if path.is_relative_to(own / "shards")} == set(
            own.glob("shards/train/*.parquet")
        )
        assert not [path for other in of_silos if other != own for path in opened if path.is_relative_to(other)]
        of_pinned = {path.relative_to(pinned).parts[0] for path in opened if path.is_relative_to(pinned)}
        assert ("shards" in of_pinned) == (rank == 0)
        assert rank == 0 or of_pinned == {"manifests", "indexes"}


@pytest.mark.drill
def test_silos_train_a_keras_model(tiny_uri, tmp_path, silos):
    two = {"silos": (silos[0], silos[2]), "local_steps": 4}
    config = {**KERAS, "local_sgd": two, "num_workers": 2, "global_batch_size": 32, "epochs": 16}
    result = launch_forked(task_of(tiny_uri, tmp_path, **config), StepWatcher())
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9


def test_silos_give_samples_in_proportion_to_their_size_and_end_together():
    rng = np.random.default_rng(0)
    for _ in range(50):
        rows = tuple(rng.integers(1, 2000, rng.integers(1, 6)).tolist())
        steps = SiloSteps(rows, int(rng.integers(1, 300)))
        assert sum(steps.num_rows_of_step(step) for step in range(steps.num_steps)) == sum(rows), rows
        assert steps.num_rows_of_step(steps.num_steps) == 0 and steps.num_rows_of_step(steps.num_steps - 1) > 0


def test_a_round_without_samples_leaves_the_weights_as_rank_0_has_them():
    """The last step of an epoch, if the silos that still have samples are away."""
    first, second = np.full((2, 3), 5.0, np.float32), np.full((2, 3), 7.0, np.float32)
    figures, [mean] = mean_of([[np.array([0.0, 0.0]), first], [np.array([0.0, 0.0]), second]])
    assert figures.tolist() == [0, 0] and np.array_equal(mean, first)
    _, [mean] = mean_of([[np.array([1.0, 0.0]), first], [np.array([3.0, 0.0]), second]])
    assert np.array_equal(mean, np.full((2, 3), 6.5))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_workers": 2}, r"sgd.silos names 3 datasets, and train.num_workers = 2; .*; set train.num_workers = 3"),
        ({"local_sgd": {"silos": ("a@1", "b", "c@2")}}, r"train.local_sgd.silos names b without a version"),
        ({"launcher": "spark_barrier"}, r"without 2 ranks, .* a lost process ends the job; set .* to 'local'"),
        ({"launcher": "attach"}, r"a lost process ends the job; set .* to 'local'"),
        ({"strategy": "horovod", "model": "small_cnn"}, r"train.local_sgd.silos = .* with train.strategy = 'horovod'"),
    ],
)
def test_silos_that_cannot_train_together_are_refused(given, message):
    config = {**TORCH, "local_sgd": {"silos": ("a@1", "b@3", "c@2")}, "num_workers": 3, **given}
    with pytest.raises(UsageError, match=message):
        check_terms(TrainConfig(**config), SparkConfig(master="local[4]"))


def test_a_silo_with_another_class_is_named(tiny_uri, tmp_path):
    folder = Path(tmp_path) / "silo"
    write_images(folder / "images", num_classes=4)
    config = EtlConfig(image_size=16, encoding="png", split_fractions=ALL_TRAIN)
    uri = build_here(str(folder / "images"), str(folder / "dataset"), config) + "@1"
    task = task_of(tiny_uri, tmp_path / "models", **{**TORCH, "launcher": "inline", "local_sgd": {"silos": (uri,)}})
    with pytest.raises(UsageError, match=r"the classes class_3, which dataset.uri does not have; expected"):
        LAUNCHERS["inline"].launch(task, SparkConfig(), Disturbing())
