"""A user's transform in a loader's threads: the same draws in every run, and faults that name their samples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import shardmill
from shardmill.errors import UsageError
from tests.lab.datasets import SharedDatasets

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}


@pytest.fixture(scope="module")
def dataset(shared_dataset: SharedDatasets) -> shardmill.Dataset:
    return shardmill.open_dataset(shared_dataset())


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
        (lambda batch, rng: {"boxes": 3}, "gave boxes as int at epoch 0"),
        (lambda batch, rng: None, "returned NoneType at epoch 0"),
        (lambda batch, rng: {"image": batch.images}, "gave image at epoch 0, step 0.*did you mean images"),
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


def noisy(sample, rng):
    return {"image": sample.image ^ rng.integers(0, 9, sample.image.shape, np.uint8), "draw": rng.random()}


def changed_of(loader) -> list[list[tuple]]:
    return [
        [
            (int(sample_id), bytes(memoryview(np.ascontiguousarray(image))), draw)
            for sample_id, image, draw, weight in zip(
                batch.sample_ids, batch.images, batch["draw"], batch.weights, strict=True
            )
            if weight
        ]
        for batch in loader
    ]


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_a_transform_of_samples_draws_the_same_at_any_world_size_and_after_a_resume(dataset, world_size):
    chosen = {"transform": noisy, "per_sample": True, "sample": {"class_1": 2}}
    whole = changed_of(dataset.batches("train", **BATCH, **chosen))
    assert whole != changed_of(dataset.batches("train", **{**BATCH, "seed": 8}, **chosen))
    draws = [draw for rows in whole for *_, draw in rows]
    assert len(set(draws)) == len(draws), "each use of a sample has draws of its own"
    of_ranks = []
    for rank in range(world_size):
        loader = dataset.batches("train", rank=rank, world_size=world_size, num_threads=1 + rank, **BATCH, **chosen)
        loader.seek(0, 1)
        of_ranks.append(changed_of(loader))
    assert [[each for rows in of_ranks for each in rows[step]] for step in range(len(whole) - 1)] == whole[1:]


def test_torchvision_draws_for_each_sample_and_leaves_the_generator_of_the_loop(dataset):
    torch = pytest.importorskip("torch")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    pipeline = v2.Compose(
        [
            v2.RandomResizedCrop(12, antialias=True), v2.RandomHorizontalFlip(), v2.ColorJitter(0.5, 0.5, 0.5),
            v2.ToDtype(torch.float32, scale=True), v2.GaussianNoise(), v2.RandomErasing(1.0, value="random"),
        ]
    )  # fmt: skip

    def epoch(**at):
        loader = dataset.torch_loader(
            "train", **BATCH, **at, transform=lambda sample, rng: pipeline(sample.image), per_sample=True
        )
        return [batch.images for batch in loader]

    before = torch.random.get_rng_state()
    whole = epoch(num_threads=1)
    ranks = [epoch(rank=rank, world_size=2, num_threads=3) for rank in range(2)]
    assert torch.equal(torch.random.get_rng_state(), before)
    assert whole[0].shape == (24, 3, 12, 12)
    for step, images in enumerate(whole):
        assert torch.equal(torch.cat([rank[step] for rank in ranks]), images)


@pytest.mark.parametrize(
    ("transform", "said"),
    [
        (lambda sample, rng: 1 // 0, r"ZeroDivisionError at epoch 0, step 0, sample [0-9a-f]{16} \('class_.*png'\): "),
        (lambda sample, rng: sample.image[: 5 + sample.sample_id % 7], "image the shape .*, sample .*resize or crop"),
        (lambda sample, rng: {str(sample.sample_id % 2): 1}, "the transform gave [01] at .*expected [01], as for"),
        (lambda sample, rng: None, "the transform gave no image at .*sample .*return what is new, also if"),
        (
            lambda sample, rng: {"images": sample.image},
            "the transform gave images at .*sample .*did you mean image[?]$",
        ),
        (lambda sample, rng: {"weights": 1}, "the transform gave weights at .*sample .*image, label and extra columns"),
    ],
)
def test_a_sample_that_fails_is_named_with_its_source(transform, said, dataset):
    with pytest.raises(UsageError, match=said):
        next(iter(dataset.batches("train", **BATCH, transform=transform, per_sample=True)))


def test_samples_of_numbers_become_tensors_in_a_torch_loader(dataset):
    torch = pytest.importorskip("torch")

    def change(sample, rng):
        label = int(sample.label) + 1
        return {"image": sample.image.numpy() * 2, "label": torch.tensor(label) if sample.sample_id % 2 else label}

    before = next(iter(dataset.torch_loader("train", **BATCH)))
    after = next(iter(dataset.torch_loader("train", **BATCH, transform=change, per_sample=True)))
    assert torch.equal(after.images, before.images * 2) and torch.equal(after.labels, before.labels + 1)


@pytest.mark.parametrize(
    "draw",
    [
        lambda torch, ones: torch.rand_like(ones) + torch.randn_like(ones) + torch.randint_like(ones, 3, high=9),
        lambda torch, ones: torch.randint_like(ones, 100, dtype=torch.int64),
        lambda torch, ones: torch.poisson(5 * ones) + torch.binomial(5 * ones, ones / 2),
        lambda torch, ones: torch.distributions.Beta(0.2, 0.2).sample((9,)),
        lambda torch, ones: torch.distributions.Gamma(2.0, 1.0).sample((9,)),
    ],
    ids=["like", "integers", "counts", "beta", "gamma"],
)
def test_functions_of_pytorch_that_take_a_generator_draw_from_that_of_the_key(draw):
    torch = pytest.importorskip("torch")
    from shardmill.loader.torch import draws_of

    before, drawn = torch.random.get_rng_state(), []
    for key in (5, 5, 6):
        with draws_of(key):
            drawn.append(draw(torch, torch.ones(9)))
    assert torch.equal(drawn[0], drawn[1]) and not torch.equal(drawn[0], drawn[2])
    assert torch.equal(torch.random.get_rng_state(), before)
