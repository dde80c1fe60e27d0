"""Images with boxes and masks that show where they are, and sources of them."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import shardmill
from etl.config import SourceConfig
from shardmill.dataset.manifest import Manifest

ROWS: list[dict[str, Any]] = [
    {"boxes": [[14, 2, 22, 10], [20, 4, 39, 12]], "names": ["cat", "dog"]},
    {"boxes": [[18.5, 5, 22.25, 9]], "names": ["dog"]},
    {"boxes": [], "names": []},
    {"boxes": [[0, 0, 3, 3]], "names": ["bird"]},
]

STORED = [
    ([[3.2, 1.6, 9.6, 8.0], [8.0, 3.2, 16.0, 9.6]], ["cat", "dog"]),
    ([[6.8, 4.0, 9.8, 7.2]], ["dog"]),
    ([], []),
    ([], []),
]

BOXES = {"field": "boxes", "labels_field": "names"}


def as_jsonl(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    write_images(folder, len(rows))
    lines = (json.dumps({"uri": f"{number}.png", **row}) for number, row in enumerate(rows))
    (folder / "t.jsonl").write_text("\n".join(lines))
    return SourceConfig.model_validate({"uri": str(folder / "t.jsonl"), "kind": "table", "boxes": BOXES})


def as_coco(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    """In the layout of COCO itself: a folder of annotations beside that of the images."""
    (folder / "val2017").mkdir(exist_ok=True, parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    write_images(folder / "val2017", len(rows))
    ids = {"bird": 16, "cat": 17, "dog": 18, "none": 1}
    annotations = [
        {
            "id": 7,
            "image_id": number,
            "category_id": ids[name],
            "bbox": [x0, y0, x1 - x0, y1 - y0],
            "segmentation": [[1]],
        }
        for number, row in enumerate(rows)
        for (x0, y0, x1, y1), name in zip(row["boxes"], row["names"], strict=True)
    ]
    crowd = {"id": 8, "image_id": 0, "category_id": 17, "bbox": [0, 0, 40, 20], "iscrowd": 1}
    content = {
        "images": [{"id": n, "file_name": f"{n}.png", "width": 40, "height": 20} for n in range(len(rows))],
        "annotations": [*annotations, crowd],
        "categories": [{"id": number, "name": name} for name, number in ids.items()],
    }
    file = folder / "annotations" / "instances_val2017.json"
    file.write_text(json.dumps(content))
    return SourceConfig(uri=str(file), kind="coco")


def write_images(folder: Path, count: int) -> None:
    for number in range(count):
        (folder / f"{number}.png").write_bytes(image_of(number))


def image_of(number: int) -> bytes:
    return drawn(20, 40, [number, 0, number + 5, 5])


def stored_in(manifest: Manifest, dataset: Path, format: str) -> list[tuple[list[list[float]], list[str]]]:
    """Boxes and the names of their classes, in the order of the sources."""
    opened = shardmill.open_dataset(f"{dataset}@{manifest.version}")
    samples = [each for split in manifest.splits for each in opened.samples(split, format=format)]
    samples.sort(key=lambda sample: sample.source.rpartition("/")[2].rpartition("\0")[2])
    return [
        (
            np.round(each["boxes"].sides.astype(float), 4).tolist(),
            [opened.class_names[label] for label in each["boxes"].labels],
        )
        for each in samples
    ]


SHAPES = ((90, 160), (160, 90), (700, 400), (20, 31))

MODES = ("crop", "pad", "stretch", "shorter", "longer", "none")

RED, GRAY = (250, 10, 10), (128, 128, 128)


def drawn(height: int, width: int, box: Sequence[int], orientation: int = 1, form: str = "PNG") -> bytes:
    """An upright picture of this size with a red rectangle, stored as EXIF's orientation asks for."""
    pixels_HWC = np.full((height, width, 3), GRAY, np.uint8)
    x0, y0, x1, y1 = box
    pixels_HWC[y0:y1, x0:x1] = RED
    # The inverse of turning upright: flips first, then the exchange of the sides.
    pixels_HWC = pixels_HWC[:: -1 if orientation in (3, 4, 7, 8) else 1, :: -1 if orientation in (2, 3, 6, 7) else 1]
    if orientation >= 5:
        pixels_HWC = pixels_HWC.transpose(1, 0, 2)
    image, exif, out = Image.fromarray(np.ascontiguousarray(pixels_HWC)), Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(out, form, exif=exif, **({"quality": 98, "subsampling": 0} if form == "JPEG" else {}))
    return out.getvalue()


def found_in(image_HWC: np.ndarray) -> tuple[int, int, int, int] | None:
    """Where pixels are more red than gray: x0, y0, x1, y1."""
    is_red_HW = image_HWC[..., 0].astype(int) - image_HWC[..., 1] > (RED[0] - RED[1]) // 2
    rows, columns = np.flatnonzero(is_red_HW.any(1)), np.flatnonzero(is_red_HW.any(0))
    return (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1) if len(rows) else None


def mask_of(height: int, width: int, box: list[int], value: int = 7, orientation: int = 1) -> bytes:
    """The mask of `drawn`: one value where its rectangle is, 0 elsewhere."""
    with Image.open(io.BytesIO(drawn(height, width, box, orientation))) as picture:
        is_red_HW = np.asarray(picture)[..., 0] == RED[0]
    return as_png(Image.fromarray(np.where(is_red_HW, value, 0).astype(np.uint8)))


def as_png(image: Image.Image, **options: object) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def places_of(mask_HW: np.ndarray) -> list[int]:
    rows, columns = np.flatnonzero(mask_HW.any(1)), np.flatnonzero(mask_HW.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


NUM_IMAGES = 9


def as_table(folder: Path, value: int = 7) -> SourceConfig:
    (folder / "masks").mkdir(exist_ok=True)
    rows = []
    for number in range(NUM_IMAGES):
        box = [10 + number, 8, 30 + number, 20 + number]
        (folder / f"{number}.png").write_bytes(drawn(64, 64, box))
        (folder / "masks" / f"{number}-{value}.png").write_bytes(mask_of(64, 64, box, value))
        rows.append({
            "uri": f"{number}.png", "outline": f"masks/{number}-{value}.png", "label": "red", "split": "train",
            "objects": [box],
        })  # fmt: skip
    (folder / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    boxes = {"field": "objects"}
    return SourceConfig.model_validate(
        {"uri": str(folder / "t.jsonl"), "kind": "table", "mask_field": "outline", "boxes": boxes}
    )


def rectangle(x0: float, y0: float, x1: float, y1: float) -> list[float]:
    return [x0, y0, x1, y0, x1, y1, x0, y1]


def with_masks(folder: Path, segmentations: dict[int, Any]) -> SourceConfig:
    """`as_coco` with the segmentation of each annotation: its box, or of those that are named by number another one."""
    source = as_coco(folder, ROWS)
    content = json.loads(Path(source.uri).read_text())
    for number, each in enumerate(content["annotations"]):
        x, y, width, height = each["bbox"]
        each["segmentation"] = segmentations.get(number, [rectangle(x, y, x + width, y + height)])
    Path(source.uri).write_text(json.dumps(content))
    return source.model_copy(update={"coco_masks": True})
