"""`torch_loader(device=...)`: batches on a device, and no memory decoded into before its copy has ended.

Without a GPU the copies run on PyTorch's streams of the CPU, which do nothing.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest

import shardmill
from shardmill.errors import UsageError
from shardmill.loader.torch_device import InFlight, place_on
from shardmill.recycled_memory import RecycledMemory
from tests.lab.datasets import SharedDatasets

torch = pytest.importorskip("torch")
BATCH = {"global_batch_size": 24, "seed": 7}
HERE = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    return shardmill.open_dataset(f"{shared_dataset()}@1")


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
    assert place_on("cpu").allocate((2, 3)).dtype == np.uint8


@pytest.mark.skipif("cuda" not in HERE, reason="needs a GPU")
def test_pixels_for_cuda_are_decoded_into_pinned_memory():
    assert torch.from_numpy(place_on("cuda").allocate((64, 8, 8, 3))).is_pinned()
