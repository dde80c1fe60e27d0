"""Augmentation in loaders: the same pixels and labels at any world size, number of threads and in every framework."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import shardmill
from etl.config import EtlConfig
from shardmill.augment.one_image import augment
from shardmill.augment.options import AugmentOptions
from shardmill.errors import UsageError
from tests.etl import test_label_kinds as label_kinds
from tests.lab.datasets import build_here, make_dataset
from tests.lab.scale import usually

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}
OF_ONE_IMAGE = {
    "preset": "imagenet", "size": 12, "random_vertical_flip": True, "brightness": 0.4, "contrast": 0.4,
    "saturation": 0.4, "hue": 0.1, "rand_augment_operations": 2, "random_erasing": 0.5,
}  # fmt: skip
EVERYTHING = AugmentOptions(**OF_ONE_IMAGE, mixup_alpha=0.5, cutmix_alpha=1.0)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> shardmill.Dataset:
    """120 JPEGs, of which windows alone are decoded, in 3 classes; the last batch of its train split is padded."""
    return shardmill.open_dataset(f"{make_dataset(tmp_path_factory.mktemp('loader'), encoding='jpeg')}@1")


def epoch(dataset, **reading) -> list[tuple[bytes, bytes]]:
    """Pixels and labels of the real rows of each batch."""
    batches = dataset.batches("train", **{**BATCH, "augment": EVERYTHING, **reading})
    with batches:
        return [
            (batch.images[batch.weights > 0].tobytes(), batch.labels[batch.weights > 0].tobytes()) for batch in batches
        ]


def test_an_epoch_is_the_same_at_every_world_size_and_with_any_number_of_threads(dataset):
    whole = epoch(dataset)
    assert len(set(whole)) == len(whole)
    assert whole != epoch(dataset, epoch=1)
    assert whole != epoch(dataset, seed=8)
    for world_size in range(1, 9):
        reading = {"world_size": world_size, "num_threads": 1 + world_size % 4}
        ranks = [epoch(dataset, rank=rank, **reading) for rank in range(world_size)]
        of_steps = [tuple(b"".join(parts) for parts in zip(*step, strict=True)) for step in zip(*ranks, strict=True)]
        assert of_steps == whole
    assert epoch(dataset, format="tfrecord") == whole


@settings(max_examples=usually(8, 100))
@given(names=st.sets(st.sampled_from(sorted(OF_ONE_IMAGE))), occurrences=st.integers(1, 3))
def test_each_image_is_what_augmenting_it_alone_gives(dataset, names, occurrences):
    options = AugmentOptions(**{name: OF_ONE_IMAGE[name] for name in names})
    stored = {sample.sample_id: sample.image_HWC for sample in dataset.samples("train")}
    sample = dict.fromkeys(dataset.class_names, occurrences)
    seen: dict[int, set[bytes]] = {}
    for batch in dataset.batches("train", **BATCH, augment=options, sample=sample):
        for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
            if sample_id:
                seen.setdefault(sample_id, set()).add(image_HWC.tobytes())
    key = {"seed": 7, "epoch": 0}
    assert seen == {
        sample_id: {
            augment(image_HWC, options, **key, sample_id=sample_id, occurrence=number).tobytes()
            for number in range(occurrences)
        }
        for sample_id, image_HWC in stored.items()
    }


def test_pixels_do_not_depend_on_what_the_thread_did_before_with_opencv():
    """Decoding an image switches the kernels of IPP off, for its thread alone; IPP's colour circle is another one."""
    image_HWC = np.random.default_rng(5).integers(0, 256, (64, 48, 3), dtype=np.uint8)
    uses_ipp = cv2.ipp.useIPP()
    try:
        for name, value in OF_ONE_IMAGE.items():
            options = AugmentOptions(**{name: value})
            changed = set()
            for switch in (True, False):
                cv2.ipp.setUseIPP(switch)
                images = [augment(image_HWC, options, seed=7, epoch=0, sample_id=each) for each in range(1, 17)]
                changed.add(b"".join(each.tobytes() for each in images))
                assert cv2.ipp.useIPP() == switch, "the switch is the thread's own: give it back"
            assert len(changed) == 1, name
    finally:
        cv2.ipp.setUseIPP(uses_ipp)


