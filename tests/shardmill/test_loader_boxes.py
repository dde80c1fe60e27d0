"""Boxes in a loader's batches: one array with offsets, moved as the augmentation moves the pixels."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageColor

import shardmill
from etl.config import SourceConfig
from shardmill.augment.options import AugmentOptions
from shardmill.errors import UsageError
from shardmill.loader.boxes import BatchBoxes
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.drawn import named_boxes, picture_of
from tests.etl.annotations import drawn, found_in
from tests.etl.building import build_source
from tests.lab.augmentations import AUGMENTATIONS
from tests.test_documented_commands import ROOT, blocks

NUM_IMAGES = 21


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> LoadableDataset:
    """One box in each image, with none in every seventh and two in every fifth; all in one split."""
    folder = tmp_path_factory.mktemp("boxes")
    rows = []
    for number in range(NUM_IMAGES):
        box = [10 + number, 8, 30 + number, 20 + number]
        (folder / f"{number}.png").write_bytes(drawn(64, 64, box))
        boxes = [] if number % 7 == 0 else [box, [0, 0, 64, 64]] if number % 5 == 0 else [box]
        names = ["red", "all"][: len(boxes)]
        rows.append({"uri": f"{number}.png", "boxes": boxes, "names": names, "split": "train", "number": number})
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = {"uri": str(folder / "t.jsonl"), "kind": "table", "extra_columns": ["number"]}
    boxes = {"field": "boxes", "labels_field": "names"}
    build_source(SourceConfig.model_validate({**source, "boxes": boxes}), folder / "pets-dataset", image_size=64)
    return shardmill.open_dataset(str(folder / "pets-dataset"))


@pytest.mark.parametrize("augmentation", AUGMENTATIONS)
@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_boxes_follow_the_pixels(dataset: LoadableDataset, augmentation: str, format: str) -> None:
    red, num_rows, num_found = dataset.class_names.index("red"), 0, 0
    for epoch in range(2):
        loader = dataset.batches(
            "train", global_batch_size=8, augment=AUGMENTATIONS[augmentation], format=format, epoch=epoch, num_streams=1
        )
        for batch in loader:
            boxes = batch["boxes"]
            assert isinstance(boxes, BatchBoxes) and len(boxes) == len(batch.weights) == 8
            assert boxes.sides.dtype == np.float32 and boxes.labels.dtype == boxes.offsets.dtype == np.int64
            assert boxes.offsets[-1] == len(boxes.sides) == len(boxes.labels)
            for row, number in enumerate(batch["number"]):
                of_row = boxes[row]
                if number is None or number % 7 == 0:
                    assert len(of_row) == 0
                    continue
                num_rows += 1
                found = found_in(batch.images[row])
                places = np.flatnonzero(of_row.labels == red)
                if found is not None and min(found[2] - found[0], found[3] - found[1]) > 1:
                    num_found += 1
                    assert np.abs(of_row.sides[places[0]] - found).max() <= 1.5
                elif len(places):
                    x0, y0, x1, y1 = of_row.sides[places[0]]
                    assert min(x1 - x0, y1 - y0) <= 2
    assert num_rows == 2 * 18 and num_found > num_rows // 2


def test_order_and_world_size_change_no_box(dataset: LoadableDataset) -> None:
    options = AUGMENTATIONS["imagenet"]

    def sides(rank: int, world_size: int) -> list[np.ndarray]:
        loader = dataset.batches(
            "train", global_batch_size=8, num_streams=2, augment=options, rank=rank, world_size=world_size, seed=3
        )
        return [batch["boxes"].sides for batch in loader]

    whole = sides(0, 1)
    for step, parts in enumerate(zip(sides(0, 2), sides(1, 2), strict=True)):
        np.testing.assert_array_equal(whole[step], np.concatenate(parts))


def test_tensors_move_with_their_batch(dataset: LoadableDataset) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(dataset.torch_loader("train", global_batch_size=8, device="cpu")))
    boxes = batch.to("cpu", torch.float64)["boxes"]
    assert [each.dtype for each in (boxes.sides, boxes.labels, boxes.offsets)] == [torch.float64] * 3
    target = batch["boxes"][-1]
    assert torch.is_tensor(target.sides) and target.sides.shape == (len(target), 4)
    assert [len(each) for each in batch["boxes"][:3]] == np.diff(batch["boxes"].offsets)[:3].tolist()


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_tf_dataset_has_ragged_boxes(dataset: LoadableDataset, with_labels: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    reading: dict = {"global_batch_size": 8, "num_streams": 1, "augment": AUGMENTATIONS["size"]}
    if not with_labels:
        # Of an epoch's first batch, a transform shows the types.
        reading["transform"] = lambda batch, rng: {
            "boxes": replace(batch["boxes"], labels=None), "images": batch.images / 255
        }  # fmt: skip
    rows = dataset.tf_dataset("train", annotations=True, **reading)
    images, labels, weights = rows.element_spec
    assert images.shape == (8, 40, 40, 3) and weights.shape == (8,)
    assert labels["boxes"].shape.as_list() == [8, None, 4] and labels["labels"].shape == (8, 2)
    assert ("box_labels" in labels) == with_labels
    num_boxes = 0
    for batch, (_, found, _) in zip(dataset.batches("train", **reading), rows, strict=True):
        num_boxes += len(batch["boxes"].sides)
        assert isinstance(found["boxes"], tf.RaggedTensor)
        for row, boxes in enumerate(batch["boxes"]):
            np.testing.assert_array_equal(found["boxes"][row], boxes.sides)
            if with_labels:
                np.testing.assert_array_equal(found["box_labels"][row], boxes.labels)
    assert num_boxes > 10
    # For `fit`, labels alone; and nothing that is not delivered keeps from mixing.
    mixed = dataset.tf_dataset("train", global_batch_size=8, augment=AugmentOptions(rand_augment_operations=2))
    assert mixed.element_spec[1].shape == (8, 2) and next(iter(mixed))[1].shape == (8, 2)
    with pytest.raises(UsageError, match="have neither boxes nor masks"):
        dataset.tf_dataset("train", global_batch_size=8, annotations=True, columns=["number"])


def test_a_transform_of_samples_gets_its_boxes(dataset: LoadableDataset) -> None:
    loader = dataset.batches(
        "train", global_batch_size=7, num_streams=1, per_sample=True,
        transform=lambda sample, rng: {"image": sample.image, "count": len(sample["boxes"])},
    )  # fmt: skip
    for batch in loader:
        assert batch["count"] == np.diff(batch["boxes"].offsets).tolist()


def test_what_boxes_cannot_follow_is_refused(dataset: LoadableDataset) -> None:
    options = AugmentOptions(rand_augment_operations=2, mixup_alpha=0.2)
    with pytest.raises(UsageError, match="rand_augment_operations and mixup_alpha, but the dataset has boxes"):
        dataset.batches("train", global_batch_size=8, augment=options)
    batch = next(iter(dataset.batches("train", global_batch_size=8, augment=options, columns=[], num_streams=1)))
    assert "boxes" not in batch
    with pytest.raises(IndexError):
        next(iter(dataset.batches("train", global_batch_size=8)))["boxes"][8]


def test_a_contact_sheet_outlines_boxes(dataset: LoadableDataset) -> None:
    sample = next(each for each in dataset.samples("train") if len(each["boxes"]) == 1)
    picture = np.asarray(picture_of(sample.image_HWC, sample.extra, 128))
    assert picture.shape == (128, 128, 3)
    x0, y0, x1, y1 = (2 * sample["boxes"].sides[0]).astype(int)
    [named] = named_boxes(sample["boxes"], dataset.class_names)
    colour = ImageColor.getrgb(named.colour)
    assert named.name == "red" and np.argwhere((picture == colour).all(2)).min(0).tolist() == [y0, x0]
    assert np.argwhere((picture == colour).all(2)).max(0).tolist() == [y1 - 1, x1 - 1]
    assert ImageColor.getrgb(named.colour) in {colour for _, colour in dataset.show(9).getcolors(1 << 20) or ()}


def test_the_programs_of_the_page_run(dataset: LoadableDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.chdir(Path(dataset.pin.uri).parent)
    program = "\n".join(blocks(ROOT / "docs" / "boxes.md", "python"))
    exec(compile(program, "boxes.md", "exec"), {})
