"""Boxes of images: what an image of a dataset brings with it, in tables, WebDataset, TFRecord and COCO."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import shardmill
from etl.checks.version import version_warnings
from etl.config import BoxesConfig, SourceConfig
from etl.sources import SOURCES
from etl.sources.annotations import ANNOTATED_SIZE, box_values, mask_location
from etl.units.after_decoding import Annotated
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.shard import read_stored_rows
from shardmill.dataset.tar_export import sample_members
from shardmill.errors import UsageError
from shardmill.formats.encodings import decode_row
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, INT64_LIST, FeatureList, FeatureValue
from shardmill.ids import format_sample_id
from shardmill.kernel import shardmill_native
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.typed_columns import decode_values, encode_values
from shardmill.values import ImageSample, Rejection, RejectReason, SourceImage
from tests.etl.annotations import (
    BOXES,
    MODES,
    NUM_IMAGES,
    ROWS,
    SHAPES,
    STORED,
    as_coco,
    as_jsonl,
    as_table,
    drawn,
    found_in,
    image_of,
    stored_in,
    write_images,
)
from tests.etl.building import annotated, build_source, images_of, list_images
from tests.etl.incremental import build_from
from tests.etl.source_files import Members, write_records, write_tar

KERNELS = ("wheels",) if shardmill_native is None else ("wheels", "native")


def moved(data: bytes, options: NormalizeOptions, values: dict[str, Any]) -> tuple[SourceImage, ImageSample]:
    source = SourceImage("a.png", len(data), extra=encode_values(values))
    found = annotated(source, data, options)
    assert isinstance(found, Annotated)
    return found.image, found.sample


@pytest.mark.parametrize("mode", MODES)
def test_a_rectangle_lies_where_its_box_says(mode: str) -> None:
    for (height, width), upscale, orientation in itertools.product(SHAPES, ("auto", "never"), range(1, 9)):
        if orientation % 2 == 0 and upscale == "never":
            continue
        box = [width // 5, height // 3, width // 5 + width // 2, height // 3 + height // 2]
        form = "JPEG" if height > 500 else "PNG"
        data = drawn(height, width, box, orientation, form)
        for kernel in KERNELS:
            options = NormalizeOptions(image_size=64, resize_mode=mode, upscale=upscale, kernel=kernel, encoding="png")  # pyright: ignore[reportArgumentType]
            image, sample = moved(data, options, {"boxes": [float(side) for side in box]})
            found = found_in(decode_row(sample.image, options))
            boxes = decode_values(image.extra)["boxes"]
            assert isinstance(boxes, list) and found is not None
            assert np.abs(np.subtract(boxes, found)).max() <= 1, (height, width, orientation, options)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_of_a_files_own_pixels_are_turned_with_them(orientation: int) -> None:
    box = [30, 20, 70, 35]
    data = drawn(60, 120, box, orientation)
    with Image.open(io.BytesIO(data)) as stored:
        own, own_box = stored.size, found_in(np.asarray(stored))
    options = NormalizeOptions(image_size=120, resize_mode="pad", encoding="png")
    of_file = {"boxes": [float(side) for side in own_box or ()], ANNOTATED_SIZE: list(own)}
    of_upright = {"boxes": [float(side) for side in box], ANNOTATED_SIZE: [120, 60]}
    # Without an exchange of the sides, the size does not tell which was meant: it is the upright image.
    given = [of_file, of_upright] if orientation >= 5 else [of_upright]
    for values in given:
        image, _ = moved(data, options, values)
        assert decode_values(image.extra) == {"boxes": [30.0, 50.0, 70.0, 65.0]}


@pytest.mark.parametrize("orientation", range(5, 9))
def test_boxes_that_were_drawn_upright_are_not_turned(orientation: int) -> None:
    """As a tool does that shows the upright image, and writes the size of the file beside it."""
    data = drawn(60, 120, [30, 20, 70, 35], orientation)
    for box, is_refused in (([30, 20, 70, 35], True), ([30, 20, 50, 35], False), ([30, 20, 130, 35], False)):
        values = {"boxes": box, ANNOTATED_SIZE: [60, 120]}
        source = SourceImage("a.png", len(data), extra=encode_values(values))
        outcome = annotated(source, data, NormalizeOptions(image_size=120, resize_mode="pad"))
        assert isinstance(outcome, Rejection) == is_refused, box
        assert not isinstance(outcome, Rejection) or "and end outside of them" in outcome.detail


def test_boxes_of_an_image_of_another_size_are_refused() -> None:
    data = drawn(60, 120, [1, 1, 9, 9], 6)
    source = SourceImage("a.png", len(data), extra=encode_values({"boxes": [], ANNOTATED_SIZE: [240, 120]}))
    outcome = annotated(source, data, NormalizeOptions())
    assert isinstance(outcome, Rejection) and outcome.reason is RejectReason.ANNOTATED_SIZE
    assert outcome.detail == "its boxes are of 240x120 pixels; the image has 120x60"


def test_what_is_cut_off_is_clipped_or_dropped_and_labels_follow() -> None:
    # 40 x 20 becomes the 20 x 20 in its middle, doubled.
    data, options = drawn(20, 40, [0, 0, 1, 1]), NormalizeOptions(image_size=40, encoding="png")
    values = {
        "boxes": [0, 0, 9, 9, 5, 5, 15, 15, 20, 10, 25, 12, 12, 3, 12, 9],
        "box_labels": ["left", "edge", "middle", "empty"],
        "label": ["edge", "empty", "left", "middle"],
    }
    image, sample = moved(data, options, values)
    assert decode_values(image.extra) == {
        "boxes": [0.0, 10.0, 10.0, 30.0, 20.0, 20.0, 30.0, 24.0],
        "box_labels": ["edge", "middle"],
        "label": ["edge", "middle"],
    }
    assert sample.notes[-2:] == ("boxes_clipped", "boxes_dropped_2")


@pytest.mark.parametrize(
    ("boxes", "labels", "problem"),
    [
        ([[1, 2, 3]], None, "box 0 is [1, 2, 3], expected four numbers"),
        ([[1, 2, 3, float("nan")]], None, "expected four numbers"),
        ([[30, 30, 10, 10]], None, 'set boxes.format = "xywh"'),
        ([[0.1, 0.2, 0.3, 0.4]], None, "expected pixels, not shares of width and height"),
        ([[1, 2, 3, 4]], ["a", "b"], "1 boxes and 2 labels"),
        ([[1, 2, 3, 4]], [None], "a box without a label"),
    ],
)
def test_bad_boxes_say_what_is_wrong(boxes: list[Any], labels: list[Any] | None, problem: str) -> None:
    with pytest.raises(ValueError, match=".*") as error:
        box_values(boxes, labels, "xyxy")
    assert problem in str(error.value)


def as_csv(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    write_images(folder, len(rows))
    with open(folder / "t.csv", "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["uri", "boxes", "names"])
        for number, row in enumerate(rows):
            writer.writerow([f"{number}.png", *(json.dumps(row[name]) for name in ("boxes", "names"))])
    return SourceConfig.model_validate({"uri": str(folder / "t.csv"), "kind": "table", "boxes": BOXES})


def as_hugging_face(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    """Boxes of corner, width and height, with numbers of classes, in one struct, as in Hugging Face's datasets."""
    names = ["bird", "cat", "dog"]
    objects = [
        {
            "bbox": [[x0, y0, x1 - x0, y1 - y0] for x0, y0, x1, y1 in row["boxes"]],
            "category": [names.index(name) for name in row["names"]],
        }
        if row["boxes"] is not None
        else None
        for row in rows
    ]
    kind = pa.struct([("bbox", pa.list_(pa.list_(pa.float32(), 4))), ("category", pa.list_(pa.int64()))])
    category = {"feature": {"names": names, "_type": "ClassLabel"}, "_type": "Sequence"}
    features = {"info": {"features": {"objects": {"bbox": {}, "category": category}}}}
    table = pa.table({
        "image": [image_of(number) for number in range(len(rows))],
        "key": [f"{number}.png" for number in range(len(rows))],
        "objects": pa.array(objects, kind),
        "width": [40] * len(rows),
        "height": [20] * len(rows),
    })  # fmt: skip
    pq.write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}), folder / "t.parquet")
    boxes = {"field": "objects.bbox", "labels_field": "objects.category", "format": "xywh"}
    return SourceConfig.model_validate({"uri": str(folder / "t.parquet"), "kind": "parquet", "boxes": boxes})


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_hugging_face, as_coco])
def test_every_source_gives_the_same_boxes(write: Callable[..., SourceConfig], tmp_path: Path) -> None:
    source = write(tmp_path, ROWS)
    # The middle 20 x 20 of 40 x 20 becomes 16 x 16.
    manifest = build_source(source, tmp_path / "dataset")
    assert manifest.columns["boxes"] == "list<box>" and manifest.columns["box_labels"] == "list<class>"
    assert manifest.class_names == ("bird", "cat", "dog") and manifest.row_schema.label_kind == "multi_label"
    for format in manifest.formats:
        assert stored_in(manifest, tmp_path / "dataset", format) == STORED
    # An image has the classes of the boxes that are left: no bird.
    assert manifest.empty_classes == ("bird",)
    assert {note: n for note, n in manifest.counts.by_note.items() if "box" in note} == {
        "boxes_clipped": 1,
        "boxes_dropped_1": 1,
    }


