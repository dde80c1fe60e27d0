"""Strategies keep what they declare; those of one process with several devices, and the device of each rank."""

# pyright: reportOptionalMemberAccess=false
from __future__ import annotations

import os
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.doctor.doctor import examine
from pipeline.tree import PipelineTree
from shardmill.dataset.dataset import open_dataset
from shardmill.environments.rank_environment import RankEnvironment
from shardmill.errors import TrainingError, UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from shardmill.jobs.observer import FieldValue
from shardmill.registry import Entry
from tests.lab.datasets import make_dataset
from tests.lab.scale import exhaustive
from tests.processes import in_own_process
from tests.train.driver_process import PIN, WORKERS
from tests.train.learners import LINEAR, SHAPE, batch_of, learner, state
from tests.train.ranks import LONG, SMOOTH_MODEL, STATEFUL, kill_on_ranks, train_on_ranks
from tests.train.training import MODELS, Recorder, check_terms, train_here
from train.backends import BACKENDS
from train.backends.frameworks import gpu_problem
from train.checkpoints.arrays import OPTIMIZER, WEIGHTS, load_arrays
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.contracts.world import RankDevices, World
from train.launching import LAUNCHERS
from train.launching.devices import CUDA_VARIABLE, check_devices, share_of_rank, visible_gpus
from train.launching.spark_slots import num_slots_of
from train.planning.setup import resolve
from train.strategies import STRATEGIES, find_strategy
from train.strategies.horovod import HorovodCollective, join_horovod
from train.strategies.local_sgd import local_round
from train.strategies.mirrored import check_rows
from train.strategies.options import MirroredOptions
from train.strategies.replicated import JoinCollective, open_single


def every_collective_is_the_identity(join: JoinCollective) -> None:
    import tensorflow as tf

    collective = join(World(), TrainConfig())
    tensors = [tf.constant([0.1, 0.2]), tf.constant([[3.0]])]
    for own, summed in zip(tensors, collective.sum_tensors(tensors), strict=True):
        np.testing.assert_array_equal(own, summed)
    np.testing.assert_array_equal(collective.sum_array(np.array([1.5, 2.0**53 - 1])), [1.5, 2.0**53 - 1])
    for data in (b"", b"\x00any bytes"):
        assert collective.broadcast_bytes(data) == data
        assert collective.gather_bytes(data) == [data]
    collective.barrier()
    collective.close()


@pytest.mark.starts("program")
@pytest.mark.parametrize("join", [open_single, join_horovod])
def test_in_a_world_of_one_every_collective_is_the_identity(join):
    in_own_process("keras", every_collective_is_the_identity, join)


def fusion_threshold(bucket_bytes: int) -> str:
    HorovodCollective(World(), bucket_bytes=bucket_bytes).close()
    return os.environ.get("HOROVOD_FUSION_THRESHOLD", "its own")


@pytest.mark.starts("program")
def test_horovod_gets_the_limit_of_one_send():
    """By the variable that it reads when it starts: what it has taken up it does not say."""
    assert (
        in_own_process("keras", fusion_threshold, 20_000) == "20000"
        and in_own_process("keras", fusion_threshold, 0) == "its own"
    )


@pytest.mark.parametrize("name", STRATEGIES.installed())
def test_every_strategy_declares_its_world_sizes(name):
    strategy = STRATEGIES[name]
    assert strategy.allows_world_size(1) and not strategy.allows_world_size(0)
    if strategy.max_world_size is not None:
        assert strategy.allows_world_size(strategy.max_world_size) and not strategy.allows_world_size(
            strategy.max_world_size + 1
        )


@pytest.mark.needs("horovod")
def test_single_refuses_two_workers_and_names_horovod():
    with pytest.raises(UsageError, match=r"'single' with train.num_workers = 2; expected at most 1 .*\"horovod\""):
        find_strategy("single", 2)
    assert find_strategy("horovod", 64) is STRATEGIES["horovod"]


def test_single_refuses_two_workers_and_names_only_what_is_installed(monkeypatch):
    missing = Entry("train.strategies.horovod:HOROVOD", "", packages=("package_that_is_not_installed",))
    for name in set(STRATEGIES) - {"single"}:
        monkeypatch.setitem(STRATEGIES.entries, name, missing)
    with pytest.raises(UsageError, match=r"'single' with train.num_workers = 2") as refused:
        find_strategy("single", 2)
    assert refused.value.fix == "set train.num_workers = 1"


