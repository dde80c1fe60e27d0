"""The strategy `parameter_server`: each sample once an epoch, in the plan's order, also when a worker is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from shardmill.dataset.open import open_dataset
from shardmill.errors import IntegrityError, TrainingError, UsageError
from shardmill.ids import format_sample_id
from shardmill.jobs.config import SparkConfig
from shardmill.loader.reader import read_batches
from shardmill.stores import open_store
from shardmill.words import counted
from tests.train.driver_process import start_driver
from tests.train.forked_ranks import forked_ranks
from tests.train.ranks import WORKERS, Watcher
from tests.train.training import MODELS, check_terms, task_of
from train.checkpoints.checkpoint import complete_checkpoints
from train.checkpoints.state import load_arrays, rank_file
from train.config import TrainConfig
from train.contracts.world import Role
from train.launching import LAUNCHERS
from train.launching.rank import DEFAULT_WORKER
from train.planning.auto import resolve
from train.restarts import launch_until_done
from train.strategies import roles_of
from train.strategies.options import ParameterServerOptions
from train.strategies.parameter_server import STEPS_AHEAD

SERVED = {
    "strategy": "parameter_server", "launcher": "local", "num_workers": 2,
    "parameter_server": {"num_servers": 2}, "num_streams": 6,
    "global_batch_size": 12, "epochs": 6, "model": f"{MODELS}:counting", "learning_rate": 0.003, "record_samples": True,
    "checkpoint_every_steps": 3,
}  # fmt: skip


@dataclass
class Killer(Watcher):
    """Kills the process of a rank, once, when a step is reported."""

    rank: int = -1
    at: tuple[int, int] = (0, 0)
    wait_seconds: float = 0.0
    pids: dict[int, int] = field(default_factory=dict)
    fields: dict[str, dict] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def step(self, step) -> None:
        super().step(step)
        for name, seconds in step.reports[0].seconds.items():
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if (step.epoch, step.step) == self.at and self.rank >= 0:
            time.sleep(self.wait_seconds)
            os.kill(self.pids[self.rank], signal.SIGKILL)
            self.rank = -1

    def event(self, name: str, fields: dict) -> None:
        super().event(name, fields)
        self.fields[name] = fields
        if name == "rank_started":
            self.pids[fields["rank"]] = fields["pid"]


def launch(uri, models, watcher, worker=DEFAULT_WORKER, **config):
    given = {**SERVED, **config}
    task, spark = task_of(uri, models, **given), SparkConfig(master="local[5]")
    with forked_ranks(task.config.backend):
        return LAUNCHERS[given["launcher"]].launch(task, spark, watcher, worker=worker)


def planned(uri: str, config: TrainConfig) -> dict[tuple[int, int], tuple[str, ...]]:
    """The sample ids of every step, as the plan has them."""
    dataset, config = open_dataset(uri), resolve(config, SparkConfig()).config
    found = {}
    for epoch in range(config.epochs):
        with read_batches(dataset, dataset.plan_epoch(config.plan_spec(dataset), epoch)) as batches:
            for batch in batches:
                ids = batch.sample_ids_N[batch.weights_N > 0].tolist()
                found[epoch, batch.step] = tuple(map(format_sample_id, ids))
    return found


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
def test_workers_train_what_the_chief_dispatches_and_a_lost_one_is_replaced(tiny_uri, tmp_path):
    watcher = Killer(rank=2, at=(1, 2))
    result = launch(tiny_uri, tmp_path, watcher, f"{WORKERS}:chief_tells_where_variables_are")
    config = TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}})
    assert_all_steps_in_order(watcher, tiny_uri, config)
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9
    assert watcher.events.count("rank_lost") == 1 and watcher.fields["rank_lost"]["rank"] == 2
    # The lost worker's steps without an answer at the chief: one that it computed, and those whose answers were lost
    # with it because the chief had not come to them. It may have died between two.
    repeated = watcher.fields.get("redispatched", {"num_steps": 0, "num_applied_twice": 0})
    assert 0 <= repeated["num_applied_twice"] <= repeated["num_steps"] <= STEPS_AHEAD * config.num_workers
    # By the model's own count; a worker may have died before it came to that.
    num_more = num_trained(tmp_path / result.last_checkpoint) - result.num_steps
    assert repeated["num_applied_twice"] <= num_more <= repeated["num_steps"]
    # Each variable is whole, on one server, and those that follow each other are on both in turn.
    devices = [device for name, device in watcher.fields["variables"].items() if name != "rank"]
    servers = [re.fullmatch(r"/job:ps/replica:0/task:(\d)/device:CPU:0", device)[1] for device in devices]
    assert servers == [str(place % 2) for place in range(5)]
    # What happens in workers is told.
    assert all(watcher.seconds[name] > 0 for name in ("input_wait", "compute", "fetch", "decode"))
    assert result.world_size == 2
    files = {file.name for file in (tmp_path / result.checkpoint).iterdir()}
    assert files == {"MARKER.json", "weights.npz", "optimizer.npz", "rank-00000.npz"}


@pytest.mark.drill
def test_a_step_that_is_lost_with_its_worker_is_given_to_another_and_reported(tiny_uri, tmp_path):
    """Steps take so long that the worker is in the middle of one soon after one has ended; if it was not, once more."""
    laborious = {"model": "tests.train.laborious_model:laborious", "epochs": 2, "checkpoint_every_steps": 0}
    for attempt in range(3):
        watcher = Killer(rank=2, at=(1, 2), wait_seconds=0.1)
        launch(tiny_uri, tmp_path / str(attempt), watcher, **laborious)
        assert_all_steps_in_order(watcher, tiny_uri, TrainConfig(**{**SERVED, "epochs": 2}))
        if "redispatched" in watcher.fields:
            break
    told = watcher.fields["redispatched"]
    assert told["num_steps"] >= 1 and told["warning"].startswith(
        f"{counted(told['num_steps'], 'step')} given to another"
    )


@pytest.mark.drill
def test_a_chief_continues_where_it_was_killed(tiny_uri, tmp_path):
    watcher, rest = Killer(rank=0, at=(2, 4)), Killer()
    with pytest.raises(TrainingError, match=r"^rank 0 .* was killed by SIGKILL after step \d of epoch 2"):
        launch(tiny_uri, tmp_path, watcher, model=f"{MODELS}:stateful")
    result = launch(tiny_uri, tmp_path, rest, model=f"{MODELS}:stateful")
    assert result.resumed_from is not None and result.resumed_from.epoch == 2
    both = watcher.sample_ids | rest.sample_ids
    assert both == planned(tiny_uri, TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}}))


@pytest.mark.drill
def test_sigterm_stops_behind_what_is_dispatched_and_every_step_is_applied_once(tiny_uri, tmp_path):
    """By three workers: each batch is dispatched, and trained with, exactly once, by the model's own count."""
    config = SERVED | {"num_workers": 3, "parameter_server": {"num_servers": 1}, "checkpoint_every_steps": 0}
    config["watch"] = {"stop_timeout_seconds": 60}
    pin = open_dataset(tiny_uri).pin
    first = start_driver(tmp_path, config, dataset=pin).stopped_somewhere()
    newest = next(complete_checkpoints(open_store(tmp_path / "models"), "trainings/test"))
    assert len(first["sample_ids"]) == newest.marker.global_step == num_trained(tmp_path / "models" / newest.path) > 0
    second = start_driver(tmp_path, config, dataset=pin).outcome()
    expected = [list(ids) for ids in planned(tiny_uri, TrainConfig(**config)).values()]
    assert first["sample_ids"] + second["sample_ids"] == expected
    newest = next(complete_checkpoints(open_store(tmp_path / "models"), "trainings/test"))
    assert newest.marker.global_step == num_trained(tmp_path / "models" / newest.path) == len(expected)


