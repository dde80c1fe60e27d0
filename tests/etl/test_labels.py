"""Labels: where they come from, of which kind, by which map, and how they are corrected."""

from __future__ import annotations

import csv
import json
import tarfile
import zipfile
from collections import Counter
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.checks.listing import inferred_warnings
from etl.config import SourceConfig
from etl.listing.labels import read_label_map
from etl.plan import plan_build
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.inspection import describe
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import RejectLimitExceeded, UsageError
from shardmill.formats.tf_example import BYTES_LIST, FLOAT_LIST, FeatureList, encode_example
from shardmill.formats.tfrecord import frame
from shardmill.loader.metadata import read_metadata
from shardmill.loader.reader import read_split
from shardmill.words import to_cell
from tests.etl.building import Recorder, images_of, list_images
from tests.etl.incremental import build, build_from, opened, stored, tree_for, write_files
from tests.etl.source_files import add_member, picture
from tests.lab.datasets import write_images


def test_every_kind_of_file_gives_the_same_map(tmp_path: Path):
    names = ("dog", "cat", "ant")
    (tmp_path / "map.txt").write_text("dog\n cat \n\nant\n")
    (tmp_path / "list.json").write_text(json.dumps(names))
    (tmp_path / "numbers.json").write_text(json.dumps({"ant": 2, "cat": 1, "dog": 0}))
    for given in (names, *(str(tmp_path / name) for name in ("map.txt", "list.json", "numbers.json"))):
        assert read_label_map(given) == names
    assert read_label_map(()) == ()


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("map.txt", None, "no such file"),
        ("map.txt", "\n", "contains no class"),
        ("map.txt", "cat\ndog\ncat\n", "'cat' twice"),
        ("map.txt", "cat\n..\n", "'..', which is not a class name"),
        ("map.json", "{", "map.json"),
        ("map.json", '{"cat": 1, "dog": 2}', "from 0 to 1"),
        ("map.json", '[["cat"]]', "no class names"),
    ],
)
def test_a_file_that_is_no_map_is_refused_with_what_was_expected(tmp_path, name: str, text: str | None, says: str):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=says):
        read_label_map(str(tmp_path / name))