def test_a_later_run_reads_only_images_whose_boxes_changed(tmp_path: Path) -> None:
    first = build_from(as_jsonl(tmp_path, ROWS), tmp_path / "dataset", image_size=16)
    again = build_from(as_jsonl(tmp_path, ROWS), tmp_path / "dataset", image_size=16)
    assert again.manifest.version == first.manifest.version
    changed = [*ROWS[:3], {"boxes": [[10, 0, 20, 20]], "names": ["fish"]}]
    source = as_jsonl(tmp_path, changed)
    after = build_from(source, tmp_path / "dataset", image_size=16)
    assert after.manifest.operation == "incremental"
    compact_dataset(open_dataset(str(tmp_path / "dataset")), "c")
    unchanged = build_from(source, tmp_path / "dataset", image_size=16)
    assert unchanged.manifest.content_digest == after.manifest.content_digest
    full = build_from(source, tmp_path / "full", image_size=16)
    assert full.manifest.content_digest == after.manifest.content_digest


def test_boxes_without_classes_stand_beside_a_label(tmp_path: Path) -> None:
    write_images(tmp_path, 2)
    rows = [{"uri": f"{n}.png", "label": "ab"[n], "places": [[0, 0, 30, 10]]} for n in range(2)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = SourceConfig.model_validate(
        {"uri": str(tmp_path / "t.jsonl"), "kind": "table", "boxes": {"field": "places"}}
    )
    manifest = build_source(source, tmp_path / "dataset", resize_mode="stretch")
    assert manifest.class_names == ("a", "b") and "box_labels" not in manifest.columns
    opened = shardmill.open_dataset(str(tmp_path / "dataset"))
    sample = opened.samples(next(iter(manifest.splits)))[0]
    assert sample["boxes"].labels is None and sample["boxes"].sides.tolist() == [[0.0, 0.0, 12.0, 8.0]]


def test_a_row_with_bad_boxes_is_a_rejection(tmp_path: Path) -> None:
    huge = {"boxes": [[0, 0, 10**400, 9]], "names": ["cat"]}
    source = as_csv(tmp_path, [*ROWS, {"boxes": [[9, 9, 1, 1]], "names": ["cat"]}, {"boxes": 3, "names": []}, huge])
    listing = list_images(source)
    assert len(images_of(listing)) == len(ROWS)
    details = [each.detail for each in listing.rejections]
    assert "ends before it begins" in details[0] and "3 is no list of boxes" in details[1] and "1000" in details[2]


@pytest.mark.parametrize("write", [as_jsonl, as_csv, as_hugging_face])
def test_an_image_without_boxes_has_an_empty_list(write: Callable[..., SourceConfig], tmp_path: Path) -> None:
    source = write(tmp_path, [*ROWS, {"boxes": None, "names": None}])
    listing = list_images(source)
    [refused] = listing.rejections
    assert len(images_of(listing)) == len(ROWS) and refused.reason is RejectReason.BAD_ROW
    assert "an image without boxes has an empty list" in refused.detail


def of_rows(boxes: list[Any], folder: Path, **box_settings: str) -> SourceConfig:
    rows = [{"boxes": each, "names": ["cat"] * len(each)} for each in boxes]
    source = as_jsonl(folder, rows)
    return source.model_copy(update={"boxes": source.boxes.model_copy(update=box_settings)})


CENTRES = [[[0.6, 0.6, 0.7, 0.7]], [[0.5, 0.5, 0.9, 0.8]], [[0.9, 0.5, 0.2, 0.2]]] * 3


@pytest.mark.parametrize(
    ("boxes", "box_format"),
    [
        (CENTRES, "xywh"),
        ([[[0.1, 0.2, 1.0001, 0.9]]] * 9, "xyxy"),
        ([[[-0.001, 0.2, 0.5, 2.5e-05 + 0.9]]] * 9, "xyxy"),
        ([[[0, 0, 1, 1]]] * 9, "xyxy"),
        # Also if most are in pixels.
        ([[[2, 2, 30, 9]]] * 16 + CENTRES[:2], "xywh"),
        ([[]] * 9 + CENTRES[:2], "xywh"),
    ],
)
def test_shares_of_width_and_height_are_no_pixels(boxes: list[Any], box_format: str, tmp_path: Path) -> None:
    source = of_rows(boxes, tmp_path, format=box_format)
    with pytest.raises(UsageError, match="expected pixels, not shares of width and height|no image of .* has a box"):
        build_source(source, tmp_path / "dataset", max_reject_fraction=1)


def test_a_box_of_a_pixel_in_a_file_of_pixels_is_one(tmp_path: Path) -> None:
    source = of_rows([[[2, 2, 30, 9]]] * 20 + [[[0.2, 0.2, 1.5, 1.5]], [[1, 1, 2, 2]]], tmp_path)
    manifest = build_source(source, tmp_path / "dataset", resize_mode="pad")
    assert manifest.counts.accepted == 22


def test_a_table_with_a_row_for_each_box_is_refused(tmp_path: Path) -> None:
    source = as_jsonl(tmp_path, ROWS)
    file = Path(source.uri)
    line = json.dumps({"uri": "1.png", "boxes": [[1, 1, 9, 9]], "names": ["cat"]})
    file.write_text(f"{file.read_text()}\n{line}\n")
    with pytest.raises(UsageError, match=r"1\.png is listed 2 times or more, with boxes each time; expected one row"):
        list_images(source)


@pytest.mark.parametrize(
    ("mode", "boxes", "found"),
    [
        # Two corners that are read as a corner with width and height.
        ("none", [[14, 2, 22, 10]], None),
        ("none", [[20, 4, 39, 12], [25, 9, 35, 18]], "2 boxes of 1 images end outside of their images"),
        ("none", [[50, 4, 3, 3]], "1 boxes of 1 images lie outside of the image, or are empty, and were dropped$"),
        ("pad", [[50, 4, 3, 3]], "1 boxes of 1 images lie outside of the image, or are empty, and were dropped$"),
        ("crop", [[1, 1, 3, 3]], "lie outside of what is kept of the image.*: etl.resize_mode pad or stretch"),
        # What the crop cuts ends inside of the image.
        ("crop", [[1, 1, 30, 9]], None),
        ("crop", [[30, 1, 20, 9]], "1 boxes of 1 images end outside of their images"),
    ],
)
def test_boxes_outside_of_their_images_are_distinguished_from_what_is_cut(
    mode: str, boxes: list[list[float]], found: str | None, tmp_path: Path
) -> None:
    source = of_rows([boxes, [[15, 5, 9, 9]]], tmp_path, format="xywh")
    manifest = build_source(source, tmp_path / "dataset", resize_mode=mode)
    warnings = list(version_warnings(open_store(str(tmp_path / "dataset")), manifest))
    told = [each for each in warnings if "boxes of" in each]
    assert any(re.search(found, each) for each in told) if found else not told


def test_a_dataset_that_has_lost_all_boxes_is_refused(tmp_path: Path) -> None:
    source = of_rows([[[50, 4, 3, 3]], [[1, 1, 3, 3]]], tmp_path, format="xywh")
    with pytest.raises(UsageError, match="all boxes of the source lie outside of what is kept"):
        build_source(source, tmp_path / "dataset")
    assert build_source(source, tmp_path / "dataset", resize_mode="pad").version == 1


@pytest.mark.parametrize("name", ["bbox", "json.meta.boxes", "xmin", "keypoints:list<float32>", "bounding_box"])
def test_columns_that_would_stay_in_the_source_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"source\.boxes\.field"):
        SourceConfig(kind="table", extra_columns=(name,))
    assert SourceConfig(kind="table", extra_columns=("bbox:string", "maximum", "sandbox"))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"kind": "folders", "boxes": {"field": "a"}}, "boxes with a kind whose rows have fields, such as table"),
        ({"kind": "table", "boxes": {"labels_field": "a"}}, "boxes.field beside boxes.labels_field"),
        ({"kind": "coco", "label_kind": "float"}, "the classes of the boxes are the labels"),
        ({"kind": "table", "coco_images": "a"}, "coco_images with the kind coco, not table"),
        ({"kind": "tfrecord", "boxes": {"field": "a", "format": "xywh"}}, "no boxes.format"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SourceConfig.model_validate(settings)


def test_a_kind_of_ones_own_may_have_boxes_and_masks() -> None:
    assert SourceConfig(kind="tests.extending_entries:NEW_SOURCE", mask_field="mask", boxes=BoxesConfig(field="bbox"))


def test_columns_of_a_table_that_look_like_boxes_are_not_lost_without_a_word(tmp_path: Path) -> None:
    as_csv(tmp_path, ROWS)
    (tmp_path / "flat.csv").write_text("uri,xmin,ymin,xmax,ymax,label\n0.png,1,2,3,4,cat\n")
    [warning] = list_images(SourceConfig(uri=str(tmp_path / "flat.csv"), kind="table")).warnings
    assert "xmin, ymin, xmax, ymax" in warning and "source.boxes.field" in warning


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
        "good": {"boxes": [1, 2, 3, 4, 5, 6, 7, 8], "names": ["cat", "dog"]}, "lacks": {"names": []},
        "three": {"boxes": [1, 2, 3], "names": ["cat"]}, "turned": {"boxes": [[9, 9, 1, 1]], "names": ["cat"]},
        "shares": {"boxes": [[0, 0, 0.5, 1]], "names": ["cat"]}, "unnamed": {"boxes": [[0, 0, 5, 5]], "names": [None]},
    }  # fmt: skip
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
        place = mask_location(image, str(decode_values(image.extra)["mask"]), is_in_parts=False)
        refused = reader.read(place.image)
        assert isinstance(refused, Rejection) and refused.reason is RejectReason.TOO_LARGE_BYTES
