"""Labels that are no single class: several classes, a number, a vector; equal in every kind of source and format."""

from __future__ import annotations

import csv
import json
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, FeatureList, encode_example
from shardmill.formats.tfrecord import frame
from shardmill.loader.reader import read_split
from tests.etl.building import images_of, list_images
from tests.etl.extra_columns import build, stored, write_files
from tests.etl.source_files import add_member, picture

NAMES = ("cat", "dog", "owl")
LABELS: dict[str, list[Any]] = {
    "multi_label": [[name for place, name in enumerate(NAMES) if number >> place & 1] for number in range(16)],
    "float": [number / 8 - 1 for number in range(16)],
    "float_vector": [[number / 4, 0.5, -2.0] for number in range(16)],
}
EVERY_KIND = pytest.mark.parametrize("kind", LABELS)


def as_csv(folder: Path, kind: str, labels: list[Any]) -> SourceConfig:
    write_files(folder, len(labels))
    with open(folder / "table.csv", "w", newline="") as out:
        csv.writer(out).writerows([("uri", "label"), *((f"{n:03d}.png", json.dumps(v)) for n, v in enumerate(labels))])
    return SourceConfig(uri=str(folder / "table.csv"), kind="table", label_kind=kind)  # pyright: ignore


def as_parquet(folder: Path, kind: str, labels: list[Any]) -> SourceConfig:
    images = [picture(number) for number in range(len(labels))]
    pq.write_table(pa.table({"image": images, "labels": labels}), folder / "a.parquet")
    return SourceConfig(uri=str(folder / "a.parquet"), kind="parquet", label_kind=kind)  # pyright: ignore


def as_tar(folder: Path, kind: str, labels: list[Any]) -> SourceConfig:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, label in enumerate(labels):
            add_member(tar, f"{number:03d}.png", picture(number))
            add_member(tar, f"{number:03d}.json", json.dumps({"y": label}).encode())
    return SourceConfig(uri=str(folder / "a.tar"), kind="webdataset", label_kind=kind, label_field="json.y")  # pyright: ignore


def as_records(folder: Path, kind: str, labels: list[Any]) -> SourceConfig:
    with open(folder / "a.tfrecord", "wb") as out:
        for number, label in enumerate(labels):
            values = label if isinstance(label, list) else [label]
            feature = FeatureList(FLOAT_LIST, values)
            if kind == "multi_label":
                feature = FeatureList(BYTES_LIST, [name.encode() for name in values])
            out.write(frame(encode_example({"image": picture(number), "label": feature})))
    return SourceConfig(uri=str(folder / "a.tfrecord"), kind="tfrecord", label_kind=kind)  # pyright: ignore


def batch_labels(folder: Path, format_name: str) -> dict[int, list[float] | float]:
    """Sample id -> label, from the batches of all splits."""
    dataset = open_dataset(str(folder))
    batches = [
        batch
        for split in dataset.manifest.splits
        for batch in read_split(dataset, split, batch_size=6, format=format_name)
    ]
    assert all(batch.labels_N.dtype == np.float32 and len(batch.labels_N) == 6 for batch in batches)
    return {
        sample_id: label
        for batch in batches
        for sample_id, label in zip(batch.sample_ids_N.tolist(), batch.labels_N.tolist(), strict=True)
        if sample_id
    }


@EVERY_KIND
@pytest.mark.parametrize("writer", [as_csv, as_parquet, as_tar, as_records])
def test_labels_of_every_kind_reach_the_batches(tmp_path: Path, kind: str, writer: Callable):
    source = writer(tmp_path, kind, LABELS[kind])
    manifest = build(source, tmp_path / "dataset").manifest
    types = {"multi_label": "list<int64>", "float": "float32", "float_vector": "float32[3]"}
    assert manifest.columns["label"] == types[kind] and manifest.counts.accepted == 16
    rows = stored(tmp_path / "dataset")
    keys = sorted(rows, key=lambda key: int(key.rpartition("\0")[2].partition(".")[0]))
    expected = [
        [NAMES.index(name) for name in label] if kind == "multi_label" else label for label in LABELS[kind]
    ]  # fmt: skip
    assert [rows[key]["label"] for key in keys] == expected
    multi_hot = (
        [[float(number in label) for number in range(3)] for label in expected] if kind == "multi_label" else expected
    )
    for name in manifest.formats:
        assert sorted(map(str, batch_labels(tmp_path / "dataset", name).values())) == sorted(map(str, multi_hot))
    if kind == "multi_label":
        assert manifest.class_names == NAMES
        counts = np.sum([split.class_counts for split in manifest.splits.values()], axis=0)
        times = Counter(name for names in LABELS[kind] for name in names)
        assert counts.tolist() == [times[name] for name in NAMES]
    else:
        assert manifest.class_names == ()