def test_a_given_map_decides_the_numbers_and_other_classes_are_rejected(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    names = ("class_2", "nothing", "class_0")
    outcome = build(tmp_path, label_map=names)
    assert outcome.manifest.class_names == names
    assert set(outcome.manifest.counts.by_reason) == {"unknown_class"}
    totals = [sum(split.class_counts[number] for split in outcome.manifest.splits.values()) for number in range(3)]
    assert describe(opened(tmp_path))["empty_classes"] == ["nothing"]
    assert totals[1] == 0 and min(totals[0], totals[2]) > 0
    assert sum(totals) + outcome.manifest.counts.rejected == 30


def test_ten_thousand_classes_are_listed_in_order_and_empty_ones_counted(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    names = [f"class_{number}" for number in range(10_000)]
    (tmp_path / "table.csv").write_text("uri,label\n" + "".join(f"{name}.jpg,{name}\n" for name in names))
    tree = tree_for(tmp_path, source=SourceConfig(uri=f"{tmp_path}/table.csv", kind="table"))
    plan = plan_build(tree, run_id="r")
    assert plan.build.class_names == tuple(sorted(names))
    [few] = [warning for warning in inferred_warnings(plan) if "classes have fewer" in warning]
    assert few.endswith("(class_0: 1, class_1: 1, class_10: 1, class_100: 1, class_1000: 1 and 9995 more)")
    (tmp_path / "map.txt").write_text("\n".join(reversed(names)))
    manifest = build(tmp_path, label_map=str(tmp_path / "map.txt")).manifest
    counts = [sum(found) for found in zip(*(each.class_counts for each in manifest.splits.values()), strict=True)]
    assert counts == [0] * 9_997 + [10, 10, 10]
    assert manifest.empty_classes == tuple(reversed(names[3:]))
    verify_dataset(opened(tmp_path)).raise_if_failed()


def test_an_unknown_class_may_be_an_error_before_anything_is_read(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30)
    with pytest.raises(RejectLimitExceeded, match="class_1"):
        plan_build(tree_for(tmp_path, label_map=("class_0",), unknown_class="error"), run_id="r")


def test_a_map_that_grew_adds_what_it_had_refused_and_reads_nothing_else(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    first = build(tmp_path, label_map=("class_1", "class_0"), max_reject_fraction=0.9)
    names = ("class_1", "class_0", "class_2", "none_yet")
    grown = build(tmp_path, label_map=names)
    full = build(tmp_path, "other", label_map=names)
    assert grown.num_images_read == first.manifest.counts.rejected
    assert grown.manifest.operation == "incremental"
    assert grown.manifest.content_digest == full.manifest.content_digest
    assert build(tmp_path, label_map=names).skipped


@pytest.mark.parametrize("names", [("class_1", "class_0"), ("class_0",), ("class_0", "class_2", "class_1")])
def test_a_map_never_moves_a_class(tmp_path: Path, names: tuple[str, ...]):
    write_images(tmp_path / "images", num_images=30)
    build(tmp_path, label_map=("class_0", "class_1"), max_reject_fraction=0.9)
    with pytest.raises(UsageError, match="can only grow"):
        build(tmp_path, label_map=names, max_reject_fraction=0.9)


COLUMNS = {
    "one_hot": {"cat": [1, 0, 0, 1, 0, 0], "dog": [0, 1, 1, 0, 1, 1]},
    "one_hot of booleans": {"cat": [True, False] * 3, "dog": [False, True] * 3},
    "one_hot of floats": {"cat": [1.0, 0.0] * 3, "dog": [0.0, 1.0] * 3},
    "many at once": {name: [1, 0, 1, 0, 0, 1] for name in ("cat", "dog", "emu", "fox")},
    "minus one for none": {"smiling": [1, -1, -1, 1, 1, 1], "young": [-1, -1, 1, 1, 1, 1]},
    "a misspelt name": {"lable": ["cat", "dog"] * 3, "size": [1, 2, 3, 4, 5, 6]},
    "another name": {"fine_label": [0, 1] * 3, "size": [1, 2, 3, 4, 5, 6]},
    "in two words": {"imageClass": ["cat", "dog"] * 3, "size": [1, 2, 3, 4, 5, 6]},
    "the only other column": {"kind": ["cat", "dog"] * 3},
    "one of several columns": {"emotion": ["glad", "sad"] * 3, "age": [3, 4, 5, 6, 7, 8]},
    "beside a fold": {"level": [0, 1, 2] * 2, "fold": [1, 2] * 3},
    "in one letter": {"y": [0, 1] * 3, "w": [0.5, 1.5] * 3},
    "one_hot with images of none": {"cat": [1, 0, 0] * 2, "dog": [0, 1, 0] * 2, "age": [1, 2, 3, 4, 5, 6]},
}


def write(file: Path, columns: dict[str, list]) -> SourceConfig:
    """A table of names, or for `images.parquet` of images, with some more columns."""
    num_rows = len(next(iter(columns.values())))
    if file.name == "images.parquet":
        pq.write_table(pa.table({"image": [b"x"] * num_rows, **columns}), file)
        return SourceConfig(uri=str(file), kind="parquet")
    rows = pa.table({"uri": [f"{row}.jpg" for row in range(num_rows)], **columns})
    if file.suffix == ".parquet":
        pq.write_table(rows, file)
    elif file.suffix == ".jsonl":
        file.write_text("".join(json.dumps(row) + "\n" for row in rows.to_pylist()))
    else:
        lines = [rows.column_names, *(row.values() for row in rows.to_pylist())]
        file.write_text("".join(",".join(map(str, line)) + "\n" for line in lines))
    return SourceConfig(uri=str(file), kind="table")


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "images.parquet"])
@pytest.mark.parametrize("case", COLUMNS)
def test_labels_that_no_column_gives_end_the_build_unless_none_are_asked_for(case: str, name: str, tmp_path: Path):
    source = write(tmp_path / name, COLUMNS[case])
    with pytest.raises(UsageError, match=r"would have no labels, and .* seems to have some: ") as caught:
        list_images(source)
    assert any(repr(column) in str(caught.value) or column in str(caught.value) for column in COLUMNS[case])
    assert "source.label_field" in caught.value.fix and 'source.label_kind = "none"' in caught.value.fix
    unlabelled = list_images(source.model_copy(update={"label_kind": "none"}))
    assert (unlabelled.num_images, unlabelled.class_names) == (6, ())


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "images.parquet"])
def test_columns_that_are_no_labels_make_a_dataset_without_labels_as_before(name: str, tmp_path: Path):
    columns = {"caption": [f"text {row}" for row in range(6)], "width": [64, 32] * 3, "ok": [1] * 6}
    columns |= {"file_size": [9, 8] * 3, "fold": [1, 2] * 3, "score": [0.5, 0.25] * 3, "taken": ["2026-01-02"] * 6}
    listing = list_images(write(tmp_path / name, columns))
    assert (listing.num_images, listing.class_names, listing.warnings) == (6, (), ())


