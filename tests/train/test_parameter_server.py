"""Strategies whose ranks have rows of their own: a parameter server, silos, slow ranks with fewer streams."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from etl.config import EtlConfig, SplitFractions
from shardmill.dataset.dataset import open_dataset
from shardmill.epoch_plan import streams_by_weight
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.jobs.config import SparkConfig
from shardmill.stores import open_store
from shardmill.words import counted
from tests.lab.datasets import build_here, write_images
from tests.train.driver_process import start_driver
from tests.train.forked_ranks import forked_ranks, launch_forked
from tests.train.multi_rank_workers import AWAY, HELD_FROM, KILL_AT, let_go
from tests.train.ranks import SERVED, WORKERS, Watcher, planned
from tests.train.training import MODELS, DriverRecorder, Recorder, task_of, train_here
from train.checkpoints.arrays import load_arrays, rank_file
from train.checkpoints.checkpoint import complete_checkpoints
from train.config import TrainConfig
from train.contracts.world import Role
from train.launching import LAUNCHERS
from train.launching.rank import DEFAULT_WORKER
from train.planning.checks import check
from train.planning.plan import TrainingPlan
from train.planning.setup import resolve
from train.readers.silos import SiloSteps
from train.reporting.observer import GlobalStep
from train.restarts import launch_until_done
from train.strategies import roles_of
from train.strategies.local_sgd import mean_of
from train.strategies.options import ParameterServerOptions
from train.strategies.parameter_server import STEPS_AHEAD


@dataclass
class Killer(Watcher):
    """Kills the process of a rank, once, when a step is reported."""

    rank: int = -1
    at: tuple[int, int] = (0, 0)
    models: Path = Path()
    """Of ranks that are held until it has."""
    wait_seconds: float = 0.0
    pids: dict[int, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def step(self, step) -> None:
        super().step(step)
        for name, seconds in step.reports[0].seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if (step.epoch, step.step) == self.at and self.rank >= 0:
            time.sleep(self.wait_seconds)
            os.kill(self.pids[self.rank], signal.SIGKILL)
            self.rank = -1
            let_go(self.models)

    def event(self, name: str, fields: dict) -> None:
        super().event(name, fields)
        if name == "rank_started":
            self.pids[fields["rank"]] = fields["pid"]


def launch(uri, models, watcher, worker=DEFAULT_WORKER, **config):
    given = {**SERVED, **config}
    task, spark = task_of(uri, models, **given), SparkConfig(master="local[5]")
    with forked_ranks(task.config.backend):
        return LAUNCHERS[given["launcher"]].launch(task, spark, watcher, worker=worker)


def assert_all_steps_in_order(watcher: Watcher, uri: str, config: TrainConfig) -> None:
    assert list(watcher.sample_ids.items()) == list(planned(uri, config).items())
    num_rows = open_dataset(uri).manifest.splits["train"].num_rows
    for epoch in range(config.epochs):
        ids = [each for (of_epoch, _), ids in watcher.sample_ids.items() if of_epoch == epoch for each in ids]
        assert len(ids) == len(set(ids)) == num_rows


def num_trained(checkpoint: Path) -> int:
    """How many batches the model of `counting` was trained with."""
    [count] = load_arrays((checkpoint / rank_file(0)).read_bytes())
    return int(count)


@pytest.mark.starts("ranks")
def test_workers_train_what_the_chief_dispatches_and_a_lost_one_is_replaced(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(HELD_FROM, "40")
    watcher = Killer(rank=2, at=(1, 2), models=tmp_path)
    result = launch(tiny_uri, tmp_path, watcher, f"{WORKERS}:chief_reports_where_variables_are")
    config = TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}})
    assert_all_steps_in_order(watcher, tiny_uri, config)
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9
    assert watcher.names.count("rank_lost") == 1 and watcher.named("rank_lost")[-1]["rank"] == 2
    # The lost worker's steps without an answer at the chief: one that it computed, and those whose answers were lost
    # with it because the chief had not come to them. It may have died between two.
    [repeated] = watcher.named("redispatched") or [{"num_steps": 0, "num_applied_twice": 0}]
    assert 0 <= repeated["num_applied_twice"] <= repeated["num_steps"] <= STEPS_AHEAD * config.num_workers
    # By the model's own count; a worker may have died before it came to that.
    num_more = num_trained(tmp_path / result.last_checkpoint) - result.num_steps
    assert repeated["num_applied_twice"] <= num_more <= repeated["num_steps"]
    # Each variable is whole, on one server, and those that follow each other are on both in turn.
    devices = [device for name, device in watcher.named("variables")[-1].items() if name != "rank"]
    servers = [re.fullmatch(r"/job:ps/replica:0/task:(\d)/device:CPU:0", device)[1] for device in devices]
    assert servers == [str(place % 2) for place in range(5)]
    # What happens in workers is told.
    assert all(watcher.seconds[name] > 0 for name in ("input_wait", "compute", "fetch", "decode"))
    assert result.world_size == 2
    files = {file.name for file in (tmp_path / result.checkpoint).iterdir()}
    assert files == {"MARKER.json", "weights.npz", "optimizer.npz", "rank-00000.npz"}


@pytest.mark.drill
def test_a_step_that_is_lost_with_its_worker_is_given_to_another_and_reported(tiny_uri, tmp_path, monkeypatch):
    """Steps take so long that the worker is in the middle of one soon after one has ended; if it was not, once more."""
    laborious = {"model": "tests.train.models_under_test:laborious", "epochs": 2, "checkpoint_every_steps": 0}
    monkeypatch.setenv(HELD_FROM, "15")
    for attempt in range(3):
        models = tmp_path / str(attempt)
        watcher = Killer(rank=2, at=(1, 2), models=models, wait_seconds=0.1)
        launch(tiny_uri, models, watcher, f"{WORKERS}:every_rank_is_held", **laborious)
        assert_all_steps_in_order(watcher, tiny_uri, TrainConfig(**{**SERVED, "epochs": 2}))
        if watcher.named("redispatched"):
            break
    told = watcher.named("redispatched")[-1]
    assert told["num_steps"] >= 1 and told["warning"].startswith(
        f"{counted(told['num_steps'], 'step')} given to another"
    )


@pytest.mark.drill
def test_a_chief_continues_where_it_was_killed(tiny_uri, tmp_path, monkeypatch):
    watcher, rest = Killer(), Killer()
    # By itself, instead of reporting step 5 of epoch 2.
    monkeypatch.setenv(KILL_AT, "21")
    with pytest.raises(TrainingError, match=r"^rank 0 .* was killed by .* after step 4 of epoch 2"):
        launch(tiny_uri, tmp_path, watcher, f"{WORKERS}:every_loop_dies", model=f"{MODELS}:stateful")
    result = launch(tiny_uri, tmp_path, rest, model=f"{MODELS}:stateful")
    assert result.resumed_from is not None and result.resumed_from.epoch == 2
    both = watcher.sample_ids | rest.sample_ids
    assert both == planned(tiny_uri, TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}}))


@pytest.mark.drill
def test_sigterm_stops_behind_what_is_dispatched_and_every_step_is_applied_once(tiny_uri, tmp_path, monkeypatch):
    """By three workers: each batch is dispatched, and trained with, exactly once, by the model's own count."""
    config = SERVED | {"num_workers": 3, "parameter_server": {"num_servers": 1}, "checkpoint_every_steps": 0}
    config["watch"] = {"stop_timeout_seconds": 60}
    pin = open_dataset(tiny_uri).pin
    monkeypatch.setenv(HELD_FROM, "40")
    first = start_driver(tmp_path, config, worker=f"{WORKERS}:every_rank_is_held", dataset=pin).stopped_somewhere()
    newest = next(complete_checkpoints(open_store(tmp_path / "models"), "trainings/test"))
    assert len(first["sample_ids"]) == newest.marker.global_step == num_trained(tmp_path / "models" / newest.path) > 0
    # Of one processor: TensorFlow would give each server one thread, in which one step waits for another process.
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})
    try:
        resumed = start_driver(tmp_path, config, dataset=pin)
    finally:
        os.sched_setaffinity(0, processors)
    second = resumed.outcome()
    expected = [list(ids) for ids in planned(tiny_uri, TrainConfig(**config)).values()]
    assert first["sample_ids"] + second["sample_ids"] == expected
    newest = next(complete_checkpoints(open_store(tmp_path / "models"), "trainings/test"))
    assert newest.marker.global_step == num_trained(tmp_path / "models" / newest.path) == len(expected)