@pytest.mark.exhaustive
def test_a_server_that_is_lost_is_named_and_the_training_continues(tiny_uri, tmp_path):
    watcher = Killer(rank=4, at=(1, 2))
    config = TrainConfig(**{**SERVED, "max_restarts": 1, "augment": {"random_crop_padding": 1}})
    done = launch_until_done(
        lambda plan: launch(tiny_uri, tmp_path, watcher, num_workers=plan.config.num_workers),
        resolve(config, SparkConfig()),
        watcher,
        lambda config: check_terms(config, SparkConfig()),
    )
    assert re.match(r"rank 4 \(host .*was killed by SIGKILL after step \d of epoch 1", done.restarts[0].cause)
    assert done.result.world_size == SERVED["num_workers"] and watcher.sample_ids == planned(tiny_uri, config)


@pytest.mark.exhaustive
def test_the_last_worker_is_not_spared(tiny_uri, tmp_path):
    with pytest.raises(TrainingError, match=r"^rank 1 \(host .*was killed by SIGKILL"):
        launch(tiny_uri, tmp_path, Killer(rank=1, at=(1, 2)), num_workers=1, parameter_server={"num_servers": 1})


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
def test_it_trains_in_a_barrier_stage_and_a_lost_worker_is_replaced(tiny_uri, tmp_path):
    watcher = Killer(rank=1, at=(1, 2))
    result = launch(tiny_uri, tmp_path, watcher, launcher="spark_barrier")
    assert watcher.fields["rank_lost"]["rank"] == 1
    assert_all_steps_in_order(watcher, tiny_uri, TrainConfig(**{**SERVED, "augment": {"random_crop_padding": 1}}))
    assert result.evaluation is not None and result.evaluation.accuracy >= 0.9


def test_roles_follow_from_the_numbers():
    config = TrainConfig(strategy="parameter_server", num_workers=3)
    roles = roles_of(config.with_options(ParameterServerOptions(num_servers=2)))
    assert roles == (Role.CHIEF, *[Role.WORKER] * 3, *[Role.SERVER] * 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"launcher": "inline"}, r"it needs 3 processes: 1 chief, 1 worker and 1 server; set .* 'local'"),
        (
            {"launcher": "local", "accumulation_steps": 2},
            r"accumulation_steps = 2 .*; remove it, or lower train.global_batch_size",
        ),
        ({"launcher": "local", "mixed_precision": "float16"}, r"set train.mixed_precision = 'bfloat16'"),
        ({"launcher": "local", "non_finite": {"action": "skip"}}, "expected a strategy that can skip a batch"),
        ({"launcher": "local", "compression": "fp16"}, r"it has 'none'"),
        ({"launcher": "local", "reader": "petastorm"}, r"a chief dispatches the steps of the epoch plan"),
        ({"launcher": "horovod_spark"}, r"set train.launcher to 'local' or 'spark_barrier'"),
        ({"launcher": "attach"}, r"set train.launcher to 'local' or 'spark_barrier'"),
        ({"launcher": "local", "backend": "torch"}, r"'parameter_server' with the backend 'torch'"),
        ({"launcher": "spark_barrier"}, r"a training of 3 ranks, .*expected at least 3 slots"),
    ],
)
def test_unsupported_settings_are_refused(config, message):
    with pytest.raises(UsageError, match=message):
        check_terms(TrainConfig(strategy="parameter_server", **config), SparkConfig(master="local[2]"))
