"""The recipes of docs/sources.md: their tables list every image with its class and split."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

from etl.config import SourceConfig, SplitFractions
from etl.listing.list_source import list_source
from etl.listing.splits import WithGroupSplits
from etl.sources import SOURCES
from shardmill.jobs.observer import SilentObserver
from tests.etl.building import images_of, list_images

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_table.py"
spec = importlib.util.spec_from_file_location("make_table", SCRIPT)
assert spec is not None and spec.loader is not None
make_table = importlib.util.module_from_spec(spec)
sys.modules["make_table"] = make_table
spec.loader.exec_module(make_table)


def listed(table: Path) -> dict[str, tuple[str | None, str | None]]:
    listing = list_images(SourceConfig(uri=str(table), kind="table"))
    assert not listing.rejections
    return {image.key: (image.label, image.split) for image in images_of(listing)}


def test_coco_gives_each_image_the_class_of_its_largest_object(tmp_path: Path):
    annotations = {
        "images": [{"id": number, "file_name": f"{number:012d}.jpg"} for number in (1, 2, 3)],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
        "annotations": [
            {"image_id": 1, "category_id": 18, "area": 10.0},
            {"image_id": 1, "category_id": 17, "area": 90.5},
            {"image_id": 2, "category_id": 18, "area": 5.0},
        ],
    }
    (tmp_path / "instances.json").write_text(json.dumps(annotations))
    words = ["coco", str(tmp_path / "instances.json"), str(tmp_path / "val2017"), str(tmp_path / "t.csv")]
    make_table.main([*words, "--split", "validation"])
    assert listed(tmp_path / "t.csv") == {
        "val2017/000000000001.jpg": ("cat", "validation"),
        "val2017/000000000002.jpg": ("dog", "validation"),
    }


@pytest.mark.parametrize("from_devkit", [False, True])
def test_imagenet_gives_validation_images_the_synset_of_the_ground_truth(from_devkit: bool, tmp_path: Path):
    names = [
        "train/n02/a.JPEG",
        "train/n01/b.JPEG",
        "val/ILSVRC2012_val_00000001.JPEG",
        "val/ILSVRC2012_val_00000002.JPEG",
    ]
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "solution.csv").write_text(
        "ImageId,PredictionString\nILSVRC2012_val_00000002,n01 1 2 3 4 n01 5 6\nILSVRC2012_val_00000001,n02 1 2\n"
    )
    (tmp_path / "truth.txt").write_text("1\n2\n")
    (tmp_path / "synsets.txt").write_text("n02\nn01\n")
    truth = ["--solution", str(tmp_path / "solution.csv")]
    if from_devkit:
        truth = ["--ground-truth", str(tmp_path / "truth.txt"), "--synsets", str(tmp_path / "synsets.txt")]
    make_table.main(["imagenet", str(tmp_path), str(tmp_path / "t.csv"), *truth])
    assert listed(tmp_path / "t.csv") == {
        names[0]: ("n02", "train"), names[1]: ("n01", "train"), names[2]: ("n02", "validation"),
        names[3]: ("n01", "validation"),
    }  # fmt: skip
    (tmp_path / "val" / "ILSVRC2012_val_00000003.JPEG").write_bytes(b"x")
    with pytest.raises(SystemExit, match="ILSVRC2012_val_00000003.JPEG is not in the ground truth"):
        make_table.main(["imagenet", str(tmp_path), str(tmp_path / "t.csv"), *truth])


def test_all_frames_of_a_video_are_in_one_split(tmp_path: Path):
    for video in range(20):
        for frame in range(5):
            file = tmp_path / "frames" / ("run", "walk")[video % 2] / f"{video // 2:02d}" / f"{frame:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x")
    make_table.main(["frames", str(tmp_path / "frames"), str(tmp_path / "frames.csv")])
    split_of: dict[str, set[str | None]] = {}
    config = SourceConfig(uri=str(tmp_path / "frames.csv"), kind="table")
    grouped = WithGroupSplits(SOURCES[config.kind](config), SplitFractions())
    listing = list_source(grouped, seed=0, max_source_bytes=1_000, observer=SilentObserver())
    for image in images_of(listing):
        video = image.key.rpartition("/")[0]
        assert image.label == video.split("/")[1]
        split_of.setdefault(video, set()).add(image.split)
    # Equal names in two classes are two videos.
    assert len(split_of) == 20 and all(len(splits) == 1 for splits in split_of.values())
    assert len(set.union(*split_of.values())) > 1
