"""Boxes in every kind of source that has some: the same ones in all of them, in every format and version."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shardmill
from etl.checks.version_warnings import version_warnings
from etl.config import SourceConfig
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.stores import open_store
from shardmill.values import RejectReason
from tests.etl.annotations import BOXES, ROWS, STORED, as_coco, as_jsonl, image_of, stored_in, write_images
from tests.etl.building import build_source, images_of, list_images
from tests.etl.extra_columns import build


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
    first = build(as_jsonl(tmp_path, ROWS), tmp_path / "dataset", image_size=16)
    again = build(as_jsonl(tmp_path, ROWS), tmp_path / "dataset", image_size=16)
    assert again.manifest.version == first.manifest.version
    changed = [*ROWS[:3], {"boxes": [[10, 0, 20, 20]], "names": ["fish"]}]
    source = as_jsonl(tmp_path, changed)
    after = build(source, tmp_path / "dataset", image_size=16)
    assert after.manifest.operation == "incremental"
    compact_dataset(open_dataset(str(tmp_path / "dataset")), "c")
    unchanged = build(source, tmp_path / "dataset", image_size=16)
    assert unchanged.manifest.content_digest == after.manifest.content_digest
    full = build(source, tmp_path / "full", image_size=16)
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
def test_boxes_outside_of_their_images_are_told_from_what_is_cut(
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
        ({"kind": "folders", "boxes": {"field": "a"}}, "boxes with a kind among table, parquet"),
        ({"kind": "table", "boxes": {"labels_field": "a"}}, "boxes.field beside boxes.labels_field"),
        ({"kind": "coco", "label_kind": "float"}, "the classes of the boxes are the labels"),
        ({"kind": "table", "coco_images": "a"}, "coco_images with a kind among coco"),
        ({"kind": "tfrecord", "boxes": {"field": "a", "format": "xywh"}}, "no boxes.format"),
    ],
)
def test_settings_that_contradict_each_other(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SourceConfig.model_validate(settings)


def test_columns_of_a_table_that_look_like_boxes_are_not_lost_without_a_word(tmp_path: Path) -> None:
    as_csv(tmp_path, ROWS)
    (tmp_path / "flat.csv").write_text("uri,xmin,ymin,xmax,ymax,label\n0.png,1,2,3,4,cat\n")
    [warning] = list_images(SourceConfig(uri=str(tmp_path / "flat.csv"), kind="table")).warnings
    assert "xmin, ymin, xmax, ymax" in warning and "source.boxes.field" in warning
