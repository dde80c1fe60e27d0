"""`jax_loader`: the plan's batches as global arrays, each process reads the rows of its own devices."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import numpy as np
import pytest

from shardmill.errors import UsageError
from shardmill.loader.dataset import open_dataset
from shardmill.loader.jax import DevicePlacement
from shardmill.loader.ranks import Ranks
from tests.lab.commands import ENVIRONMENT, ROOT
from tests.lab.datasets import SharedDatasets
from tests.services.marked import free_ports


@pytest.fixture(scope="module")
def uri(shared_dataset: SharedDatasets) -> str:
    return shared_dataset()


def test_batches_are_those_of_every_loader_as_arrays_of_jax(uri: str):
    import jax

    dataset = open_dataset(uri)
    with dataset.jax_loader("train", global_batch_size=32, seed=1) as loader:
        assert len(loader) == 3
        # Kept to the end: arrays of JAX may lie in memory that readers use again once nothing refers to it.
        kept = list(loader)
        for batch, plain in zip(kept, dataset.batches("train", global_batch_size=32, seed=1), strict=True):
            assert all(isinstance(each, jax.Array) for each in (batch.images, batch.labels, batch.weights))
            assert np.array_equal(batch.images, plain.images) and batch.images.dtype == np.uint8
            assert np.array_equal(batch.labels, plain.labels) and batch.labels.dtype == np.int32
            assert np.array_equal(batch.weights, plain.weights) and np.array_equal(batch.sample_ids, plain.sample_ids)
        # The same plan, so the same states.
        assert loader.state_dict() == {**loader.state_dict(), "epoch": 1, "step": 0}
        dataset.batches("train", global_batch_size=32, seed=1).load_state_dict(loader.state_dict())


def test_pixels_are_not_copied_on_the_cpu(uri: str):
    dataset = open_dataset(uri)
    with dataset.jax_loader("train", global_batch_size=32, seed=1) as loader:
        shared = []
        put = loader._hand_over.place.put
        for batch in dataset.batches("train", global_batch_size=32, seed=1):
            shared.append(put(batch).images.unsafe_buffer_pointer() == batch.images.ctypes.data)
    assert shared == [True] * len(loader)


def test_a_transform_gets_arrays_of_numpy(uri: str):
    kinds = []

    def halve(batch, rng):
        kinds.append(type(batch.images))
        return {"images": batch.images[:, ::2, ::2].astype(np.float32) / 255}

    [first] = open_dataset(uri).jax_loader("train", global_batch_size=32, transform=halve).cached(1).batches
    assert set(kinds) == {np.ndarray} and first.images.shape == (32, 8, 8, 3) and first.images.dtype == np.float32


@pytest.mark.parametrize("choice", ["mix", "augment"])
def test_mixed_and_augmented_batches_are_those_of_every_loader(uri: str, choice: str):
    dataset = open_dataset(uri)
    reading: dict = {"mix": {"mix": [(dataset, 0.5)]}, "augment": {"augment": "cifar"}}[choice]
    pairs = [list(read("train", global_batch_size=32, **reading)) for read in (dataset.jax_loader, dataset.batches)]
    for batch, plain in zip(*pairs, strict=True):
        assert np.array_equal(batch.images, plain.images) and np.array_equal(batch.labels, plain.labels)
        assert np.array_equal(batch.weights, plain.weights) and batch.extra == plain.extra


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rank": 0, "world_size": 2}, "the sharding says it"),
        ({"global_batch_size": 0}, "global_batch_size = 0"),
        ({"sharding": 3}, "expected a jax.sharding.Sharding"),
        ({"shuffle": "no"}, "shuffle = 'no'; expected True or False"),
        ({"per_sample": True}, "per_sample = True without a transform"),
        ({"global_batch_size": 32, "num_stream": 8}, "a loader with num_stream"),
    ],
)
def test_bad_arguments_are_one_line(uri: str, wrong: dict, said: str):
    with pytest.raises(UsageError, match=said):
        open_dataset(uri).jax_loader("train", **{"global_batch_size": 32, **wrong})


def test_every_process_gets_as_many_streams():
    def streams(batch: int, world_size: int, given: int | None = None) -> int:
        return DevicePlacement(None, batch, Ranks(0, world_size)).num_streams(given)

    assert [streams(32, 1), streams(32, 2), streams(24, 6), streams(24, 6, 12), streams(7, 7)] == [8, 8, 12, 12, 7]
    with pytest.raises(UsageError, match="num_streams = 8 on 6 processes.*set num_streams to 12"):
        streams(24, 6, 8)


def test_without_jax_the_line_says_what_to_do(uri: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(UsageError, match="a jax_loader needs JAX.*pip install jax"):
        open_dataset(uri).jax_loader("train", global_batch_size=32)


def run_processes(uri: str, num_processes: int, mesh: str, num_devices: int) -> list[dict]:
    """Each with some devices of its own, which are all the CPU."""
    environment = {
        **ENVIRONMENT, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices}"
    }  # fmt: skip
    arguments = (f"{uri}@1", f"localhost:{free_ports(1)[0]}", num_processes)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.programs.jax_loader_of_processes", *map(str, (*arguments, process, mesh))],
            cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for process in range(num_processes)
    ]  # fmt: skip
    ended = [process.communicate(timeout=200) for process in started]
    assert not any(process.returncode for process in started), "".join(stderr[-2000:] for _, stderr in ended)
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in ended]


@pytest.mark.starts("program")
@pytest.mark.parametrize(("num_processes", "mesh"), [(1, "batch"), (2, "batch"), (2, "model")])
def test_processes_share_the_plans_batches_in_its_order(num_processes: int, mesh: str, uri: str):
    found = run_processes(uri, num_processes, mesh, num_devices=2)
    plain = list(open_dataset(uri).batches("train", global_batch_size=24, seed=3))
    for process in found:
        assert process["state"] == found[0]["state"] and len(process["batches"]) == len(plain)
        for got, wanted in zip(process["batches"], plain, strict=True):
            # Gathered from all processes: the whole batch, in the order of the plan.
            assert got["images"] == hashlib.sha256(wanted.images.tobytes()).hexdigest()
            assert (got["labels"], got["weights"]) == (wanted.labels.tolist(), wanted.weights.tolist())
            assert got["types"] == ["uint8", "int32", "float32"]
    for step, wanted in enumerate(plain):
        ids = [process["batches"][step]["ids"] for process in found]
        # Of a model-parallel group every process reads the same rows.
        assert (ids[0] if mesh == "model" else [each for mine in ids for each in mine]) == wanted.sample_ids.tolist()
    for process in found:
        # One with another seed; all with the same one need no version.
        assert len(process["refused"]) == (2 if num_processes > 1 else 0)
        assert all("different plans: rank 0 " in each and "seed 1" in each for each in process["refused"])
