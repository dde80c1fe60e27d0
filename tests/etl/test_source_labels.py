"""A source that plainly has labels makes no dataset without them; and equal labels are one class in every format."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from shardmill.errors import UsageError
from tests.etl.building import images_of, list_images
from tests.lab.datasets import write_images

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