@pytest.mark.exhaustive
def test_a_server_that_is_lost_is_named_and_the_training_continues(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(HELD_FROM, "16")
    watcher = Killer(rank=4, at=(1, 2), models=tmp_path)
    config = TrainConfig(**{**SERVED, "max_restarts": 1, "augment": {"random_crop_padding": 1}})
    held = f"{WORKERS}:every_rank_is_held"
    done = launch_until_done(
        lambda plan: launch(tiny_uri, tmp_path, watcher, held, num_workers=plan.config.num_workers),
        TrainingPlan(resolve(config, SparkConfig())),
        watcher,
        check=lambda plan: check(plan.setup),
    )
    assert re.match(r"rank 4 \(host .*was killed by SIGKILL after step \d of epoch 1", done.restarts[0].cause)
    assert done.result.world_size == SERVED["num_workers"] and watcher.sample_ids == planned(tiny_uri, config)


@pytest.mark.exhaustive
def test_the_last_worker_is_not_spared(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(HELD_FROM, "40")
    killer, one = Killer(rank=1, at=(1, 2), models=tmp_path), {"num_workers": 1, "parameter_server": {"num_servers": 1}}
    with pytest.raises(TrainingError, match=r"^rank 1 \(host .*was killed by SIGKILL"):
        launch(tiny_uri, tmp_path, killer, f"{WORKERS}:every_rank_is_held", **one)


@pytest.mark.exhaustive
def test_what_a_worker_cannot_read_ends_the_training_with_its_own_error(tmp_path):
    from tests.lab.datasets import make_dataset

    uri = make_dataset(tmp_path / "data")
    for shard in (tmp_path / "data").rglob("*.parquet"):
        if "train" in str(shard):
            data = bytearray(shard.read_bytes())
            data[64] ^= 1
            shard.write_bytes(data)
    with pytest.raises(IntegrityError, match=r"rank [12]"):
        launch(uri, tmp_path / "models", Killer())


@pytest.mark.exhaustive
def test_it_trains_in_a_barrier_stage_and_a_lost_worker_is_replaced(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv(HELD_FROM, "40")
    watcher = Killer(rank=1, at=(1, 2), models=tmp_path)
    result = launch(tiny_uri, tmp_path, watcher, f"{WORKERS}:every_rank_is_held", launcher="spark_barrier")
    assert watcher.named("rank_lost")[-1]["rank"] == 1
    assert_all_steps_in_order(watcher, tiny_uri, TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}}))
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9


