"""The device of each rank: synthetic addresses through every launcher that gives some. No GPU is needed or used."""

from __future__ import annotations

import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.doctor.doctor import examine
from pipeline.tree import PipelineTree
from shardmill.dataset.open import open_dataset
from shardmill.environments.place import Place
from shardmill.errors import UsageError
from shardmill.jobs.config import SparkApplicationConfig, SparkConfig
from shardmill.jobs.observer import FieldValue
from tests.lab.datasets import make_dataset
from tests.processes import in_own_process
from tests.train.driver_process import PIN, WORKERS
from tests.train.training import check_terms
from train.backends import BACKENDS
from train.backends.gpu_builds import why_no_gpu
from train.config import TrainConfig
from train.contracts.task import WorkerTask
from train.contracts.values import TrainResult
from train.contracts.world import RankDevices, World
from train.launching import LAUNCHERS
from train.launching.devices import CUDA_VARIABLE, check_devices, share_of_rank, visible_gpus
from train.launching.spark_slots import num_slots_of
from train.planning.auto import resolve

HERE = socket.gethostname()
pytestmark = pytest.mark.skipif(bool(why_no_gpu("torch")), reason="PyTorch was built without CUDA here")


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
    worker = f"{WORKERS}:tells_its_devices"
    return LAUNCHERS[launcher].launch(task, spark or SparkConfig(), watcher, worker=worker), watcher


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


@given(num_ranks=st.integers(1, 16), num_gpus=st.integers(0, 16), is_one=st.booleans())
def test_ranks_of_a_host_share_its_gpus_without_overlap_or_are_refused(num_ranks, num_gpus, is_one):
    gpus = [f"gpu-{number}" for number in range(num_gpus)]
    shares = [share_of_rank(gpus, Place(rank, num_ranks, rank, num_ranks), is_one=is_one) for rank in range(num_ranks)]
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


@pytest.mark.parametrize(
    ("wanted", "devices", "said"),
    [
        (
            "auto",
            [("a", "0"), ("b", "0"), ("a", "1"), ("a", "0")],
            "ranks 0 and 3 would share GPU 0 of host a: 3 ranks",
        ),
        ("auto", [("a", "0"), ("b", ""), ("a", "1")], "2 of 3 ranks have a GPU.*rank 1 on b has none.*all on CPUs"),
        ("gpu", [("a", ""), ("b", "")], "0 of 2 ranks have a GPU.*'gpu'; rank 0, 1 on a, b has none"),
    ],
)
def test_a_map_that_cannot_be_meant_is_refused_with_the_numbers(wanted, devices, said):
    placement = [RankDevices(rank, host, tuple(filter(None, [device]))) for rank, (host, device) in enumerate(devices)]
    with pytest.raises(UsageError, match=said):
        check_devices(wanted, placement)


@pytest.mark.starts("ranks")
def test_each_local_rank_sees_its_own_device_alone(monkeypatch):
    monkeypatch.setenv(CUDA_VARIABLE, "3,GPU-8a,1,0")
    result, watcher = launch("local", devices="gpu")
    assert watcher.sees == {0: "3", 1: "GPU-8a", 2: "1", 3: "0"}
    assert watcher.map == "; ".join(f"rank {rank}: {HERE} gpu {watcher.sees[rank]}" for rank in range(4))
    assert result.placement == tuple(RankDevices(rank, HERE, (watcher.sees[rank],)) for rank in range(4))


@pytest.mark.starts("ranks")
def test_the_cpu_is_what_is_asked_for_though_there_are_gpus(monkeypatch):
    monkeypatch.setenv(CUDA_VARIABLE, "0,1")
    result, watcher = launch("local", devices="cpu", num_workers=2)
    assert watcher.sees == {0: "-1", 1: "-1"}
    assert [each.devices for each in result.placement] == [(), ()]
    # The installed TensorFlow cannot use a GPU: there is nothing to share out, and nothing to ask for.
    if why_no_gpu("keras"):
        check_terms(TrainConfig(num_workers=4, strategy="horovod", launcher="local"), SparkConfig())
        with pytest.raises(UsageError, match="train.devices = 'gpu'; but tensorflow-cpu .* without CUDA"):
            check_terms(TrainConfig(devices="gpu"), SparkConfig())


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("visible", "devices", "said"),
    [
        ("0,1", "auto", ["ranks 0 and 2 would share GPU 0 of host", "4 ranks there, 2 GPU(s)", "lower train.num_wo"]),
        ("", "gpu", ["0 of 4 ranks have a GPU, with train.devices = 'gpu'", "expected one for each rank"]),
    ],
)
def test_too_few_gpus_here_are_known_before_anything_starts(monkeypatch, tmp_path, visible, devices, said):
    monkeypatch.setenv(CUDA_VARIABLE, visible)
    train = {"num_workers": 4, "strategy": "torch_ddp", "launcher": "local", "devices": devices}
    with pytest.raises(UsageError) as caught:
        check_terms(TrainConfig(**train), SparkConfig())
    assert all(part in str(caught.value) for part in said), caught.value
    tree = PipelineTree.model_validate({"train": train, "models": {"uri": str(tmp_path / "models")}})
    [finding] = [each for each in examine(tree, str(tmp_path)) if each.subject == "train.num_workers"]
    assert finding.status == "fail" and said[0] in finding.found


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


@pytest.mark.drill
def test_two_executors_that_claim_the_same_gpus_are_refused(tmp_path, monkeypatch, own_jvm):
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    with pytest.raises(UsageError, match=r"ranks \d and \d would share GPU \d of host .*4 ranks there, 2 GPU"):
        launch("spark_barrier", spark_with_gpus(tmp_path, 2, 2, '"0", "1"'))


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


@pytest.mark.starts("program")
def test_tensorflow_takes_a_gpus_memory_as_it_needs_it():
    """Else each process takes all of it at once. TensorFlow without CUDA sees no GPU: it is told of two."""
    assert in_own_process("keras", memory_that_grows) == [("GPU:0", True), ("GPU:1", True)]
