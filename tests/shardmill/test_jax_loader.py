"""What a loader hands over: arrays of JAX, tensors of PyTorch, memory that is used again, rows for Petastorm."""

from __future__ import annotations

import gc
import hashlib
import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from shardmill import memory as recycled_memory
from shardmill.dataset.dataset import open_dataset as open_version
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_stored
from shardmill.loader.dataset import open_dataset
from shardmill.loader.jax import DevicePlacement
from shardmill.loader.ranks import Ranks
from shardmill.loader.samples import read_samples
from shardmill.loader.torch import InFlight, batch_device
from shardmill.memory import RecycledMemory, pageable
from tests.lab.commands import ENVIRONMENT, ROOT
from tests.lab.datasets import SharedDatasets, make_dataset
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
        put = loader._hand_over.device.put
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
    ended = [process.communicate(timeout=400) for process in started]
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


torch = pytest.importorskip("torch")
BATCH = {"global_batch_size": 24, "seed": 7}
HERE = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def brighter(batch, rng):
    return {"images": batch.images + int(rng.integers(9)), "extra": torch.arange(len(batch.weights))}


def darker(sample, rng):
    return sample.image // int(rng.integers(2, 9))


@pytest.mark.parametrize("device", HERE)
@pytest.mark.parametrize(
    "choices",
    [
        {}, {"layout": "NHWC"}, {"transform": brighter}, {"transform": darker, "per_sample": True},
        {"augment": "cifar"}, {"mix": ...},
    ],
    ids=("plain", "channels last", "a transform", "a transform of samples", "augmented", "mixed"),
)  # fmt: skip
def test_batches_of_a_device_are_those_of_the_memory(dataset, device, choices):
    choices = {**choices, "mix": [(dataset, 0.5)]} if "mix" in choices else choices
    with dataset.torch_loader("train", device=device, **BATCH, **choices) as loader:
        moved = list(loader)
        again = loader.cached(2).batches
    expected = list(dataset.torch_loader("train", **BATCH, **choices))
    for mine, plain in [*zip(moved, expected, strict=True), *zip(again, again, strict=True)]:
        for name in ("images", "labels", "weights", "sample_ids"):
            assert mine[name].device.type == device and torch.equal(mine[name].cpu(), plain[name].cpu())
        assert mine.images.stride() == plain.images.stride()
        assert mine.keys() == plain.keys() and (mine.epoch, mine.step) == (plain.epoch, plain.step)


def test_the_cpu_as_a_device_copies_no_pixels(dataset):
    with dataset.torch_loader("train", device="cpu", layout="NHWC", **BATCH) as loader:
        addresses = {batch.images.data_ptr() for batch in loader}
    kept = list(dataset.torch_loader("train", device="cpu", layout="NHWC", **BATCH))
    assert len(addresses) <= len(kept) == len({batch.images.data_ptr() for batch in kept})


def test_a_device_without_streams_gets_its_batches_too(dataset):
    # PyTorch's device without memory: of its tensors only shapes and types can be seen.
    with dataset.torch_loader("train", device="meta", **BATCH) as loader:
        for batch in loader:
            assert batch.images.is_meta and batch.images.shape == (24, 3, *batch.images.shape[2:])


@pytest.mark.parametrize("device", ["cuda:99", "abacus", object(), *(["cuda"] if HERE == ["cpu"] else [])])
def test_a_device_that_is_not_there_is_refused_before_the_first_batch(dataset, device):
    with pytest.raises(UsageError, match="expected one that is here: cpu") as refused:
        dataset.torch_loader("train", device=device, **BATCH)
    assert "\n" not in str(refused.value) and "leave device out" in str(refused.value)


def test_other_loaders_have_no_device(dataset):
    with pytest.raises(UsageError, match="a loader with device"):
        dataset.batches("train", device="cpu", **BATCH)


def test_memory_of_a_batch_is_not_decoded_into_before_its_copy_has_ended():
    memory, in_flight, ended = RecycledMemory(max_arrays=4), InFlight(), threading.Event()
    batch = memory.take(48)
    address = batch.ctypes.data
    in_flight.hold(torch.from_numpy(batch), ended.is_set)
    del batch
    in_flight.release()
    others = [memory.take(48) for _ in range(3)]
    assert address not in {other.ctypes.data for other in others}
    ended.set()
    in_flight.release()
    assert memory.take(48).ctypes.data == address


def test_memory_that_torch_gave_is_kept_by_what_refers_to_it():
    # As pinned memory is.
    memory = RecycledMemory(2, lambda shape: torch.empty(shape, dtype=torch.uint8).numpy())
    for refer in (lambda array: array[1:], lambda array: array.reshape(4, -1)[3:], torch.from_numpy):
        array = memory.take(48)
        address, kept = array.ctypes.data, refer(array)
        del array
        assert memory.take(48).ctypes.data != address
        del kept
    assert batch_device("cpu").allocate((2, 3)).dtype == np.uint8


@pytest.mark.skipif("cuda" not in HERE, reason="needs a GPU")
def test_pixels_for_cuda_are_decoded_into_pinned_memory():
    assert torch.from_numpy(batch_device("cuda").allocate((64, 8, 8, 3))).is_pinned()