@pytest.mark.needs("horovod")
def test_what_is_offered_fits_the_models_framework_and_the_number_of_workers():
    """The fix of one refusal is not the next one's cause."""
    torch = {"model": "tests.train.torch_models:smooth", "num_workers": 2, "launcher": "local"}
    with pytest.raises(UsageError) as refused:
        check_terms(TrainConfig(strategy="single", **torch), SparkConfig())
    assert refused.value.fix == 'set train.strategy = "torch_ddp", or train.num_workers = 1'
    with pytest.raises(UsageError) as refused:
        check_terms(TrainConfig(strategy="horovod", **torch), SparkConfig())
    assert refused.value.fix == "set train.strategy to 'torch_ddp' or 'local_sgd'"


def test_an_unknown_strategy_is_answered_with_the_nearest():
    with pytest.raises(UsageError, match=r"did you mean 'horovod'\?"):
        find_strategy("horvod", 1)


def horovod_refuses_a_world_that_its_launcher_did_not_make() -> None:
    with pytest.raises(TrainingError, match="rank 0 of 1; the launcher said rank 1 of 1"):
        HorovodCollective(World(1, 1))


@pytest.mark.starts("program")
def test_horovod_refuses_a_world_that_its_launcher_did_not_make():
    in_own_process("keras", horovod_refuses_a_world_that_its_launcher_did_not_make)


MIRRORED = {"strategy": "mirrored", "model": SMOOTH_MODEL["keras"]}


@pytest.mark.drill
def test_devices_with_state_of_their_own_resume_exactly(tiny_uri, tmp_path):
    """Each device has its moving statistics and draws its own dropout: all of that is in the checkpoint."""
    config = {**STATEFUL, "model": f"{MODELS}:stateful", "strategy": "mirrored", "mirrored": {"num_devices": 2}}
    fresh, undisturbed = train_on_ranks(tiny_uri, tmp_path / "fresh", 1, config)
    killed = kill_on_ranks(tiny_uri, tmp_path / "killed", 1, config, killed_at=7)
    result, resumed = train_on_ranks(tiny_uri, tmp_path / "killed", 1, config)
    assert (result.resumed_from.epoch, result.resumed_from.step) == (1, 2)
    assert killed.losses | resumed.losses == undisturbed.losses
    assert (result.weights_sha256, result.evaluation) == (fresh.weights_sha256, fresh.evaluation)
    files = {file.name for file in (tmp_path / "killed" / result.checkpoint).iterdir()}
    assert {"rank-00000.npz", "rank-00001.npz"} < files


def test_devices_that_are_not_there_are_refused(tiny_uri, tmp_path):
    small: dict[str, Any] = {"strategy": "mirrored", "global_batch_size": 8}
    with pytest.raises(UsageError, match=r"mirrored.num_devices = 9 with train.global_batch_size = 8; .* = 8 or less"):
        check_terms(TrainConfig(**small).with_options(MirroredOptions(num_devices=9)), SparkConfig())
    with pytest.raises(
        UsageError, match=r"the 8 devices of train.mirrored.num_devices = 0 with .* in 2 microbatches; .* set .* = 4 or"
    ):
        check_rows(TrainConfig(**small, accumulation_steps=2), 8)
    # TensorFlow runs in this process, and has the devices that it was started with.
    import tensorflow as tf

    assert len(tf.config.list_logical_devices("CPU")) == 1
    with pytest.raises(UsageError, match=r"num_devices = 3; .* 1 CPU device.* set train.launcher = 'local'"):
        train_here(tiny_uri, tmp_path, **{**LONG, **MIRRORED}, mirrored={"num_devices": 3})


HERE = socket.gethostname()


class Watcher:
    def __init__(self) -> None:
        self.sees: dict[int, str] = {}
        self.map = ""

    def step(self, step) -> None:
        return

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name == "sees":
            self.sees[int(str(fields["rank"]))] = str(fields["devices"])
        if name == "devices":
            self.map = str(fields["map"])