@EVERY_KIND
def test_a_changed_label_alone_changes_its_row_and_no_other(tmp_path: Path, kind: str):
    build(as_csv(tmp_path, kind, LABELS[kind]), tmp_path / "dataset")
    labels = [*LABELS[kind][:-1], LABELS[kind][0] if kind != "multi_label" else ["ant"]]
    source = as_csv(tmp_path, kind, labels)
    child, full = build(source, tmp_path / "dataset"), build(source, tmp_path / "full")
    assert (child.manifest.operation, child.num_images_read) == ("incremental", 1)
    assert child.manifest.content_digest == full.manifest.content_digest
    assert kind != "multi_label" or child.manifest.class_names == (*NAMES, "ant")
    stored(tmp_path / "dataset")


@pytest.mark.parametrize(
    ("kind", "texts", "problem"),
    [
        ("float", ["1", "", "x", "NaN"], {3: "no label", 4: "label = 'x' is no float32", 5: "not finite"}),
        ("float_vector", ["[1,2]", "[1]", "3", "[]"], {3: "a label of 1 numbers, expected 2"}),
        ("multi_label", ["a|b", "", "[1]", "[]", "a|.."], {3: "no label", 6: "'..' is no class name"}),
    ],
)  # fmt: skip
def test_a_label_of_another_kind_refuses_its_row(tmp_path: Path, kind: str, texts: list[str], problem: dict[int, str]):
    lines = [("uri", "label"), ("first.png", {"float": "0", "float_vector": "[0,0]", "multi_label": "b"}[kind])]
    with open(tmp_path / "table.csv", "w", newline="") as out:
        csv.writer(out).writerows([*lines, *((f"{place}.png", text) for place, text in enumerate(texts))])
    listing = list_images(SourceConfig(uri=str(tmp_path / "table.csv"), kind="table", label_kind=kind))  # pyright: ignore
    found = {int(each.key.partition("\0")[2]): each.detail.partition(": ")[2] for each in listing.rejections}
    assert problem.items() <= found.items()
    assert kind != "multi_label" or listing.class_names == ("1", "a", "b")


@pytest.mark.parametrize("is_old", [False, True])
def test_hugging_faces_lists_of_class_labels_have_their_names(tmp_path: Path, is_old: bool):
    element = {"names": ["a", "b"], "_type": "ClassLabel"}
    feature = [element] if is_old else {"feature": element, "_type": "List"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"labels": feature}}})}
    table = pa.table({"image": [picture(n) for n in range(4)], "labels": [[1, 0], [], [1], [2]]})
    pq.write_table(table.replace_schema_metadata(metadata), tmp_path / "a.parquet")
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.parquet"), kind="parquet", label_kind="multi_label"))
    assert [json.loads(image.extra)["label"] for image in images_of(listing)] == [["a", "b"], [], ["b"]]
    assert [each.detail for each in listing.rejections] == ["row 3: no label"]


def test_a_label_map_holds_for_several_classes_too(tmp_path: Path):
    source = as_csv(tmp_path, "multi_label", LABELS["multi_label"])
    manifest = build(source, tmp_path / "dataset", label_map=("owl", "cat")).manifest
    assert manifest.class_names == ("owl", "cat")
    assert manifest.counts.by_reason == {"unknown_class": 8}


@EVERY_KIND
def test_a_source_without_such_labels_is_an_error_before_any_work(tmp_path: Path, kind: str):
    write_files(tmp_path / "images", 0)
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_bytes(picture(1))
    source = SourceConfig(uri=str(tmp_path / "images"), label_kind=kind)  # pyright: ignore
    with pytest.raises(UsageError, match="no input of .* has such a label"):
        build(source, tmp_path / "dataset")