def address_of(array: np.ndarray) -> int:
    return array.ctypes.data


@pytest.mark.parametrize(
    "view", [lambda array: array[1:2], lambda array: array.reshape(2, -1), lambda array: array.data]
)
def test_memory_is_used_again_only_when_nothing_refers_to_it(view):
    memory = RecycledMemory(max_arrays=3)
    first = memory.take(48)
    of_first = view(first)
    address = address_of(first)
    del first
    assert address_of(memory.take(48)) != address, "a view keeps its memory"
    del of_first
    gc.collect()
    assert address_of(memory.take(48)) == address
    kept = [memory.take(48) for _ in range(8)]
    assert len({address_of(array) for array in kept}) == 8, "all arrays of a list have memory of their own"


def test_a_read_only_view_keeps_memory_too():
    memory = RecycledMemory(max_arrays=3)
    address, view = address_of(memory.take(48)), memory.take(48).data.toreadonly()[3:9]
    again = memory.take(48)
    assert view.readonly and address_of(np.frombuffer(view, np.uint8)) - 3 != address_of(again), address


@pytest.mark.parametrize("fewer", [0, 1], ids=["this Python", "Python 3.14"])
def test_memory_in_use_is_kept_however_many_references_a_question_has(fewer, monkeypatch: pytest.MonkeyPatch):
    count = sys.getrefcount
    # The lambda has one of its own.
    monkeypatch.setattr(sys, "getrefcount", lambda value: count(value) - 1 - fewer)
    spec = importlib.util.spec_from_file_location("memory_of_this_python", recycled_memory.__file__)
    assert spec is not None and spec.loader is not None
    fresh = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(fresh)
    memory = fresh.RecycledMemory(max_arrays=3)
    first = memory.take(48)
    address = address_of(first)
    second = memory.take(48)
    assert address_of(second) != address
    del first
    gc.collect()
    assert address_of(memory.take(48)) == address


def test_one_free_array_among_many_is_found_in_time_and_a_few_are_asked_at_once():
    memory = RecycledMemory(max_arrays=1000)
    kept = [memory.take(12) for _ in range(1000)]
    address = address_of(kept.pop(777))
    more = [memory.take(12) for _ in range(100)]
    assert address in {address_of(array) for array in more}, "whatever part of the pool is kept for good"


def test_memory_of_other_sizes_is_used_if_it_is_large_enough_and_replaced_if_it_is_too_small():
    memory = RecycledMemory(max_arrays=2)
    address = address_of(memory.take(1000))
    smaller = memory.take(900)
    assert (address_of(smaller), len(smaller)) == (address, 900)
    del smaller
    assert address_of(memory.take(10)) != address, "a hundredth of it is a waste"
    sizes = [100, 3_000, 1_001, 70_000, 5, 69_000, 68_000]
    assert [len(memory.take(size)) for size in sizes] == sizes
    assert len(memory._arrays) <= 2
    address = address_of(memory.take(69_500))
    assert address_of(memory.take(69_400)) == address


def test_what_is_kept_is_at_most_an_eighth_too_large():
    for size in [0, 1, 15, 17, 1023, 1025, 2_962_915, 4_013_778, (1 << 31) - 1]:
        assert size <= recycled_memory._roomy(size) <= size + max(size // 8, 1)
    assert recycled_memory._roomy(4_013_778) == recycled_memory._roomy(4_034_259)


def test_tensorflow_shares_the_memory_of_the_pixels():
    tf = pytest.importorskip("tensorflow")
    array = pageable((24, 16, 16, 3))
    signature = (tf.TensorSpec(array.shape, tf.uint8),)
    for (images,) in tf.data.Dataset.from_generator(lambda: iter([(array,)]), output_signature=signature):
        assert images._numpy().ctypes.data == array.ctypes.data


@pytest.mark.parametrize("encoding", ["jpeg", "png", "raw", "webp"])
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
def test_make_batch_reader_gives_the_same_images_and_labels(encoding: str, tmp_path: Path):
    make_batch_reader = pytest.importorskip("petastorm", reason="it runs on Python 3.11 alone").make_batch_reader

    dataset = open_version(make_dataset(tmp_path, num_images=60, encoding=encoding))
    options = dataset.manifest.normalize
    expected = {sample.sample_id: sample for sample in read_samples(dataset, "train", 10**6)}
    urls = [Path(uri).as_uri() for uri in dataset.files("train", "parquet")]
    seen = []
    # Its thread and process pools may end an epoch before it began: see docs/LOG.md.
    with make_batch_reader(urls, num_epochs=1, reader_pool_type="dummy") as reader:
        for batch in reader:
            for image, label, sample_id in zip(batch.image, batch.label, batch.sample_id, strict=True):
                # NumPy strips trailing zero bytes from fixed-size strings; the size is known, so nothing is lost.
                height, width, channels = options.image_shape_HWC
                stored = bytes(image).ljust(height * width * channels, b"\0") if encoding == "raw" else bytes(image)
                image_HWC = decode_stored(stored, encoding, options.image_shape_HWC)
                assert np.array_equal(image_HWC, expected[int(sample_id)].image_HWC)
                assert int(label) == expected[int(sample_id)].label
                seen.append(int(sample_id))
    assert sorted(seen) == sorted(expected)