def test_every_framework_gets_the_same_batches(dataset):
    torch = pytest.importorskip("torch")
    tf = pytest.importorskip("tensorflow")
    arrays = list(dataset.batches("train", **BATCH, augment=EVERYTHING))
    tensors = dataset.torch_loader("train", layout="NHWC", **BATCH, augment=EVERYTHING)
    rows = dataset.tf_dataset("train", **BATCH, augment=EVERYTHING)
    assert rows.element_spec[0].shape == (24, 12, 12, 3)
    assert (rows.element_spec[1].shape, rows.element_spec[1].dtype) == ((24, 3), tf.float32)
    for batch, in_torch, (images, labels, weights) in zip(arrays, tensors, rows, strict=True):
        assert batch.labels.shape == (24, 3) and batch.labels.dtype == np.float32
        assert torch.equal(in_torch.images, torch.from_numpy(batch.images))
        assert torch.equal(in_torch.labels, torch.from_numpy(batch.labels))
        assert np.array_equal(images, batch.images) and np.array_equal(labels, batch.labels)
        assert np.array_equal(weights, batch.weights)


def test_labels_are_shares_and_padding_has_none(dataset):
    classes = {sample.sample_id: sample.label for sample in dataset.samples("train")}
    *_, last = dataset.batches("train", **BATCH, augment=EVERYTHING)
    is_real_N = last.weights > 0
    assert 0 < is_real_N.sum() < 24
    assert not last.labels[~is_real_N].any() and not last.sample_ids[~is_real_N].any()
    assert last.labels[is_real_N].sum(axis=1) == pytest.approx(np.ones(is_real_N.sum()))
    mixed = 0
    for batch in dataset.batches("train", **BATCH, augment=AugmentOptions(cutmix_alpha=1.0)):
        for stream in range(0, 24, 3):
            ids = [each for each in batch.sample_ids[stream : stream + 3].tolist() if each]
            shares_K = batch.labels[stream : stream + 3].sum(axis=0)
            assert {int(label) for label in np.flatnonzero(shares_K)} <= {classes[each] for each in ids}
        mixed += int((batch.labels.max(axis=1) < 1).sum())
    assert mixed > 20


def test_a_name_is_a_preset_and_only_photographs_are_mirrored(dataset):
    for name in ("default", "imagenet", "cifar"):
        given = epoch(dataset, augment=name)
        assert given == epoch(dataset, augment=AugmentOptions(preset=name))
    stored = {sample.sample_id: sample.image_HWC for sample in dataset.samples("train")}
    for nothing in (None, "none", AugmentOptions(preset="none")):
        for batch in dataset.batches("train", **BATCH, augment=nothing):
            for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
                assert not sample_id or np.array_equal(image_HWC, stored[sample_id])
    assert epoch(dataset, augment="default") == epoch(dataset, augment=AugmentOptions(random_flip=False))


def test_evaluation_takes_the_centre(dataset):
    stored = {sample.sample_id: sample.image_HWC for sample in dataset.samples("test")}
    for batch in dataset.batches("test", **BATCH, shuffle=False, augment=EVERYTHING.unchanged):
        for sample_id, image_HWC in zip(batch.sample_ids.tolist(), batch.images, strict=True):
            assert not sample_id or np.array_equal(image_HWC, stored[sample_id][2:14, 2:14])


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"augment": "imagnet"}, "augment = 'imagnet'; expected AugmentOptions or one of default, imagenet, cifar"),
        ({"augment": AugmentOptions(size=17)}, "size = 17, but the stored images have 16 x 16 pixels; .* at most 16"),
        (
            {"augment": AugmentOptions(mixup_alpha=0.2), "num_streams": 24},
            "mixup_alpha = 0.2, but a step has 1 row of each stream; expected at least 2, .* lower num_streams",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_batch(dataset, given, said):
    with pytest.raises(UsageError, match=said):
        dataset.batches("train", **{**BATCH, **given})


def test_numbers_are_not_mixed_and_shares_of_several_classes_are(tmp_path):
    datasets = {}
    for kind in ("float", "multi_label"):
        (tmp_path / kind).mkdir()
        source = label_kinds.as_csv(tmp_path / kind, kind, label_kinds.LABELS[kind])
        built = build_here(source, str(tmp_path / f"{kind}-dataset"), EtlConfig(image_size=16))
        datasets[kind] = shardmill.open_dataset(built)
    options = AugmentOptions(cutmix_alpha=1.0)
    with pytest.raises(UsageError, match="cutmix_alpha = 1, but the dataset has labels of kind 'float'"):
        datasets["float"].batches("train", global_batch_size=16, num_streams=1, augment=options)
    [batch] = datasets["multi_label"].batches("train", global_batch_size=16, num_streams=1, augment=options)
    assert batch.labels.shape == (16, 3)
    assert ((batch.labels > 0) & (batch.labels < 1)).any()