def test_roles_follow_from_the_numbers():
    config = TrainConfig(strategy="parameter_server", num_workers=3)
    roles = roles_of(config.with_options(ParameterServerOptions(num_servers=2)))
    assert roles == (Role.CHIEF, *[Role.WORKER] * 3, *[Role.SERVER] * 2)


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


@dataclass
class Disturbing(DriverRecorder):
    """Stops one silo for some rounds, and kills another one later; the ranks are held a few steps ahead of it."""

    models: Path = Path()
    pids: dict[int, int] = field(default_factory=dict)
    steps_until_back: int = 2

    def event(self, name: str, fields: Mapping[str, Any]) -> None:
        super().event(name, fields)
        if name == "rank_started":
            self.pids[fields["rank"]] = fields["pid"]
        if name == "silo_back":
            os.kill(self.pids[1], signal.SIGKILL)
            self.away(1).touch()

    def step(self, step: GlobalStep) -> None:
        super().step(step)
        if len(self.steps) == 3:
            os.kill(self.pids[2], signal.SIGSTOP)
            self.away(2).touch()
        if self.silos("silo_missing") == [2] and not self.silos("silo_back"):
            self.steps_until_back -= 1
            if self.steps_until_back == 0:
                self.away(2).unlink()
                os.kill(self.pids[2], signal.SIGCONT)
        let_go(self.models, len(self.steps) + 3)

    def away(self, rank: int) -> Path:
        (folder := self.models / AWAY).mkdir(parents=True, exist_ok=True)
        return folder / str(rank)

    def silos(self, name: str) -> list[int]:
        return [fields["silo"] for fields in self.named(name)]


