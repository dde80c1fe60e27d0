"""Annotation files of COCO: the images that they name, in which folder, and what is wrong with them."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from etl.config import SourceConfig
from etl.sources.kinds.coco import read_coco
from shardmill.errors import IntegrityError, UsageError
from tests.etl.annotations import ROWS, STORED, as_coco, image_of, stored_in
from tests.etl.building import build_source, images_of, list_images
from tests.services.s3 import s3_client


def test_coco_finds_splits_and_images(tmp_path: Path) -> None:
    """In the layout of Roboflow: a folder for each split, with its images and its annotations."""
    for split in ("train", "valid"):
        (tmp_path / split).mkdir()
        coco = as_coco(tmp_path, ROWS)
        Path(coco.uri).rename(tmp_path / split / "_annotations.coco.json")
        for number in range(len(ROWS)):
            (tmp_path / "val2017" / f"{number}.png").rename(tmp_path / split / f"{number}.png")
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="coco"))
    assert {(image.key, image.split) for image in images_of(listing)} == {
        (f"{folder}/{number}.png", split)
        for folder, split in (("train", "train"), ("valid", "validation"))
        for number in range(len(ROWS))
    }
    assert any("crowds" in warning for warning in listing.warnings)


def test_coco_needs_whole_sizes_and_distinct_ids(tmp_path: Path) -> None:
    file = Path(as_coco(tmp_path, ROWS).uri)
    content = json.loads(file.read_text())
    content["images"][0] |= {"height": 20.0}
    content["images"][1] |= {"width": None}
    content["images"][2] |= {"width": 10**400}
    found = read_coco(io.BytesIO(json.dumps(content).encode()), "a.json")
    assert [image.size for image in found.images[:3]] == [[40, 20], [], []]
    for name in ("images", "categories"):
        twice = content | {name: [*content[name], content[name][0]]}
        with pytest.raises(UsageError, match=f"has 2 {name} of the id"):
            read_coco(io.BytesIO(json.dumps(twice).encode()), "a.json")


def written(folder: Path, change: Callable[[dict[str, Any]], object]) -> SourceConfig:
    """`as_coco`, written by another tool: its content is changed in place."""
    source = as_coco(folder, ROWS)
    content = json.loads(Path(source.uri).read_text())
    change(content)
    Path(source.uri).write_text(json.dumps(content))
    return source


def with_texts(kind: Callable[[Any], Any], *fields: str) -> Callable[[dict[str, Any]], object]:
    """Fields of every object in another type."""

    def change(content: dict[str, Any]) -> None:
        for each in (*content["images"], *content["annotations"], *content["categories"]):
            each.update({field: kind(each[field]) for field in fields if field in each})

    return change


def of_no_crowd(value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: [each.setdefault("iscrowd", value) for each in content["annotations"]]


def with_two_records(content: dict[str, Any]) -> None:
    """The first image is listed again under another id, which its second box has."""
    content["images"].append({**content["images"][0], "id": 100})
    content["annotations"][1]["image_id"] = 100


def with_names(name: str) -> Callable[[dict[str, Any]], object]:
    return lambda content: [each.update(file_name=name.format(each["file_name"])) for each in content["images"]]


@pytest.mark.parametrize(
    "change",
    [
        with_texts(str, "image_id"), with_texts(float, "image_id", "category_id"), with_texts(str, "id"),
        with_texts(str, "category_id"), of_no_crowd("0"), of_no_crowd(False), of_no_crowd(None), of_no_crowd(0.0),
        with_two_records, with_names("val2017\\{}"), with_names(".\\{}"),
    ],
)  # fmt: skip
def test_coco_gives_the_same_boxes_whatever_tool_wrote_it(change: Callable[..., object], tmp_path: Path) -> None:
    manifest = build_source(written(tmp_path, change), tmp_path / "dataset", formats=("parquet",))
    assert stored_in(manifest, tmp_path / "dataset", "parquet") == STORED


def every(name: str, value: Any) -> Callable[[dict[str, Any]], object]:
    return lambda content: [each.update({name: value}) for each in content["annotations"]]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (every("image_id", "a"), "none of the 5 annotations .*: 5 are of images that it does not list, 0 of crowds"),
        (every("iscrowd", "1"), "none of the 5 annotations .* 5 of crowds"),
        (every("category_id", 99), "none of the 5 annotations .* has the category_id 99"),
        (every("iscrowd", "perhaps"), "has iscrowd = 'perhaps'; expected 0 or 1"),
        (every("bbox", ["1", "2", "3", "4"]), "no image of .* has a box, and 3 rows were refused"),
        (lambda content: content.pop("annotations"), "has no list annotations"),
    ],
)
def test_boxes_are_never_lost_without_a_word(change: Callable[..., object], problem: str, tmp_path: Path) -> None:
    source = written(tmp_path, change)
    with pytest.raises(UsageError, match=problem):
        build_source(source, tmp_path / "dataset", max_reject_fraction=1)


def test_images_of_two_annotation_files_are_refused(tmp_path: Path) -> None:
    """As an export of each class, or of each task, makes them."""
    file = Path(as_coco(tmp_path, ROWS).uri)
    file.with_name("persons_val2017.json").write_bytes(file.read_bytes())
    with pytest.raises(UsageError, match=r"val2017/\d.png is listed 2 times or more, with boxes each time"):
        list_images(SourceConfig(uri=str(file.parent), kind="coco", coco_images=str(tmp_path / "val2017")))


def test_images_of_a_file_without_annotations_are_read_without_boxes(tmp_path: Path) -> None:
    """As COCO's lists of test images are: predictions need no boxes."""
    source = written(tmp_path, lambda content: [content.pop(name) for name in ("annotations", "categories")])
    listing = list_images(source.model_copy(update={"label_kind": "none"}))
    assert len(images_of(listing)) == len(ROWS) and not listing.rejections


