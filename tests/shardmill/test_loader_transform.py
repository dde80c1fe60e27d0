"""A user's transform in a loader's threads: the same draws in every run, and faults that name their samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardmill
from shardmill.errors import UsageError
from tests.support import make_dataset

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shardmill.Dataset:
    return shardmill.open_dataset(make_dataset(tmp_path_factory.mktemp("transform")))


def test_a_transform_draws_the_same_at_any_number_of_threads_and_after_a_resume(dataset):
    def noise(batch, rng):
        return {"images": batch.images + rng.integers(0, 9, batch.images.shape, np.uint8), "draw": rng.random(24)}

    def epoch(num_threads: int, **at):
        loader = dataset.batches("train", **BATCH, num_threads=num_threads, transform=noise)
        loader.seek(**{"epoch": 0, **at})
        return [(batch.images.tobytes(), batch["draw"].tobytes()) for batch in loader]

    whole = epoch(1)
    assert whole == epoch(4) and whole[2:] == epoch(2, step=2) and whole != epoch(1, epoch=1)
    assert len(set(whole)) == len(whole)
    ranks = [dataset.batches("train", **BATCH, transform=draw_one, rank=rank, world_size=2) for rank in range(2)]
    assert next(iter(ranks[0]))["draw"] != next(iter(ranks[1]))["draw"]


def draw_one(batch, rng):
    return {"draw": [rng.random()] * len(batch.weights)}


def test_a_transform_that_fails_names_the_samples_and_keeps_its_cause(dataset):
    def fails(batch, rng):
        if batch.step == 2:
            raise ZeroDivisionError("no such lens")
        return batch

    loader = dataset.batches("train", **BATCH, transform=fails)
    batches = iter(loader)
    before = [next(batches) for _ in range(2)]
    with pytest.raises(
        UsageError, match=r"ZeroDivisionError at epoch 0, step 2, in samples [0-9a-f]{16} \('class_.*more: no such lens"
    ) as failed:
        next(batches)
    assert isinstance(failed.value.__cause__, ZeroDivisionError) and len(before) == 2
    assert "\n" not in str(failed.value)
    # After a fix of the transform, the batch that failed is the next one.
    assert (loader.epoch, loader.step) == (0, 2)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda batch, rng: {"images": batch.images[:5]}, "gave images 5 rows at epoch 0, step 0, .*expected 24"),
        (lambda batch, rng: {"boxes": 3}, "gave boxes a int at epoch 0"),
        (lambda batch, rng: None, "returned NoneType at epoch 0"),
    ],
)
def test_a_transform_that_gives_no_such_batch_is_refused(transform, said, dataset):
    with pytest.raises(UsageError, match=said):
        next(iter(dataset.batches("train", **BATCH, transform=transform)))


def test_a_transform_has_the_arrays_of_its_loader(dataset):
    torch = pytest.importorskip("torch")

    def scaled(batch, rng):
        return replace(batch, images=batch.images.float() / 255)

    batch = next(iter(dataset.torch_loader("train", **BATCH, transform=scaled)))
    assert batch.images.dtype == torch.float32 and batch.images.shape == (24, 3, 16, 16)


def test_a_tf_dataset_has_the_shapes_that_a_transform_gives(dataset):
    tf = pytest.importorskip("tensorflow")
    rows = dataset.tf_dataset(
        "train", **BATCH, transform=lambda batch, rng: {"images": batch.images[:, :8].astype(np.float32)}
    )
    assert rows.element_spec[0].shape == (24, 8, 16, 3) and rows.element_spec[0].dtype == tf.float32
    expected = list(dataset.batches("train", **BATCH))
    for batch, (images, _, _) in zip(expected, rows, strict=True):
        assert np.array_equal(images, batch.images[:, :8])


def test_a_batch_moves_to_a_device_as_a_tensor_does(dataset):
    [batch] = (
        dataset.torch_loader("train", **BATCH, transform=lambda batch, rng: {"mask": batch.weights > 0})
        .cached(1)
        .batches
    )
    moved = batch.to("meta", non_blocking=True)
    assert {name: each.device.type for name, each in moved.items()} == dict.fromkeys(batch, "meta")
    assert (moved.epoch, moved.step) == (batch.epoch, batch.step) and batch.images.device.type == "cpu"