@pytest.mark.starts("ranks")
def test_a_silo_away_for_two_rounds_comes_back_and_one_that_is_killed_does_not(tiny_uri, tmp_path, silos, monkeypatch):
    """The metrics are those on the pinned dataset, of whose classes no silo has all."""
    of_silos = {"silos": silos, "local_steps": 4, "silo_timeout_seconds": 60}
    config = {**TORCH, "local_sgd": of_silos, "num_workers": 3, "global_batch_size": 48, "epochs": 16}
    task = task_of(tiny_uri, tmp_path, **config)
    disturbing = Disturbing(models=tmp_path)
    monkeypatch.setenv(HELD_FROM, "3")
    result = launch_forked(task, disturbing, f"{WORKERS}:silos_are_late_only_if_they_are_away")

    assert disturbing.silos("silo_missing") == [2, 1] and disturbing.silos("silo_back") == [2]
    lost = disturbing.named("rank_lost")
    assert [fields["rank"] for fields in lost] == [1], lost
    steps = SiloSteps((60, 40, 50), 48)
    assert len(disturbing.steps) == 16 * steps.num_steps, "no round is left out or reported twice"
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9
    assert not list((tmp_path / "t" / "silos").rglob("*.npz")), "the exchanged weights are taken away"


@pytest.mark.starts("ranks")
def test_a_silo_opens_its_own_data_alone(tiny_uri, tmp_path, silos):
    """Rank 0 also reads what it evaluates on; of that dataset the others open no image."""
    config = {**TORCH, "local_sgd": {"silos": silos}, "num_workers": 3, "global_batch_size": 48, "epochs": 1}
    task = task_of(tiny_uri, tmp_path, **config)
    launch_forked(task, DriverRecorder(), f"{WORKERS}:every_rank_reports_what_it_opens")
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
    result = launch_forked(task_of(tiny_uri, tmp_path, **config), DriverRecorder())
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
    metrics, [mean] = mean_of([[np.array([0.0, 0.0]), first], [np.array([0.0, 0.0]), second]])
    assert metrics.tolist() == [0, 0] and np.array_equal(mean, first)
    _, [mean] = mean_of([[np.array([1.0, 0.0]), first], [np.array([3.0, 0.0]), second]])
    assert np.array_equal(mean, np.full((2, 3), 6.5))


def test_a_silo_with_another_class_is_named(tiny_uri, tmp_path):
    folder = Path(tmp_path) / "silo"
    write_images(folder / "images", num_classes=4)
    config = EtlConfig(image_size=16, encoding="png", split_fractions=ALL_TRAIN)
    uri = build_here(str(folder / "images"), str(folder / "dataset"), config) + "@1"
    task = task_of(tiny_uri, tmp_path / "models", **{**TORCH, "launcher": "inline", "local_sgd": {"silos": (uri,)}})
    with pytest.raises(UsageError, match=r"the classes class_3, which dataset.uri does not have; expected"):
        LAUNCHERS["inline"].launch(task, SparkConfig(), Disturbing())


CONFIG = {"model": "tests.train.torch_models:smooth", "num_streams": 8, "global_batch_size": 24, "epochs": 4,
          "label_smoothing": 0.1, "record_samples": True}  # fmt: skip


def test_every_stream_has_one_rank_and_shares_follow_the_weights():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    chance = random.Random(seed)
    for _ in range(500):
        num_streams = chance.randint(1, 64)
        weights = [chance.uniform(0.01, 10) for _ in range(chance.randint(1, num_streams))]
        ranges = streams_by_weight(weights, num_streams)
        assert [stream for each in ranges for stream in each] == list(range(num_streams))
        assert all(ranges) and len(ranges) == len(weights)
        if min(weights) / sum(weights) * num_streams >= 1:
            shares = [weight / sum(weights) * num_streams for weight in weights]
            assert all(abs(len(each) - share) < 1 for each, share in zip(ranges, shares, strict=True))
    assert [len(each) for each in streams_by_weight([1, 1, 0.5], 10)] == [4, 4, 2]


@pytest.mark.starts("ranks")
def test_the_global_batches_and_losses_stay_the_same(tiny_uri, tmp_path):
    one, watcher = Recorder(), DriverRecorder()
    train_here(tiny_uri, tmp_path / "one", one, **CONFIG)
    how = {"strategy": "torch_ddp", "launcher": "local", "num_workers": 2, "rank_weights": [3, 1]}
    task = task_of(tiny_uri, tmp_path / "two", **CONFIG, **how)
    launch_forked(task, watcher)
    assert watcher.sample_ids == {(report.epoch, report.step): report.sample_ids for report in one.steps}
    for step, loss in one.losses.items():
        assert float.fromhex(watcher.losses[step]) == pytest.approx(float.fromhex(loss), rel=1e-5)
    # Of a full step the first rank reads three quarters.
    assert [len(each.sample_ids) for each in watcher.steps[0].reports] == [18, 6]
