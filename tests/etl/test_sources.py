"""Every kind of source gives the same images from the same pile, through the whole ETL."""

from __future__ import annotations

import csv
import json
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import write_deltalake

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from etl.units.read_source import check_source, in_reading_order
from shardmill.dataset.open import open_dataset
from shardmill.errors import StorageError
from shardmill.formats.tf_example import encode_example
from shardmill.formats.tfrecord import frame
from tests.cifar_files import records
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import add_member
from tests.lab.datasets import write_images

Files = list[tuple[Path, str]]
"""Image files with their classes."""


def as_folders(folder: Path, files: Files) -> str:
    return str(files[0][0].parent.parent)


def as_table(folder: Path, files: Files) -> str:
    with open(folder / "table.csv", "w", newline="") as out:
        csv.writer(out).writerows([("uri", "label"), *files])
    return str(folder / "table.csv")


def as_tars(folder: Path, files: Files) -> str:
    """Two shards, one of them packed."""
    (folder / "shards").mkdir()
    for name, mode, some in (("0.tar", "w", files[::2]), ("1.tar.gz", "w:gz", files[1::2])):
        with tarfile.open(folder / "shards" / name, mode) as tar:  # pyright: ignore  a mode of two
            for file, label in some:
                add_member(tar, f"{file.stem}.cls", label.encode())
                add_member(tar, f"{file.stem}.png", file.read_bytes())
    return str(folder / "shards")


