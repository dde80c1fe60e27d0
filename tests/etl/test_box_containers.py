"""Boxes and masks of tar archives and TFRecord files: those that a table gives, and a reason for each that is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardmill
from etl.boxes_config import BoxesConfig
from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.mask_places import mask_place
from shardmill.dataset.copy_rows import read_stored_rows
from shardmill.dataset.tar_export import sample_members
from shardmill.errors import UsageError
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, INT64_LIST, FeatureList, FeatureValue
from shardmill.ids import format_sample_id
from shardmill.typed_columns import decode_values
from shardmill.values import Rejection, RejectReason
from tests.etl.annotations import NUM_IMAGES, ROWS, STORED, as_table, image_of, stored_in
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import Members, write_records, write_tar


def as_tar(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    """One JSON beside each image, with its size and a list of objects."""
    members: Members = {}
    for number, row in enumerate(rows):
        objects = [{"bbox": box, "name": name} for box, name in zip(row["boxes"], row["names"], strict=True)]
        content = {"width": 40, "height": 20, "objects": objects}
        members |= {f"{number}.png": image_of(number), f"{number}.json": json.dumps(content).encode()}
    boxes = {"field": "json.objects.bbox", "labels_field": "json.objects.name"}
    return with_boxes(write_tar(folder / "t.tar", members), boxes)


def as_tfrecord(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    """As TensorFlow's object detection API writes them; features without values are left out."""
    records: list[dict[str, FeatureValue]] = []
    for number, row in enumerate(rows):
        sides = {
            f"image/object/bbox/{side}": FeatureList(FLOAT_LIST, [box[place] / length for box in row["boxes"]])
            for place, (side, length) in enumerate({"xmin": 40, "ymin": 20, "xmax": 40, "ymax": 20}.items())
        }
        names = FeatureList(BYTES_LIST, [name.encode() for name in row["names"]])
        objects = {**sides, "image/object/class/text": names} if row["boxes"] else {}
        size = {"image/width": 40, "image/height": 20, "image/filename": b"%d.png" % number}
        records.append({"image/encoded": image_of(number), **size, **objects})
    boxes = {"field": "image/object/bbox", "labels_field": "image/object/class/text"}
    return with_boxes(write_records(folder / "t.tfrecord", records), boxes, key_field="image/filename")


def with_boxes(source: SourceConfig, boxes: dict[str, str], **settings: object) -> SourceConfig:
    return SourceConfig.model_validate({"uri": source.uri, "kind": source.kind, "boxes": boxes, **settings})


@pytest.mark.parametrize("write", [as_tar, as_tfrecord])
def test_they_give_the_boxes_of_every_other_source(write: Callable[..., SourceConfig], tmp_path: Path) -> None:
    manifest = build_source(write(tmp_path, ROWS), tmp_path / "dataset")
    assert manifest.class_names == ("bird", "cat", "dog") and manifest.row_schema.label_kind == "multi_label"
    for format in manifest.formats:
        assert stored_in(manifest, tmp_path / "dataset", format) == STORED
    notes = {note: n for note, n in manifest.counts.by_note.items() if "box" in note}
    assert notes == {"boxes_clipped": 1, "boxes_dropped_1": 1}


def test_a_tar_with_bad_boxes_has_rejections(tmp_path: Path) -> None:
    texts = {
        "good": {"boxes": [1, 2, 3, 4, 5, 6, 7, 8], "names": ["cat", "dog"]},
        "lacks": {"names": []},
        "three": {"boxes": [1, 2, 3], "names": ["cat"]},
        "turned": {"boxes": [[9, 9, 1, 1]], "names": ["cat"]},
        "shares": {"boxes": [[0, 0, 0.5, 1]], "names": ["cat"]},
        "unnamed": {"boxes": [[0, 0, 5, 5]], "names": [None]},
    }
    members: Members = {}
    for name, content in texts.items():
        members |= {f"{name}.png": image_of(0), f"{name}.json": json.dumps(content).encode()}
    boxes = {"field": "json.boxes", "labels_field": "json.names"}
    listing = list_images(with_boxes(write_tar(tmp_path / "t.tar", {**members, "alone.png": image_of(1)}), boxes))
    [image] = images_of(listing)
    assert decode_values(image.extra) == {
        "boxes": [1, 2, 3, 4, 5, 6, 7, 8], "box_labels": ["cat", "dog"], "label": ["cat", "dog"],
    }  # fmt: skip
    problems = {each.key.rpartition("\0")[2].partition(".")[0]: each.detail for each in listing.rejections}
    for name, problem in {
        "lacks": "no json.boxes beside it; an image without boxes has an empty list", "alone": "no json.boxes",
        "three": "expected four numbers", "turned": "ends before it begins", "shares": "expected pixels, not shares",
        "unnamed": "a box without a label",
    }.items():  # fmt: skip
        assert problem in problems.pop(name)
    assert not problems and {str(each.reason) for each in listing.rejections} == {"bad_row"}