def test_coco_rejects_only_the_image_of_an_annotation_without_a_box(tmp_path: Path) -> None:
    source = as_coco(tmp_path, ROWS)
    content = json.loads(Path(source.uri).read_text())
    first, second = (next(each for each in content["annotations"] if each["image_id"] == number) for number in (0, 1))
    first |= {"id": 71, "category_id": 999}
    second |= {"id": 72}
    del second["bbox"]
    Path(source.uri).write_text(json.dumps(content))
    listing = list_images(source)
    assert len(images_of(listing)) == len(ROWS) - 2
    details = [each.detail for each in listing.rejections]
    assert re.search("row 1: .* annotation 71 has the category_id 999", details[0])
    assert re.search("row 2: .* annotation 72 has no bbox", details[1])


@pytest.mark.parametrize("is_elsewhere", [False, True])
def test_coco_names_only_files_below_the_folder_of_its_images(is_elsewhere: bool, tmp_path: Path) -> None:
    source = as_coco(tmp_path, ROWS)
    content = json.loads(Path(source.uri).read_text())
    (tmp_path.parent / "secret.png").write_bytes(image_of(0))
    for image, name in zip(content["images"], ["./0.png", "../../secret.png", "/etc/secret.png"], strict=False):
        image["file_name"] = name
    Path(source.uri).write_text(json.dumps(content))
    if not is_elsewhere:
        source = source.model_copy(update={"uri": str(tmp_path)})
    listing = list_images(source)
    assert [image.key for image in images_of(listing)] == ["val2017/0.png", "val2017/3.png"]
    for rejection, row, name in zip(listing.rejections, (2, 3), ("../../secret.png", "/etc/secret.png"), strict=True):
        assert f"row {row}: file_name '{name}' is not below the folder of the images" in rejection.detail


def test_annotations_in_a_bucket_may_have_images_on_this_machine(tmp_path: Path, s3_bucket: str, s3_server: str):
    """The user names their folder, not the annotations."""
    data = Path(as_coco(tmp_path, ROWS).uri).read_bytes()
    s3_client(s3_server).put_object(Bucket=s3_bucket.removeprefix("s3://"), Key="a/of.json", Body=data)
    images = str(tmp_path / "val2017")
    source = SourceConfig(uri=f"{s3_bucket}/a/of.json", kind="coco", coco_images=images)
    manifest = build_source(source, tmp_path / "dataset")
    assert manifest.counts.accepted == len(ROWS)


def test_coco_names_what_is_missing(tmp_path: Path) -> None:
    source = as_coco(tmp_path, ROWS)
    file = Path(source.uri)
    (tmp_path / "val2017").rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="0.png") as missing:
        list_images(source)
    assert "source.coco_images" in missing.value.fix
    for wrong in ("nowhere", "annotations"):
        with pytest.raises(UsageError, match=f"source.coco_images = .*{wrong} has none of the images .* such as 0.png"):
            list_images(source.model_copy(update={"coco_images": str(tmp_path / wrong)}))
    found = list_images(source.model_copy(update={"coco_images": str(tmp_path / "elsewhere")}))
    assert [image.key for image in images_of(found)] == [f"elsewhere/{number}.png" for number in range(len(ROWS))]
    for content, problem in (({"images": []}, "no list annotations and categories"), ([], "no list images")):
        file.write_text(json.dumps(content))
        with pytest.raises(UsageError, match=problem):
            list_images(source)
    file.write_text("{")
    with pytest.raises(IntegrityError, match="does not parse"):
        list_images(source)
