"""`train.log.profile_steps`: what is recorded of a step are the operations of the backend, and no more."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmill.errors import UsageError
from shardmill.jobs.config import SparkConfig, load_tree
from tests.train.training import MODELS, Killed, Recorder, check_terms, train_here
from train.backends import BACKENDS
from train.config import TrainConfig
from train.tree import TrainTree

LINEAR = {"keras": f"{MODELS}:linear", "torch": "tests.train.torch_models:linear"}
# Four steps.
CONFIG: dict[str, Any] = {"epochs": 1, "global_batch_size": 24}


def of_tensorflow(folder: Path) -> tuple[set[int], set[str]]:
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    [file] = folder.glob("plugins/profile/*/*.xplane.pb")
    steps, names = set(), set()
    for plane in xplane_pb2.XSpace.FromString(file.read_bytes()).planes:
        stats = {number: each.name for number, each in plane.stat_metadata.items()}
        for event in (event for line in plane.lines for event in line.events):
            name = plane.event_metadata[event.metadata_id].name
            names.add(name)
            if name == "train":
                steps |= {stat.int64_value for stat in event.stats if stats[stat.metadata_id] == "step_num"}
    return steps, names


def of_torch(folder: Path) -> tuple[set[int], set[str]]:
    [file] = folder.glob("*.pt.trace.json.gz")
    names = {each["name"] for each in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    return {int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#")}, names


READERS: dict[str, tuple[Callable[[Path], tuple[set[int], set[str]]], str]] = {
    "keras": (of_tensorflow, "MatMul"),
    "torch": (of_torch, "aten::addmm"),
}
"""Backend -> how to read (numbers of the steps, names of operations), and what a linear layer computes."""


@pytest.mark.parametrize("name", BACKENDS)
def test_the_named_steps_are_recorded_and_the_training_stays_the_same(name: str, tiny_uri: str, tmp_path: Path):
    config: dict[str, Any] = {**CONFIG, "backend": name, "model": LINEAR[name]}
    read, operation = READERS[name]
    plain = train_here(tiny_uri, tmp_path / "plain", **config)

    # One that fails meanwhile leaves no profiler behind that would be in the way of the next.
    with pytest.raises(Killed):
        train_here(tiny_uri, tmp_path / "killed", Recorder(killed_at=2), log={"profile_steps": "1:4"}, **config)

    recorder = Recorder()
    result = train_here(tiny_uri, tmp_path / "some", recorder, log={"profile_steps": "1:3"}, **config)
    [told] = recorder.named("profile")
    steps, names = read(Path(told["path"]) / "rank-0")
    assert told["steps"] == 2 and steps == {1, 2} and any(operation in each for each in names), sorted(names)
    assert result.weights_sha256 == plain.weights_sha256 and not recorder.named("profile_incomplete")
    assert not (tmp_path / "plain/t/profiles").exists()

    recorder = Recorder()
    train_here(tiny_uri, tmp_path / "short", recorder, log={"profile_steps": "3:9"}, **config)
    assert read(tmp_path / "short/t/profiles/steps-3-9/rank-0")[0] == {3}
    [incomplete] = recorder.named("profile_incomplete")
    assert "'3:9': 5 of 6 steps were not trained" in incomplete["warning"]


def test_a_profiler_that_does_not_start_ends_no_training(tiny_uri: str, tmp_path: Path):
    import tensorflow as tf

    recorder = Recorder()
    tf.profiler.experimental.start(str(tmp_path / "mine"))
    try:
        train_here(tiny_uri, tmp_path, recorder, log={"profile_steps": "1:3"}, model=LINEAR["keras"], **CONFIG)
    finally:
        tf.profiler.experimental.stop()
    [incomplete] = recorder.named("profile_incomplete")
    assert "AlreadyExists" in incomplete["warning"] and not recorder.named("profile")


@pytest.mark.parametrize("steps", ["5", "5:5", "7:5", "-1:5", "a:b"])
def test_other_forms_are_refused(steps: str):
    with pytest.raises(UsageError, match=rf"profile_steps = .*{steps}.*; expected FIRST:STOP"):
        load_tree(TrainTree, None, (f'train.log.profile_steps="{steps}"',))


def test_a_strategy_whose_ranks_the_profiler_may_abort_is_refused():
    settings = {"num_workers": 2, "strategy": "multi_worker_mirrored", "launcher": "local"}
    settings |= {"log": {"profile_steps": "3:5"}}
    with pytest.raises(UsageError, match=r"profile_steps = '3:5' with .*'multi_worker_mirrored'; .*set .* 'horovod'"):
        check_terms(TrainConfig(**settings), SparkConfig())  # pyright: ignore[reportArgumentType]