def test_columns_that_are_kept_beside_the_images_are_no_sign(tmp_path: Path):
    source = write(tmp_path / "t.csv", {"category": ["cat", "dog"] * 3})
    kept = source.model_copy(update={"extra_columns": ("category",)})
    assert list_images(kept).num_images == 6


def test_names_of_hugging_face_and_fields_in_a_struct_are_signs(tmp_path: Path):
    features = {"info": {"features": {"n": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    rows = pa.table({"image": [b"x"], "n": [0], "m": [5]})
    pq.write_table(
        rows.replace_schema_metadata({b"huggingface": json.dumps(features).encode()}), tmp_path / "a.parquet"
    )
    with pytest.raises(UsageError, match="a.parquet has 'n .ClassLabel.'"):
        list_images(SourceConfig(uri=str(tmp_path / "a.parquet"), kind="parquet"))
    objects = pa.array([[{"bbox": [0.0], "category": 3}]])
    pq.write_table(pa.table({"image": [b"x"], "objects": objects}), tmp_path / "b.parquet")
    with pytest.raises(UsageError, match="b.parquet has 'objects.category'"):
        list_images(SourceConfig(uri=str(tmp_path / "b.parquet"), kind="parquet"))


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_a_file_without_labels_beside_one_with_labels_ends_the_build(kind: str, tmp_path: Path):
    column = "image" if kind == "parquet" else "uri"
    values = [b"x", b"y"] if kind == "parquet" else ["a.jpg", "b.jpg"]
    pq.write_table(pa.table({column: values, "label": ["cat", "dog"]}), tmp_path / "train.parquet")
    more = [b"z"] if kind == "parquet" else ["c.jpg"]
    pq.write_table(pa.table({column: more, "split": ["test"]}), tmp_path / "test.parquet")
    source = SourceConfig(uri=str(tmp_path), kind=kind)
    with pytest.raises(UsageError, match=r"1 of 3 images of .* have no label, those of test"):
        list_images(source)
    assert list_images(source.model_copy(update={"label_kind": "none"})).num_images == 3


def test_a_folder_makes_a_dataset_without_labels_if_none_are_asked_for(tmp_path: Path):
    write_images(tmp_path, num_images=6)
    source = SourceConfig(uri=str(tmp_path), label_kind="none")
    assert {image.label for image in images_of(list_images(source, 10_000))} == {None}


def test_a_source_without_a_usable_input_says_why(tmp_path: Path):
    source = write(tmp_path / "t.csv", {"label": [""] * 6})
    with pytest.raises(
        UsageError, match=("all 6 inputs were rejected \\(6 bad_row, such as t.csv.*1: row 1: no label\\)")
    ):
        list_images(source)


def labels_of(source: SourceConfig) -> list[str | None]:
    """In the order of the rows; None for a row that is refused."""
    listing = list_images(source)
    assert {each.detail.partition(": ")[2] for each in listing.rejections} <= {"no label"}
    images = images_of(listing)
    found = {image.place + (source.kind == "parquet"): image.label for image in images}
    return [found.get(row) for row in range(1, listing.num_listed + 1)]


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 1, 0],
        [1.0, 0.0, 1.0, 0.0],
        ["1", "0", "1", "0"],
        ["1.0", "0.0", "1.", "0.00"],
        [" 1", "0 ", "1", "\t0"],
        [Decimal("1"), Decimal("0"), Decimal("1"), Decimal("0")],
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "images.parquet"])
def test_equal_labels_are_one_class_whatever_their_type(name: str, values: list, tmp_path: Path):
    if name == "t.jsonl" and isinstance(values[0], Decimal):
        values = list(map(int, values))
    assert labels_of(write(tmp_path / name, {"label": values})) == ["1", "0", "1", "0"]


def test_a_column_of_json_lines_may_mix_types_and_each_value_is_its_class(tmp_path: Path):
    values = ["1", '"1"', "1.0", '"1.0"', "null", "NaN", '"nan"', '" 1 "', '""', "1e0", "true", '"cat"']
    lines = "".join(f'{{"uri": "{row}.jpg", "label": {value}}}\n' for row, value in enumerate(values))
    (tmp_path / "t.jsonl").write_text(lines)
    found = labels_of(SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table"))
    assert found == ["1", "1", "1", "1", None, None, None, "1", None, "1", "true", "cat"]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()], ids=str)