def launch(launcher: str, spark: SparkConfig | None = None, **train) -> tuple[TrainResult, Watcher]:
    config = TrainConfig(**{"num_workers": 4, "strategy": "torch_ddp", "launcher": launcher, **train})
    watcher = Watcher()
    task = WorkerTask(config, PIN, "/nowhere", "trainings/test", "")
    worker = f"{WORKERS}:reports_its_devices"
    return LAUNCHERS[launcher].launch(task, spark or SparkConfig(), watcher, worker=worker), watcher


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.parametrize(
    ("given_variable", "num_gpus", "expected"),
    [
        (None, 0, ()),
        (None, 3, ("0", "1", "2")),
        ("", 3, ()),
        ("-1", 3, ()),
        ("NoDevFiles", 3, ()),
        ("2, 0", 4, ("2", "0")),
        ("1,-1,0", 4, ("1",)),
        ("GPU-8a,MIG-4f/1/0", 0, ("GPU-8a", "MIG-4f/1/0")),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(given_variable, num_gpus, expected):
    environment = {} if given_variable is None else {CUDA_VARIABLE: given_variable}
    assert visible_gpus(environment, num_gpus) == expected


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@given(num_ranks=st.integers(1, 16), num_gpus=st.integers(0, 16), is_one=st.booleans())
def test_ranks_of_a_host_share_its_gpus_without_overlap_or_are_refused(num_ranks, num_gpus, is_one):
    gpus = [f"gpu-{number}" for number in range(num_gpus)]
    shares = [
        share_of_rank(gpus, RankEnvironment(rank, num_ranks, rank, num_ranks), is_one=is_one)
        for rank in range(num_ranks)
    ]
    placement = [RankDevices(rank, "a", devices) for rank, devices in enumerate(shares)]
    used = [device for share in shares for device in share]
    assert len({len(share) for share in shares}) == 1 and set(used) <= set(gpus)
    if 0 < num_gpus < num_ranks:
        with pytest.raises(UsageError, match=rf"{num_ranks} ranks there, {num_gpus} GPU"):
            check_devices("auto", placement)
    else:
        check_devices("auto", placement)
        assert len(used) == len(set(used))
        assert len(used) == (num_gpus // num_ranks * num_ranks if not is_one else num_ranks if num_gpus else 0)


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.parametrize(
    ("wanted", "devices", "said"),
    [
        ("auto", [("a", "0"), ("b", "0"), ("a", "1"), ("a", "0")],
         "ranks 0 and 3 would share GPU 0 of host a: 3 ranks"),
        ("auto", [("a", "0"), ("b", ""), ("a", "1")], "2 of 3 ranks have a GPU.*rank 1 on b has none.*all on CPUs"),
        ("gpu", [("a", ""), ("b", "")], "0 of 2 ranks have a GPU.*'gpu'; rank 0, 1 on a, b has none"),
    ],
)  # fmt: skip
def test_a_map_that_cannot_be_meant_is_refused_with_the_numbers(wanted, devices, said):
    placement = [RankDevices(rank, host, tuple(filter(None, [device]))) for rank, (host, device) in enumerate(devices)]
    with pytest.raises(UsageError, match=said):
        check_devices(wanted, placement)


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.starts("ranks")
def test_each_local_rank_sees_its_own_device_alone(monkeypatch):
    monkeypatch.setenv(CUDA_VARIABLE, "3,GPU-8a,1,0")
    result, watcher = launch("local", devices="gpu")
    assert watcher.sees == {0: "3", 1: "GPU-8a", 2: "1", 3: "0"}
    assert watcher.map == "; ".join(f"rank {rank}: {HERE} gpu {watcher.sees[rank]}" for rank in range(4))
    assert result.placement == tuple(RankDevices(rank, HERE, (watcher.sees[rank],)) for rank in range(4))


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.starts("ranks")
def test_the_cpu_is_what_is_asked_for_though_there_are_gpus(monkeypatch):
    monkeypatch.setenv(CUDA_VARIABLE, "0,1")
    result, watcher = launch("local", devices="cpu", num_workers=2)
    assert watcher.sees == {0: "-1", 1: "-1"}
    assert [each.devices for each in result.placement] == [(), ()]
    # The installed TensorFlow cannot use a GPU: there is nothing to share out, and nothing to ask for.
    if gpu_problem("keras"):
        check_terms(TrainConfig(num_workers=4, strategy="horovod", launcher="local"), SparkConfig())
        with pytest.raises(UsageError, match="train.devices = 'gpu'; but tensorflow-cpu .* without CUDA"):
            check_terms(TrainConfig(devices="gpu"), SparkConfig())


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("visible", "devices", "said"),
    [("0,1", "auto", ["ranks 0 and 2 would share GPU 0 of host", "4 ranks there, 2 GPU(s)", "lower train.num_wo"]),
     ("", "gpu", ["0 of 4 ranks have a GPU, with train.devices = 'gpu'", "expected one for each rank"])],
)  # fmt: skip
def test_too_few_gpus_here_are_known_before_anything_starts(monkeypatch, tmp_path, visible, devices, said):
    monkeypatch.setenv(CUDA_VARIABLE, visible)
    train = {"num_workers": 4, "strategy": "torch_ddp", "launcher": "local", "devices": devices}
    with pytest.raises(UsageError) as caught:
        check_terms(TrainConfig(**train), SparkConfig())
    assert all(part in str(caught.value) for part in said), caught.value
    tree = PipelineTree.model_validate({"train": train, "models": {"uri": str(tmp_path / "models")}})
    [finding] = [each for each in examine(tree, str(tmp_path)) if each.subject == "train.num_workers"]
    assert finding.status == "fail" and said[0] in finding.found


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.starts("ranks")
def test_a_framework_that_does_not_see_its_device_does_not_fall_back_to_the_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv(CUDA_VARIABLE, "7")
    pin = open_dataset(make_dataset(tmp_path)).pin
    model = {"model": "tests.train.torch_models:smooth", "strategy": "torch_ddp", "epochs": 1}
    config = resolve(TrainConfig(num_workers=1, launcher="local", devices="cpu", **model), SparkConfig()).config
    config = config.model_copy(update={"devices": "auto"})
    task = WorkerTask(config, pin, str(tmp_path / "models"), "trainings/test", "")
    with pytest.raises(UsageError, match=rf"rank 0: {HERE} gpu 7: PyTorch sees 0 GPU.*expected 1.*nvidia-smi"):
        LAUNCHERS["local"].launch(task, SparkConfig(), Watcher())


def spark_with_gpus(tmp_path: Path, num_workers: int, cores: int, addresses: str) -> SparkConfig:
    """Workers that find these GPUs by a discovery script, as Spark's own `getGpusResources.sh` tells them."""
    script = tmp_path / "find_gpus.sh"
    script.write_text(f'#!/bin/sh\necho \'{{"name": "gpu", "addresses": [{addresses}]}}\'\n')
    script.chmod(0o755)
    num_gpus = addresses.count(",") + 1
    conf = {
        "spark.worker.resource.gpu.amount": str(num_gpus),
        "spark.worker.resource.gpu.discoveryScript": str(script),
        "spark.executor.resource.gpu.amount": str(num_gpus),
        "spark.task.resource.gpu.amount": "1",
        "spark.executor.memory": "512m",
    }
    master = f"local-cluster[{num_workers},{cores},512]"
    return SparkConfig(master=master, train=SparkApplicationConfig(conf=conf))


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.drill
def test_ranks_get_the_gpus_that_spark_found_and_assigned(tmp_path, monkeypatch, own_jvm):
    # Not what the machine shows: Spark says which of them is whose.
    monkeypatch.setenv(CUDA_VARIABLE, "9")
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    spark = spark_with_gpus(tmp_path, 1, 4, '"4", "5", "6", "7"')
    check_terms(TrainConfig(num_workers=4, strategy="torch_ddp", launcher="spark_barrier"), spark)
    result, watcher = launch("spark_barrier", spark)
    assert sorted(watcher.sees.values()) == ["4", "5", "6", "7"]
    assert {each.rank: ",".join(each.devices) for each in result.placement} == watcher.sees


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.drill
def test_two_executors_that_claim_the_same_gpus_are_refused(tmp_path, monkeypatch, own_jvm):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with pytest.raises(UsageError, match=r"ranks \d and \d would share GPU \d of host .*4 ranks there, 2 GPU"):
        launch("spark_barrier", spark_with_gpus(tmp_path, 2, 2, '"0", "1"'))


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
def test_gpus_bound_the_slots_of_an_executor():
    conf = {"spark.executor.resource.gpu.amount": "2", "spark.task.resource.gpu.amount": "1"}
    assert num_slots_of("local-cluster[2,3,1024]", conf) == 4
    yarn = {**conf, "spark.executor.instances": "3", "spark.executor.cores": "1"}
    assert num_slots_of("yarn", yarn) == 3


def memory_that_grows() -> list[tuple[str, bool]]:
    """What TensorFlow is told if it sees two GPUs, in a process where it has not begun to run."""
    from unittest.mock import patch

    import tensorflow as tf

    told: list[tuple[str, bool]] = []
    seen = patch.object(tf.config, "list_physical_devices", lambda kind: [f"{kind}:0", f"{kind}:1"])
    grow = patch.object(tf.config.experimental, "set_memory_growth", lambda gpu, enable: told.append((gpu, enable)))
    with seen, grow:
        BACKENDS["keras"].start(World(placement=(RankDevices(0, HERE, ("0", "1")),)), 0)
    return told


@pytest.mark.skipif(bool(gpu_problem("torch")), reason="PyTorch was built without CUDA here")
@pytest.mark.starts("program")
def test_tensorflow_takes_a_gpus_memory_as_it_needs_it():
    """Else each process takes all of it at once. TensorFlow without CUDA sees no GPU: it is told of two."""
    assert in_own_process("keras", memory_that_grows) == [("GPU:0", True), ("GPU:1", True)]


# 96 samples in three streams of 32: at two ranks one has twice as many samples as the other, and a step has padding.
CONFIG = {"num_streams": 3, "global_batch_size": 30, "epochs": 4, "optimizer": "sgd", "learning_rate": 0.05,
          "label_smoothing": 0.1}  # fmt: skip


@pytest.mark.starts("ranks")
@pytest.mark.parametrize(("backend", "world_size"), [exhaustive("keras", 2), ("torch", 3)])
def test_one_local_update_is_a_synchronous_step(tiny_uri, tmp_path, backend, world_size):
    """With the momentum of SGD, of which the mean over ranks is that of the mean gradient, and in parts."""
    # Averages that move little would hold the losses back if they took the weights' place.
    config, one = {**CONFIG, "model": SMOOTH_MODEL[backend], "ema_decay": 0.9}, Recorder()
    alone = train_here(tiny_uri, tmp_path / "alone", one, **config)
    several = {**config, "strategy": "local_sgd", "accumulation_steps": 2}
    result, watched = train_on_ranks(tiny_uri, tmp_path / "several", world_size, several)
    assert watched.losses.keys() == one.losses.keys()
    for step, loss_hex in one.losses.items():
        assert float.fromhex(watched.losses[step]) == pytest.approx(float.fromhex(loss_hex), rel=1e-5)
    expected, found = (
        load_arrays((tmp_path / name / each.checkpoint / WEIGHTS).read_bytes())
        for name, each in (("alone", alone), ("several", result))
    )
    for of_one, of_several in zip(expected, found, strict=True):
        assert abs(of_one - of_several).max() <= 1e-5 * abs(of_one).max()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_local_part_that_is_all_padding_changes_nothing(name, optimizer):
    """Six rows in three parts, the second and third of which are padding: one update, by the first part."""
    whole = batch_of(SHAPE, num_rows=6)
    padded = replace(whole, weights_N=np.array([1, 1, 0, 0, 0, 0], np.float32))
    columns = ("images_NHWC", "labels_N", "weights_N", "sample_ids_N")
    first_part = replace(whole, **{column: getattr(whole, column)[:2] for column in columns})
    found = []
    for batch, num_steps in ((padded, 3), (first_part, 1), (replace(whole, weights_N=np.zeros(6, np.float32)), 3)):
        one = learner(name, LINEAR[name], optimizer=optimizer)
        # Momentum and moments that a step without a gradient would go on with.
        one.apply(one.gradients(whole, 6, 1.0), 0.1)
        before = state(one)
        found.append((local_round(one, batch, num_steps, 0.1), state(one)))
    assert found[0] == found[1]
    assert found[0][0].num_samples == 2 and found[0][1] != before
    nothing, after = found[2]
    assert (nothing.num_samples, nothing.is_applied, after) == (0, True, before)


@pytest.mark.starts("ranks")
@pytest.mark.parametrize("backend", BACKENDS)
def test_ranks_agree_on_the_count_of_updates_if_padding_takes_some_from_one(tiny_uri, tmp_path, backend):
    """Of the 6 samples of an epoch's last round, in parts of 4 and 2 rows, rank 0 makes 2 updates and rank 1 one: all
    rounds before have 5. The mean over samples is 5/3."""
    config = {**CONFIG, "model": SMOOTH_MODEL[backend], "optimizer": "adam", "local_sgd": {"local_steps": 5},
              "epochs": 1}  # fmt: skip
    result, _ = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "local_sgd"})
    arrays = load_arrays((tmp_path / result.last_checkpoint / OPTIMIZER).read_bytes())
    [count] = {float(array) for array in arrays if array.ndim == 0 and array > 1}
    assert count == (17 if backend == "keras" else pytest.approx(15 + 5 / 3))


@pytest.mark.starts("ranks")
def test_several_local_updates_learn_too(tiny_uri, tmp_path):
    config = {**CONFIG, "model": SMOOTH_MODEL["torch"], "local_sgd": {"local_steps": 5}, "epochs": 8}
    result, _ = train_on_ranks(tiny_uri, tmp_path, 2, {**config, "strategy": "local_sgd"})
    assert result.evaluation.accuracy >= 0.9
    assert result.strategy == "local_sgd"