def as_parquet(folder: Path, files: Files) -> str:
    """As Hugging Face's `save_to_disk` and `push_to_hub` write it: a struct, numbers for classes, small row groups."""
    names = sorted({label for _, label in files})
    feature = {"names": names, "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature, "image": {"_type": "Image"}}}})}
    rows = [
        {"image": {"bytes": file.read_bytes(), "path": file.name}, "label": names.index(label)} for file, label in files
    ]
    (folder / "rows").mkdir()
    table = pa.Table.from_pylist(rows).replace_schema_metadata(metadata)
    for number, part in enumerate((table.slice(0, 90), table.slice(90))):
        pq.write_table(part, folder / "rows" / f"{number:04d}.parquet", row_group_size=20)
    return str(folder / "rows")


def as_zip(folder: Path, files: Files) -> str:
    with zipfile.ZipFile(folder / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for place, (file, label) in enumerate(files):
            kind = zipfile.ZIP_STORED if place % 2 else zipfile.ZIP_DEFLATED
            archive.write(file, f"pile/{label}/{file.name}", kind)
    return str(folder / "a.zip")


def as_tfrecords(folder: Path, files: Files) -> str:
    (folder / "records").mkdir()
    for number, some in enumerate((files[::2], files[1::2])):
        records = [
            frame(encode_example({"image/encoded": file.read_bytes(), "image/class/text": label.encode()}))
            for file, label in some
        ]
        (folder / "records" / f"x.tfrecord-{number:05d}-of-00002").write_bytes(b"".join(records))
    return str(folder / "records")


def as_idx(folder: Path, files: Files) -> str:
    (folder / "idx").mkdir()
    pixels = np.stack([cv2.imread(str(file)) for file, _ in files])[..., ::-1]
    labels = np.array([int(label[-1]) for _, label in files], np.uint8)
    for name, items in (("images-idx4", pixels), ("labels-idx1", labels)):
        header = struct.pack(f">HBB{items.ndim}I", 0, 8, items.ndim, *items.shape)
        (folder / "idx" / f"train-{name}-ubyte").write_bytes(header + items.tobytes())
    return str(folder / "idx")


def as_coco(folder: Path, files: Files) -> str:
    """One box in each image, of the image's class."""
    names = sorted({label for _, label in files})
    boxes = enumerate(label for _, label in files)
    content = {
        "images": [{"id": n, "file_name": file.relative_to(folder).as_posix()} for n, (file, _) in enumerate(files)],
        "categories": [{"id": number, "name": name} for number, name in enumerate(names)],
        "annotations": [{"image_id": n, "category_id": names.index(label), "bbox": [0, 0, 9, 9]} for n, label in boxes],
    }
    (folder / "instances.json").write_text(json.dumps(content))
    return str(folder / "instances.json")


def as_delta(folder: Path, files: Files) -> str:
    """Two commits; classes are folders that the log alone names."""
    for some in (files[::2], files[1::2]):
        rows = [{"image": file.read_bytes(), "label": label} for file, label in some]
        table = pa.Table.from_pylist(rows)
        write_deltalake(str(folder / "delta"), table, mode="append", partition_by=["label"])
    return str(folder / "delta")


def as_cifar(folder: Path, files: Files) -> str:
    pixels = np.stack([cv2.resize(cv2.imread(str(file)), (32, 32)) for file, _ in files])[..., ::-1]
    labels = np.array([int(label[-1]) for _, label in files])
    (folder / "cifar").mkdir()
    data = records(pixels.transpose(0, 3, 1, 2).reshape(len(files), -1), labels)
    (folder / "cifar" / "data_batch_1.bin").write_bytes(data)
    return str(folder / "cifar")


def as_parts(folder: Path, files: Files) -> SourceConfig:
    """Half of the images in a folder tree of their own, half in a ZIP archive."""
    for file, label in files[::2]:
        (folder / "half" / label).mkdir(parents=True, exist_ok=True)
        (folder / "half" / label / file.name).write_bytes(file.read_bytes())
    parts = {
        "tree": SourceConfig(uri=str(folder / "half")),
        "archive": SourceConfig(uri=as_zip(folder, files[1::2]), kind="zip"),
    }
    return SourceConfig(kind="several", parts=parts)


WRITERS: dict[str, Callable[[Path, Files], str]] = {
    "folders": as_folders,
    "table": as_table,
    "webdataset": as_tars,
    "parquet": as_parquet,
    "idx": as_idx,
    "cifar": as_cifar,
    "tfrecord": as_tfrecords,
    "zip": as_zip,
    "coco": as_coco,
    "delta": as_delta,
}
# Pixels without files of their own cannot be the bytes that the other kinds read.
HOLDS_FILES = [kind for kind in SOURCES if kind not in ("idx", "cifar")]


def config_of(kind: str, folder: Path, files: Files) -> SourceConfig:
    return as_parts(folder, files) if kind == "several" else SourceConfig(uri=WRITERS[kind](folder, files), kind=kind)


EVERY_KIND = pytest.mark.parametrize("kind", SOURCES)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    write_images(tmp_path / "images", num_images=150)
    return [(file, file.parent.name) for file in sorted((tmp_path / "images").rglob("*.png"))]


def contents(dataset: str) -> set[tuple[str, str, int]]:
    """(split, SHA-256 of the source, class or the only one of several) of every row."""
    opened = open_dataset(dataset)
    return {
        (split, row["source_sha256"], row["label"][0] if isinstance(row["label"], list) else row["label"])
        for split in opened.manifest.counts.by_split
        for file in opened.files(split, "parquet")
        for row in pq.read_table(file, columns=["source_sha256", "label"]).to_pylist()
    }


@pytest.mark.parametrize("kind", HOLDS_FILES)
def test_every_kind_gives_the_same_samples(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    assert kind == "several" or recognise(config.uri) == kind
    manifest = build_source(config, tmp_path / "dataset")
    build_source(SourceConfig(uri=str(tmp_path / "images")), tmp_path / "of_folder")
    assert (manifest.counts.accepted, manifest.counts.rejected) == (150, 0)
    assert manifest.class_names == ("class_0", "class_1", "class_2")
    assert contents(str(tmp_path / "dataset")) == contents(str(tmp_path / "of_folder"))


@EVERY_KIND
def test_every_kind_reads_what_it_listed_in_any_order(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    source = SOURCES[kind](config)
    images = images_of(list_images(config, max_source_bytes=100_000))
    forward = {image.key: source.open(100_000).read(image) for image in in_reading_order(images)}
    one_reader = source.open(100_000)
    assert {image.key: one_reader.read(image) for image in reversed(images)} == forward
    if kind in HOLDS_FILES:
        assert set(forward.values()) == {file.read_bytes() for file, _ in files}


@EVERY_KIND
def test_every_kind_knows_when_its_files_are_gone(kind: str, files: Files, tmp_path: Path):
    config = config_of(kind, tmp_path, files)
    reader = SOURCES[kind](config).open(100_000)
    probes = list_images(config, max_source_bytes=100_000).probes
    check_source(reader, config.uri, probes)
    for folder in [path for path in tmp_path.iterdir() if path.is_dir()]:
        folder.rename(folder.with_name(f"{folder.name}-moved"))
    for file in [path for path in tmp_path.iterdir() if path.is_file()]:
        file.rename(file.with_name(f"{file.name}-moved"))
    with pytest.raises(StorageError, match="does not see the source"):
        check_source(reader, config.uri, probes)
