"""Tables for `source.kind = "table"` from what is no table: COCO's annotations, ImageNet's validation split, and
frames of videos.

    python examples/make_table.py coco instances_val2017.json val2017 val.csv --split validation
    python examples/make_table.py imagenet ILSVRC/Data/CLS-LOC --solution LOC_val_solution.csv imagenet.csv
    python examples/make_table.py imagenet FOLDER --ground-truth ILSVRC2012_validation_ground_truth.txt \
        --synsets synsets.txt imagenet.csv
    python examples/make_table.py frames frames frames.csv

The images must lie below the table's folder. Then: shardmill run val.csv
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


class Row(NamedTuple):
    """One image of the table."""

    path: Path
    label: str
    split: str
    group: str = ""


def coco_rows(annotations: Path, images: Path, split: str) -> Iterator[Row]:
    """Each image that has an annotation, with the category of its largest object (of equals, the first by name)."""
    data = json.loads(annotations.read_text(encoding="utf-8"))
    names = {category["id"]: category["name"] for category in data["categories"]}
    largest: dict[int, tuple[float, str]] = {}
    for each in data["annotations"]:
        candidate = (-each.get("area", 0.0), names[each["category_id"]])
        largest[each["image_id"]] = min(largest.get(each["image_id"], candidate), candidate)
    for image in data["images"]:
        if image["id"] in largest:
            yield Row(images / image["file_name"], largest[image["id"]][1], split)


def imagenet_rows(root: Path, validation: dict[str, str]) -> Iterator[Row]:
    """`train/SYNSET/*.JPEG`, and `val/*.JPEG` with the synset that `validation` gives each name (without suffix)."""
    for folder in sorted(path for path in (root / "train").iterdir() if path.is_dir()):
        for file in sorted(folder.iterdir()):
            yield Row(file, folder.name, "train")
    for file in sorted((root / "val").iterdir()):
        if file.stem not in validation:
            sys.exit(f"{file} is not in the ground truth; expected a synset for each image of {root / 'val'}")
        yield Row(file, validation[file.stem], "validation")


def frame_rows(root: Path) -> Iterator[Row]:
    """`CLASS/VIDEO/*.jpg`: a video is a group, as its frames are nearly equal and belong into one split."""
    for video in sorted(path for path in root.glob("*/*") if path.is_dir()):
        for frame in sorted(video.iterdir()):
            yield Row(frame, video.parent.name, "", f"{video.parent.name}/{video.name}")


def kaggle_solution(file: Path) -> dict[str, str]:
    """`LOC_val_solution.csv`: image id, then synset and boxes."""
    with open(file, newline="", encoding="utf-8") as rows:
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in csv.DictReader(rows)}


def devkit_ground_truth(numbers: Path, synsets: Path) -> dict[str, str]:
    """The devkit's list: line i has the class (from 1) of image i; `synsets` has a synset in line k for class k."""
    names = synsets.read_text(encoding="utf-8").split()
    classes = [int(line) for line in numbers.read_text(encoding="utf-8").split()]
    return {f"ILSVRC2012_val_{place:08d}": names[number - 1] for place, number in enumerate(classes, start=1)}


def write_table(rows: Iterator[Row], table: Path) -> int:
    """Write `uri,label,split,group` with URIs relative to the table; returns the number of rows."""
    num_rows = 0
    with open(table, "w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out)
        writer.writerow(("uri", "label", "split", "group"))
        for row in rows:
            num_rows += 1
            uri = Path(os.path.relpath(row.path, table.parent)).as_posix()
            writer.writerow((uri, row.label, row.split, row.group))
    return num_rows


def main(words: list[str]) -> None:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    coco = kinds.add_parser("coco")
    coco.add_argument("annotations", type=Path)
    coco.add_argument("images", type=Path)
    coco.add_argument("--split", default="")
    imagenet = kinds.add_parser("imagenet")
    imagenet.add_argument("images", type=Path, help="holds train/ and val/")
    imagenet.add_argument("--solution", type=Path, help="Kaggle's LOC_val_solution.csv")
    imagenet.add_argument("--ground-truth", type=Path, help="the devkit's list of numbers")
    imagenet.add_argument("--synsets", type=Path, help="the synset of each of these numbers, one a line")
    frames = kinds.add_parser("frames")
    frames.add_argument("images", type=Path, help="holds CLASS/VIDEO/*.jpg")
    for kind in (coco, imagenet, frames):
        kind.add_argument("table", type=Path)
    given = parser.parse_args(words)
    if given.kind == "coco":
        rows = coco_rows(given.annotations, given.images, given.split)
    elif given.kind == "frames":
        rows = frame_rows(given.images)
    elif given.solution:
        rows = imagenet_rows(given.images, kaggle_solution(given.solution))
    elif given.ground_truth and given.synsets:
        rows = imagenet_rows(given.images, devkit_ground_truth(given.ground_truth, given.synsets))
    else:
        parser.error("imagenet needs --solution, or --ground-truth and --synsets")
    sys.stderr.write(f"{write_table(rows, given.table)} rows in {given.table}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