@pytest.mark.parametrize("hole", [None, float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["t.parquet", "images.parquet"])
def test_a_hole_in_a_column_of_numbers_refuses_its_row_alone(
    name: str, hole: float | None, kind: pa.DataType, tmp_path: Path
):
    source = write(tmp_path / name, {"size": [1, 2, 3]})
    rows = pq.read_table(tmp_path / name).append_column("label", pa.array([1.0, hole, 2.0], kind))
    pq.write_table(rows, tmp_path / name)
    assert labels_of(source) == ["1", None, "2"]


@pytest.mark.parametrize("hole", ["", " ", "nan", "NaN", "-nan"])
@pytest.mark.parametrize("name", ["t.csv", "t.jsonl", "t.parquet", "images.parquet"])
def test_a_hole_in_a_column_of_texts_refuses_its_row_alone(name: str, hole: str, tmp_path: Path):
    assert labels_of(write(tmp_path / name, {"label": ["cat", hole, "dog"]})) == ["cat", None, "dog"]


def test_names_that_only_look_like_numbers_stay_as_they_are(tmp_path: Path):
    values = ["007", "1.5", "v1.0", "1.0.0", "True", "nano", "-1", "1e3"]
    assert labels_of(write(tmp_path / "t.csv", {"label": values})) == values


def test_numbers_that_are_no_classes_are_refused_with_the_kind_to_set(tmp_path: Path):
    for values in ([0.5, 1.0], [1e300, 1.0]):
        with pytest.raises(UsageError, match="the labels of t.parquet are double") as caught:
            list_images(write(tmp_path / "t.parquet", {"label": values}))
        assert "source.label_kind" in caught.value.fix


def test_names_of_several_classes_are_those_of_one(tmp_path: Path):
    source = write(tmp_path / "t.csv", {"label": ["cat| dog", "1.0|1"]})
    multi = source.model_copy(update={"label_kind": "multi_label"})
    assert set(list_images(multi).class_names) == {"cat", "dog", "1"}


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
    manifest = build_from(source, tmp_path / "dataset").manifest
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
    build_from(as_csv(tmp_path, kind, LABELS[kind]), tmp_path / "dataset")
    labels = [*LABELS[kind][:-1], LABELS[kind][0] if kind != "multi_label" else ["ant"]]
    source = as_csv(tmp_path, kind, labels)
    child, full = build_from(source, tmp_path / "dataset"), build_from(source, tmp_path / "full")
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
    manifest = build_from(source, tmp_path / "dataset", label_map=("owl", "cat")).manifest
    assert manifest.class_names == ("owl", "cat")
    assert manifest.counts.by_reason == {"unknown_class": 8}


@EVERY_KIND
def test_a_source_without_such_labels_is_an_error_before_any_work(tmp_path: Path, kind: str):
    write_files(tmp_path / "images", 0)
    (tmp_path / "images" / "cat").mkdir(parents=True)
    (tmp_path / "images" / "cat" / "1.png").write_bytes(picture(1))
    source = SourceConfig(uri=str(tmp_path / "images"), label_kind=kind)  # pyright: ignore
    with pytest.raises(UsageError, match="no input of .* has such a label"):
        build_from(source, tmp_path / "dataset")


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """A folder that holds `images`: 60 of three classes."""
    write_images(tmp_path / "images", num_images=60)
    return tmp_path


def write_fixed(folder: Path, text: str, name: str = "fixed.csv") -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def classes(folder: Path, dataset: str = "dataset") -> dict[str, str]:
    version = opened(folder, dataset)
    tables = [read_metadata(version, split, ("source", "class_name")) for split in version.manifest.splits]
    return {row["source"]: row["class_name"] for table in tables for row in table.to_pylist()}


def test_only_corrected_rows_are_read_again(images: Path):
    build(images)
    before = classes(images)
    # Of three rows one is not filled in; an editor may have put other columns beside them.
    given = write_fixed(
        images,
        "source,note,label\nclass_0/00000.png,x,class_1\nclass_1/00001.png,,\nclass_2/00002.png,y,class_0\n",
    )
    recorder = Recorder()
    second = build(images, recorder=recorder, corrections=given)
    assert (second.manifest.operation, second.num_images_read) == ("incremental", 2)
    assert recorder.events["etl.corrected"] == {"labels": 2, "rows": 2}
    changed = {"class_0/00000.png": "class_1", "class_2/00002.png": "class_0"}
    assert classes(images) == before | changed
    assert build(images, corrections=given).skipped
    assert build(images, "whole", corrections=given).manifest.content_digest == second.manifest.content_digest

    # The file is edited, and then left out.
    write_fixed(images, "source,label\nclass_0/00000.png,class_2\n")
    assert build(images, corrections=given).num_images_read == 2
    assert classes(images) == before | {"class_0/00000.png": "class_2"}
    other = write_fixed(images, "source,label\nclass_1/00001.png,class_0\n", "other.csv")
    for table, said in (
        ("", "not set any more, without 1 label of"),
        (other, "other.csv' does not have 1 label of"),
        ("", "a table that cannot be read now"),
    ):
        if "read" in said:
            Path(given).unlink()
        warnings = [*inferred_warnings(plan_build(tree_for(images, corrections=table), run_id="r"))]
        assert sum(said in each and "with which version 3 was built" in each for each in warnings) == 1
    last = build(images)
    assert (last.num_images_read, classes(images)) == (1, before)


def test_keys_of_archives_and_other_formats_of_tables(images: Path):
    with zipfile.ZipFile(images / "images.zip", "w") as archive:
        for file in sorted((images / "images").rglob("*.png")):
            archive.write(file, file.relative_to(images / "images"))
    key = "images.zip\0class_0/00000.png"
    pq.write_table(pa.table({"source": [to_cell(key)], "label": ["class_2"]}), images / "fixed.parquet")
    source = SourceConfig(uri=str(images / "images.zip"), kind="zip")
    tree = tree_for(images, source=source, corrections=str(images / "fixed.parquet"))
    plan = plan_build(tree, run_id="r")
    counts = {label: times for (_, label), times in plan.listing.images_by_label.items()}
    assert counts == {"class_0": 19, "class_1": 20, "class_2": 21} and not plan.listing.warnings
    write_fixed(images, '{"source": "class_1/00001.png", "label": "class_0"}\n', "fixed.jsonl")
    plan = plan_build(tree_for(images, corrections=str(images / "fixed.jsonl"), stratified_splits=True), run_id="r")
    assert sum(times for (_, label), times in plan.listing.images_by_label.items() if label == "class_0") == 21


def test_an_image_that_is_not_there_is_a_warning_and_no_image_an_error(images: Path):
    given = write_fixed(images, "source,label\nclass_0/00000.png,class_1\ngone.png,class_1\n")
    [warning] = plan_build(tree_for(images, corrections=given), run_id="r").listing.warnings
    assert "fixed.csv' names 1 image that" in warning and warning.endswith("does not have: gone.png")
    write_fixed(images, "source,label\nimages/a.png,class_1\nimages/b.png,class_0\n")
    with pytest.raises(UsageError, match=r"names only 2 images that .* does not have: images/a.png, images/b.png"):
        plan_build(tree_for(images, corrections=given), run_id="r")
    write_fixed(images, "source,label\nclass_0/00000.png,\n")
    [warning] = plan_build(tree_for(images, corrections=given), run_id="r").listing.warnings
    assert "corrects nothing: its column label is empty" in warning


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "no such file"),
        ("key,label\na,b\n", "has no column 'source', only 'key', 'label'"),
        ("source,label\nclass_0/00000.png\n", "row 1: 1 values, expected 2"),
        ("source,label\nclass_0/00000.png,class1\n", "the label 'class1'.*did you mean 'class_1'"),
        ("source,label\na,class_0\na,class_1\n", "gives a the labels 'class_0' and 'class_1'"),
    ],
)
def test_a_table_that_cannot_be_used_is_refused(images: Path, text: str | None, says: str):
    given = str(images / "fixed.csv") if text is None else write_fixed(images, text)
    with pytest.raises(UsageError, match=says):
        plan_build(tree_for(images, corrections=given), run_id="r")


def test_a_class_without_images_needs_a_label_map(images: Path):
    given = write_fixed(images, "source,label\nclass_0/00000.png,class_3\n")
    names = ("class_0", "class_1", "class_2", "class_3")
    plan = plan_build(tree_for(images, corrections=given, label_map=names), run_id="r")
    assert plan.listing.images_by_label[None, "class_3"] == 1
    with pytest.raises(UsageError, match="name all classes in etl.label_map"):
        plan_build(tree_for(images, corrections=given), run_id="r")


def test_labels_that_are_no_classes_are_not_corrected(images: Path):
    given = write_fixed(images, "source,label\nclass_0/00000.png,class_3\n")
    source = SourceConfig(uri=str(images / "images"), label_kind="none")
    tree = tree_for(images, source=source, corrections=given)
    with pytest.raises(UsageError, match="source.label_kind is none; expected images with one class each"):
        plan_build(tree, run_id="r")
