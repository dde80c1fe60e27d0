"""Annotation files of COCO: the images that they name, in which folder, and what is wrong with them."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources.coco_file import read_coco
from shardmill.errors import IntegrityError, UsageError
from tests.etl.building import build_source, images_of, list_images
from tests.etl.test_box_sources import ROWS, as_coco, image_of
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


def test_annotations_in_a_bucket_may_have_images_on_this_machine(
    tmp_path: Path, s3_bucket: str, s3_server: str
) -> None:
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