def test_a_tfrecord_with_bad_boxes_has_rejections(tmp_path: Path) -> None:
    field, size = "image/object/bbox", {"image/width": 40, "image/height": 20}

    def record(*sides: list[float], labels: Sequence[int] = (7,), **other: FeatureValue) -> dict[str, FeatureValue]:
        of_box = zip(("xmin", "ymin", "xmax", "ymax"), sides, strict=True)
        features = {f"{field}/{name}": FeatureList(FLOAT_LIST, values) for name, values in of_box}
        numbers = FeatureList(INT64_LIST, labels)
        return {"image": image_of(0), **size, **features, "image/object/class/label": numbers, **other}

    records = [
        record([0.25], [0.25], [1.05], [0.5]),
        record([0.25, 0.5], [0.25], [0.5], [0.5]),
        record([10.0], [5.0], [20.0], [10.0]),
        record([0.25], [0.25], [0.5], [0.5], labels=(1, 2)),
        record([0.25], [0.25], [0.5], [0.5], **{"image/width": b""}),
    ]
    boxes = {"field": field, "labels_field": "image/object/class/label"}
    source = with_boxes(write_records(tmp_path / "t.tfrecord", records), boxes)
    listing = list_images(source)
    [image] = images_of(listing)
    values = decode_values(image.extra)
    assert values["boxes"] == pytest.approx([10, 5, 42, 10]) and values["box_labels"] == ["7"]
    for rejection, problem in zip(
        listing.rejections,
        (
            "xmin, /ymin, /xmax, /ymax have 2, 1, 1, 1 values", "a box has 10.0, expected shares",
            "1 boxes and 2 labels", "no image/width and image/height",
        ),
        strict=True,
    ):  # fmt: skip
        assert str(rejection.reason) == "bad_row" and problem in rejection.detail
    with pytest.raises(UsageError, match=r"source\.boxes\.field = 'objects', but no record of .* has a box there"):
        list_images(with_boxes(source, {"field": "objects"}, label_kind="none"))


@pytest.mark.starts("program")
def test_an_exported_tar_has_the_same_boxes_and_masks(tmp_path: Path) -> None:
    build_source(as_table(tmp_path), tmp_path / "dataset", image_size=64)
    dataset = shardmill.open_dataset(str(tmp_path / "dataset"))
    members: Members = {}
    for shard in dataset.shards_of("train"):
        for row in read_stored_rows(dataset.store, shard, dataset.manifest.row_schema):
            members |= dict(sample_members(row, dataset.manifest))
    written = write_tar(tmp_path / "train-000000.tar", members)
    settings = {"mask_field": "mask.png", "label_field": "json.class_name", "boxes": {"field": "json.boxes"}}
    source = SourceConfig.model_validate({"uri": written.uri, "kind": written.kind, **settings})
    build_source(source, tmp_path / "again", image_size=64)
    again = {
        sample.source.rpartition("\0")[2].partition(".")[0]: sample
        for sample in shardmill.open_dataset(str(tmp_path / "again")).samples("train")
    }
    assert len(again) == NUM_IMAGES
    for sample in dataset.samples("train"):
        other = again[format_sample_id(sample.sample_id)]
        np.testing.assert_array_equal(other["boxes"].sides, sample["boxes"].sides)
        np.testing.assert_array_equal(other["mask"], sample["mask"])


@pytest.mark.parametrize("packing", ["", ".gz"])
def test_archives_and_records_hold_masks(packing: str, tmp_path: Path) -> None:
    """In parts: the same ones as those of a table. What has none, or one that is too large, is refused."""
    table = as_table(tmp_path).model_copy(update={"boxes": BoxesConfig(), "label_kind": "none"})
    rows = [json.loads(line) for line in (tmp_path / "t.jsonl").read_text().splitlines()]
    members: Members = {}
    records: list[dict[str, FeatureValue]] = []
    for row in rows:
        name, image, mask = row["uri"], (tmp_path / row["uri"]).read_bytes(), (tmp_path / row["outline"]).read_bytes()
        # Behind its image, or before it in a sample of several images.
        of_several = {f"a.{name[0]}.seg.png": mask, f"a.{name}": image}
        members |= {name: image, f"{name[0]}.seg.PNG": mask} if name > "4" else of_several
        records.append({"image": image, "image/mask": mask, "name": name.encode()})
    members |= {"lost.seg.png": b"", "alone.png": members["8.png"]}
    records.append({"image": records[0]["image"], "name": b"alone.png"})
    tar = write_tar(tmp_path / f"t.tar{packing}", members, "w:gz" if packing else "w")
    parts = {
        "a": tar.model_copy(update={"mask_field": "seg.png", "label_kind": "none"}),
        "b": write_records(tmp_path / f"t.tfrecord{packing}", records).model_copy(
            update={"mask_field": "image/mask", "key_field": "name", "label_kind": "none"}
        ),
        "c": table,
    }
    manifest = build_source(SourceConfig(kind="several", parts=parts), tmp_path / "dataset", max_reject_fraction=0.1)
    assert manifest.counts.by_reason == {"bad_row": 2, "not_an_image_name": 1}
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    found = {}
    for sample in (each for split in manifest.splits for each in opened.samples(split)):
        found.setdefault(sample.source[-5:], []).append(sample["mask"])
    assert len(found) == NUM_IMAGES
    for masks in found.values():
        assert len(masks) == 3 and all(mask.any() and (mask == masks[0]).all() for mask in masks)
    for source in (parts["a"], parts["b"]):
        reader = SOURCES[source.kind](source).open(max_source_bytes=60)
        image = images_of(list_images(source, 10_000))[0]
        place = mask_place(image, str(decode_values(image.extra)["mask"]), is_in_parts=False)
        refused = reader.read(place.image)
        assert isinstance(refused, Rejection) and refused.reason is RejectReason.TOO_LARGE_BYTES
