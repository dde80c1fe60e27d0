"""Which rows a loader gives, with their boxes and masks."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ImageColor

import shardmill
from etl.config import SourceConfig
from shardmill.augment.options import AugmentOptions
from shardmill.augment.pixels import augment
from shardmill.epoch_plan import PlanSpec
from shardmill.errors import UsageError
from shardmill.loader.annotations import BatchBoxes
from shardmill.loader.dataset import LoadableDataset
from shardmill.loader.pictures import named_boxes, picture_of
from shardmill.loader.selection import _shared
from tests.etl import test_extra_columns as extra_columns
from tests.etl.annotations import drawn, found_in
from tests.etl.building import build_source
from tests.etl.incremental import build_from
from tests.lab.augmentations import AUGMENTATIONS
from tests.lab.scale import usually
from tests.test_documented_commands import ROOT, blocks

BATCH = {"global_batch_size": 24, "seed": 7, "num_streams": 8}
CLASSES = ("class_0", "class_1", "class_2")


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> shardmill.Dataset:
    """24 rows without classes, with extra columns, some of them null."""
    folder = tmp_path_factory.mktemp("captioned")
    build_from(extra_columns.as_parquet(folder, extra_columns.ROWS), folder / "dataset")
    return shardmill.open_dataset(str(folder / "dataset"))


def ids_of(loader) -> list[list[int]]:
    return [batch.sample_ids[batch.weights > 0].tolist() for batch in loader]


def test_plans_of_all_rows_keep_their_names_and_any_selection_changes_them(dataset):
    spec = PlanSpec("layout", "train", 5, 16, 8, 2)
    assert spec.fingerprint == "5af70635267c77bc2d5f37ef0ddddb703d62eb89daafb7e46f674c36d103a496"
    assert replace(spec, selection="a").fingerprint != spec.fingerprint
    every_row = dataset.batches("train", **BATCH)
    for same in (
        {"where": "label >= 0"},
        {"sample": {"class_1": 1}},
        {"where": "label in (0, 1, 2)", "sample": "once"},
    ):
        assert dataset.batches("train", **BATCH, **same).state_dict() == every_row.state_dict()
    state = dataset.batches("train", **BATCH, where="label != 1").state_dict()
    with pytest.raises(UsageError, match="belongs to another plan"):
        every_row.load_state_dict(state)


@settings(max_examples=usually(12, 500))
@given(data=st.data())
def test_every_selected_row_is_used_exactly_so_often_at_any_world_size_and_after_any_resume(dataset, data):
    weights = {name: data.draw(st.sampled_from([0, 0.3, 1, 2.5, 4]), name) for name in CLASSES}
    weights[data.draw(st.sampled_from(CLASSES))] = 1.5
    chosen = {"sample": weights, "where": data.draw(st.sampled_from([None, "label != 2 or sample_id > 0"]), "where")}
    loader = dataset.batches("train", **BATCH, **chosen)
    whole = ids_of(loader)

    table = dataset.metadata("train")
    rows = table if chosen["where"] is None else table.filter((pc.field("label") != 2) | (pc.field("sample_id") > 0))
    counts = Counter(sample_id for ids in whole for sample_id in ids)
    classes = dict(zip(table.column("sample_id").to_pylist(), table.column("class_name").to_pylist(), strict=True))
    uses = Counter()
    for sample_id, count in counts.items():
        uses[classes[sample_id]] += count
        assert abs(count - weights[classes[sample_id]]) < 1
    sizes = Counter(rows.column("class_name").to_pylist())
    assert uses == +Counter({name: round(sizes[name] * weights[name]) for name in CLASSES})
    assert counts.keys() <= set(rows.column("sample_id").to_pylist())
    assert sum(map(len, whole)) == loader.samples_per_epoch == loader.steps_per_epoch * 24 - loader.num_padding

    world_size = data.draw(st.integers(1, 8), "world size")
    step = data.draw(st.integers(0, len(whole) - 1), "step")
    state = json.loads(json.dumps({**loader.state_dict(), "epoch": 0, "step": step}))
    of_ranks = []
    for rank in range(world_size):
        resumed = dataset.batches("train", rank=rank, world_size=world_size, **BATCH, **chosen)
        resumed.load_state_dict(state)
        of_ranks.append(ids_of(resumed))
    assert [[each for ids in of_ranks for each in ids[number]] for number in range(len(whole) - step)] == whole[step:]


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.lists(st.integers(0, 200), min_size=4, max_size=4))
def test_shares_of_a_class_add_up_and_differ_by_at_most_one(labels, totals):
    labels_N = np.array(labels)
    repeats_N = _shared(labels_N, np.array(totals))
    for label in set(labels):
        mine = repeats_N[labels_N == label]
        assert mine.sum() == totals[label] and mine.max() - mine.min() <= 1


def test_balanced_classes_are_as_frequent_as_the_largest(dataset):
    less = "label != 1 or sample_id > 0"
    sizes = Counter(label for batch in dataset.batches("train", **BATCH, where=less) for label in labels_of(batch))
    assert len(set(sizes.values())) > 1
    loader = dataset.batches("train", **BATCH, where=less, sample="balanced")
    balanced = Counter(label for batch in loader for label in labels_of(batch))
    assert set(balanced.values()) == {max(sizes.values())} and len(balanced) == 3


def labels_of(batch) -> list[int]:
    return batch.labels[batch.weights > 0].tolist()


def test_weights_of_a_column_are_counted_exactly(captioned):
    rows = captioned.metadata("train", ["sample_id", "ratio"]).to_pylist()
    found = Counter(each for ids in ids_of(captioned.batches("train", **BATCH, sample="ratio")) for each in ids)
    assert sum(found.values()) == int(sum(row["ratio"] for row in rows))
    assert all(abs(found[row["sample_id"]] - row["ratio"]) < 1 for row in rows)


def test_repeats_of_a_row_are_augmented_differently(dataset):
    options = AugmentOptions(random_crop_padding=3)
    stored = {sample.sample_id: sample.image_HWC for sample in dataset.samples("train")}
    seen: dict[int, list[np.ndarray]] = {}
    for batch in dataset.batches("train", **BATCH, augment=options, sample=dict.fromkeys(CLASSES, 3)):
        for sample_id, weight, image in zip(batch.sample_ids.tolist(), batch.weights, batch.images, strict=True):
            if weight:
                seen.setdefault(sample_id, []).append(image.tobytes())
    for sample_id, images in seen.items():
        key = {"seed": 7, "epoch": 0, "sample_id": sample_id}
        expected = [augment(stored[sample_id], options, **key, occurrence=number).tobytes() for number in range(3)]
        assert sorted(images) == sorted(expected)
    assert any(len(set(images)) == 3 for images in seen.values())


@pytest.mark.parametrize(
    ("where", "holds"),
    [
        ("age < -5 and caption is not None", lambda row: (row["age"] or 0) < -5 and row["caption"] is not None),
        ("age is None", lambda row: row["age"] is None),
        # Null compares as neither true nor false, whatever the operator.
        *(
            (where, lambda row: row["age"] not in (None, -7))
            for where in ("age != -7", "age not in (-7,)", "not age == -7", "not (age in (-7, -7))", "-7 != age")
        ),
        ("age not in (-7, -6) and not (age in (-8,))", lambda row: row["age"] not in (None, -8, -7, -6)),
        ("age in (-7,) or ratio == 0", lambda row: row["age"] == -7 or row["ratio"] == 0),
        ("not (ratio >= 1)", lambda row: row["ratio"] < 1),
        ("0.5 <= ratio < 2 or ratio in (0, 2.5)", lambda row: 0.5 <= row["ratio"] < 2 or row["ratio"] in (0, 2.5)),
        ("ratio * 2 + 1 > 3", lambda row: row["ratio"] > 1),
        ("age / 4 * 4 == age and age / 7 < -1", lambda row: (row["age"] or 0) / 7 < -1),
        ("50 / age < -8", lambda row: -50 / 8 < (row["age"] or 0) < 0),
        (pc.field("ratio") > 2, lambda row: row["ratio"] > 2),
    ],
    ids=lambda given: "" if callable(given) else str(given),
)
def test_where_chooses_the_rows_for_which_it_is_true(where, holds, captioned):
    rows = captioned.metadata("train").to_pylist()
    expected = sorted(row["sample_id"] for row in rows if holds(row))
    assert 0 < len(expected) < len(rows)
    assert sorted(each for ids in ids_of(captioned.batches("train", **BATCH, where=where)) for each in ids) == expected


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"where": "agee > 1"}, "no metadata column agee in .*expected some of sample_id"),
        ({"where": "age >"}, "where = 'age >': invalid syntax"),
        ({"where": "__import__('os')"}, "is not understood; expected a condition"),
        ({"where": "1 == 1"}, "it is no condition on columns"),
        ({"where": "age"}, "where = 'age'"),
        ({"where": "'cat' in caption"}, "'cat' is no column; expected a condition"),
        ({"where": f"age == {10**30}"}, "too large to convert"),
        ({"where": "caption > 3"}, "where = 'caption > 3': .*caption: string"),
        ({"where": "age in ('3',)"}, "where = .*age: int64"),
        ({"where": "age not in (3, '3')"}, "Could not convert .3. with type str"),
        ({"where": "age in age"}, "age is no list of values"),
        ({"where": "age == None"}, "where = 'age == None': write `age is None`"),
        ({"where": "age != None"}, "where = 'age != None': write `age is not None`"),
        ({"where": pc.field("agee") > 1}, "agee"),
        ({"where": "age > 1000"}, r"leave none of the \d+ rows of split 'train'"),
        ({"sample": "balanced"}, "a dataset without one class an image"),
        ({"sample": "caption"}, "sample = 'caption', a column of string; expected numbers"),
        ({"sample": "age"}, "rows have a weight that is null, negative or above 10000.*where = 'age >= 0'"),
        ({"where": "age = 3"}, "where = 'age = 3': invalid syntax; expected a condition .*Python's syntax .==, !="),
        ({"sample": 3}, "sample = 3; expected 'once', 'balanced'"),
        ({"columns": ["captoin"]}, "there is no extra column captoin; expected some of age, caption, pair"),
        ({"transform": "flip"}, "transform = 'flip'; expected a function"),
    ],
)
def test_what_no_row_has_is_refused_before_the_first_batch(given, said, captioned):
    with pytest.raises(UsageError, match=said):
        captioned.batches("train", **BATCH, **given)


def test_weights_of_classes_may_be_numbers_of_numpy(dataset):
    plain = dataset.batches("train", **BATCH, sample={"class_1": 2})
    for weight in (np.int64(2), np.float32(2)):
        assert dataset.batches("train", **BATCH, sample={"class_1": weight}).state_dict() == plain.state_dict()


def test_a_class_that_a_weight_rounds_to_nothing_is_named(dataset):
    with pytest.warns(UserWarning, match="sample leaves no row of class_1: "):
        dataset.batches("train", **BATCH, sample={"class_1": 0.001})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dataset.batches("train", **BATCH, sample={"class_1": 0, "class_2": 0.1}).close()


def test_unknown_classes_are_refused_with_the_nearest(dataset):
    for sample, said in (({"clas_1": 2}, "did you mean 'class_1'"), ({"class_1": -1}, "expected a weight from 0")):
        with pytest.raises(UsageError, match=said):
            dataset.batches("train", **BATCH, sample=sample)


@pytest.mark.parametrize("format", ["parquet", "tfrecord"])
def test_batches_have_the_chosen_columns(format, captioned):
    for columns, expected in ((None, set(extra_columns.TYPES)), ([], set()), (["age"], {"age"})):
        batch = next(iter(captioned.batches("train", **BATCH, format=format, columns=columns)))
        assert set(batch.extra) == expected
        assert np.array_equal(batch.images, next(iter(captioned.batches("train", **BATCH))).images)


def test_the_report_counts_every_row(dataset):
    chosen = {"where": "label != 0", "sample": {"class_1": 3}}
    ranks = [dataset.batches("train", **BATCH, **chosen, rank=rank, world_size=2) for rank in range(2)]
    for loader in ranks:
        for _ in range(2):
            for _ in loader:
                pass
    reports = [loader.report() for loader in ranks]
    rows = dataset.metadata("train", ["label"]).column("label").to_pylist()
    per_epoch = 3 * rows.count(1) + rows.count(2)
    assert sum(report.rows_seen for report in reports) == 2 * per_epoch == 2 * ranks[0].samples_per_epoch
    assert sum(report.rows_padded for report in reports) == 2 * ranks[0].num_padding
    for report, loader in zip(reports, ranks, strict=True):
        assert report.steps == 2 * len(loader) and report.rows_dropped == 0 and report.retries == 0
        assert report.epoch_rows == per_epoch and report.epoch_rows_repeated == 2 * rows.count(1)
        assert report.epoch_rows_left_out == rows.count(0)
        assert report.fetch_seconds > 0 and report.decode_seconds > 0 and report.wait_seconds > 0
        assert f"{report.rows_seen} rows seen, {report.rows_padded} padded, 0 dropped" in str(report)


def test_a_step_counted_over_all_epochs_is_found(dataset):
    loader = dataset.batches("train", **BATCH)
    epochs = [ids_of(loader) for _ in range(3)]
    loader.seek_to_step(len(loader) + 2)
    assert (loader.epoch, loader.step) == (1, 2) and ids_of(loader) == epochs[1][2:]


def test_numbers_of_numpy_and_of_an_optimizer_are_numbers(dataset):
    loader = dataset.batches("train", **{name: np.int64(number) for name, number in BATCH.items()})
    expected = dataset.batches("train", **BATCH)
    expected.seek_to_step(len(loader) + 2)
    for steps in (np.int64(len(loader) + 2), np.array(len(loader) + 2), float(len(loader) + 2)):
        loader.seek_to_step(steps)
        assert json.loads(json.dumps(loader.state_dict())) == expected.state_dict()
    assert ids_of(loader) == ids_of(expected)
    state = loader.state_dict()
    for damaged in ({**state, "step": 1.5}, {**state, "epoch": "1"}, {**state, "epoch": None}):
        with pytest.raises(UsageError, match="expected a whole number"):
            loader.load_state_dict(damaged)


def test_cached_batches_come_again_and_again_and_the_loader_stays(dataset):
    loader = dataset.batches("train", **BATCH)
    first = ids_of(loader)
    loader.seek(0, 1)
    cached = loader.cached(2)
    assert (loader.epoch, loader.step) == (0, 1) and len(cached) == len(loader)
    assert ids_of(cached) == [first[1 + number % 2] for number in range(len(loader))]
    assert ids_of(loader) == first[1:]
    with pytest.raises(UsageError, match="num_batches = 0; expected a whole number from 1 on"):
        loader.cached(0)


NUM_IMAGES = 21


@pytest.fixture(scope="module")
def boxed(tmp_path_factory: pytest.TempPathFactory) -> LoadableDataset:
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
def test_boxes_follow_the_pixels(boxed: LoadableDataset, augmentation: str, format: str) -> None:
    red, num_rows, num_found = boxed.class_names.index("red"), 0, 0
    for epoch in range(2):
        loader = boxed.batches(
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


def test_order_and_world_size_change_no_box(boxed: LoadableDataset) -> None:
    options = AUGMENTATIONS["imagenet"]

    def sides(rank: int, world_size: int) -> list[np.ndarray]:
        loader = boxed.batches(
            "train", global_batch_size=8, num_streams=2, augment=options, rank=rank, world_size=world_size, seed=3
        )
        return [batch["boxes"].sides for batch in loader]

    whole = sides(0, 1)
    for step, parts in enumerate(zip(sides(0, 2), sides(1, 2), strict=True)):
        np.testing.assert_array_equal(whole[step], np.concatenate(parts))


def test_tensors_move_with_their_batch(boxed: LoadableDataset) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(boxed.torch_loader("train", global_batch_size=8, device="cpu")))
    boxes = batch.to("cpu", torch.float64)["boxes"]
    assert [each.dtype for each in (boxes.sides, boxes.labels, boxes.offsets)] == [torch.float64] * 3
    target = batch["boxes"][-1]
    assert torch.is_tensor(target.sides) and target.sides.shape == (len(target), 4)
    assert [len(each) for each in batch["boxes"][:3]] == np.diff(batch["boxes"].offsets)[:3].tolist()


@pytest.mark.parametrize("with_labels", [True, False])
def test_a_tf_dataset_has_ragged_boxes(boxed: LoadableDataset, with_labels: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    reading: dict = {"global_batch_size": 8, "num_streams": 1, "augment": AUGMENTATIONS["size"]}
    if not with_labels:
        # Of an epoch's first batch, a transform shows the types.
        reading["transform"] = lambda batch, rng: {
            "boxes": replace(batch["boxes"], labels=None), "images": batch.images / 255
        }  # fmt: skip
    rows = boxed.tf_dataset("train", annotations=True, **reading)
    images, labels, weights = rows.element_spec
    assert images.shape == (8, 40, 40, 3) and weights.shape == (8,)
    assert labels["boxes"].shape.as_list() == [8, None, 4] and labels["labels"].shape == (8, 2)
    assert ("box_labels" in labels) == with_labels
    num_boxes = 0
    for batch, (_, found, _) in zip(boxed.batches("train", **reading), rows, strict=True):
        num_boxes += len(batch["boxes"].sides)
        assert isinstance(found["boxes"], tf.RaggedTensor)
        for row, boxes in enumerate(batch["boxes"]):
            np.testing.assert_array_equal(found["boxes"][row], boxes.sides)
            if with_labels:
                np.testing.assert_array_equal(found["box_labels"][row], boxes.labels)
    assert num_boxes > 10
    # For `fit`, labels alone; and nothing that is not delivered keeps from mixing.
    mixed = boxed.tf_dataset("train", global_batch_size=8, augment=AugmentOptions(rand_augment_operations=2))
    assert mixed.element_spec[1].shape == (8, 2) and next(iter(mixed))[1].shape == (8, 2)
    with pytest.raises(UsageError, match="have neither boxes nor masks"):
        boxed.tf_dataset("train", global_batch_size=8, annotations=True, columns=["number"])


def test_a_transform_of_samples_gets_its_boxes(boxed: LoadableDataset) -> None:
    loader = boxed.batches(
        "train", global_batch_size=7, num_streams=1, per_sample=True,
        transform=lambda sample, rng: {"image": sample.image, "count": len(sample["boxes"])},
    )  # fmt: skip
    for batch in loader:
        assert batch["count"] == np.diff(batch["boxes"].offsets).tolist()


def test_what_boxes_cannot_follow_is_refused(boxed: LoadableDataset) -> None:
    options = AugmentOptions(rand_augment_operations=2, mixup_alpha=0.2)
    with pytest.raises(UsageError, match="rand_augment_operations and mixup_alpha, but the dataset has boxes"):
        boxed.batches("train", global_batch_size=8, augment=options)
    batch = next(iter(boxed.batches("train", global_batch_size=8, augment=options, columns=[], num_streams=1)))
    assert "boxes" not in batch
    with pytest.raises(IndexError):
        next(iter(boxed.batches("train", global_batch_size=8)))["boxes"][8]


def test_a_contact_sheet_outlines_boxes(boxed: LoadableDataset) -> None:
    sample = next(each for each in boxed.samples("train") if len(each["boxes"]) == 1)
    picture = np.asarray(picture_of(sample.image_HWC, sample.extra, 128))
    assert picture.shape == (128, 128, 3)
    x0, y0, x1, y1 = (2 * sample["boxes"].sides[0]).astype(int)
    [named] = named_boxes(sample["boxes"], boxed.class_names)
    colour = ImageColor.getrgb(named.colour)
    assert named.name == "red" and np.argwhere((picture == colour).all(2)).min(0).tolist() == [y0, x0]
    assert np.argwhere((picture == colour).all(2)).max(0).tolist() == [y1 - 1, x1 - 1]
    assert ImageColor.getrgb(named.colour) in {colour for _, colour in boxed.show(9).getcolors(1 << 20) or ()}


def test_the_programs_of_the_page_run(boxed: LoadableDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorflow")
    monkeypatch.chdir(Path(boxed.pin.uri).parent)
    program = "\n".join(blocks(ROOT / "docs" / "boxes.md", "python"))
    exec(compile(program, "boxes.md", "exec"), {})
