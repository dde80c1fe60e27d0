"""Keys, groups and classes are called alike, whatever type a format or Arrow gives their values."""

from __future__ import annotations

import datetime
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES, table_rows
from shardmill.errors import UsageError
from shardmill.formats.tf_example import FLOAT_LIST, FeatureList, encode_example
from shardmill.formats.tfrecord import frame
from tests.etl.building import images_of, list_images
from tests.etl.source_files import picture, write_tar

DAY = datetime.date(2020, 1, 1)
NOON = datetime.datetime(2020, 1, 1, 12, 30)
TYPES = {
    "int": (pa.array([123456789012, 7]), ["123456789012", "7"]),
    "float64": (pa.array([123456789012.0, 7.0]), ["123456789012", "7"]),
    "float32": (pa.array([1.0, 0.1], pa.float32()), ["1", "0.1"]),
    "fraction": (pa.array([0.1, 123456789012.5]), ["0.1", "123456789012.5"]),
    "decimal": (pa.array([Decimal("12.00"), Decimal("1.50")], pa.decimal128(10, 2)), ["12", "1.5"]),
    "text": (pa.array(["123456789012.0", "7"]), ["123456789012", "7"]),
    "bool": (pa.array([True, False]), ["true", "false"]),
    "date32": (pa.array([DAY, DAY]), ["2020-01-01"] * 2),
    "date64": (pa.array([DAY, DAY], pa.date64()), ["2020-01-01"] * 2),
    **{
        f"timestamp[{unit}]": (pa.array([datetime.datetime(2020, 1, 1), NOON], pa.timestamp(unit)),
        ["2020-01-01", "2020-01-01 12:30:00"]) for unit in ("s", "ms", "us", "ns")
    },
    "instant": (pa.array([NOON, NOON], pa.timestamp("us", "Europe/Berlin")), ["2020-01-01 12:30:00Z"] * 2),
}  # fmt: skip


def groups_and_keys(source: SourceConfig) -> tuple[list[str | None], list[str]]:
    batches = [batch for batch in SOURCES[source.kind](source).list() if batch.images.num_rows]
    groups = [name for batch in batches if batch.groups is not None for name in batch.groups.to_pylist()]
    return groups, [key.rpartition("\0")[2] for batch in batches for key in batch.images.column("key").to_pylist()]


def lines(*rows: dict[str, Any]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


@pytest.mark.parametrize("kind", ["table", "parquet"])
@pytest.mark.parametrize("column", TYPES)
def test_a_column_of_any_type_names_groups_and_keys_by_one_rule(kind: str, column: str, tmp_path: Path):
    values, texts = TYPES[column]
    rows = {"group": values, "uri": ["a.jpg", "b.jpg"]}
    if kind == "parquet":
        rows["image"] = [b"a", b"b"]
    if len(set(texts)) == 2:
        rows["key"] = values
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    groups, keys = groups_and_keys(SourceConfig(uri=str(tmp_path), kind=kind))
    assert groups == texts and (len(set(texts)) == 1 or keys == texts)


def test_a_missing_number_is_no_group(tmp_path: Path):
    pq.write_table(pa.table({"uri": ["a.jpg", "b.jpg"], "group": [float("nan"), 1.0]}), tmp_path / "t.parquet")
    assert groups_and_keys(SourceConfig(uri=str(tmp_path), kind="table"))[0] == [None, "1"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("2020-01-01", "2020-01-01"),
        ("2020-01-01 10:00:00", "2020-01-01 10:00:00"),
        ("2020-01-01T10:00:00Z", "2020-01-01T10:00:00Z"),
        (123456789012, "123456789012"),
        (123456789012.0, "123456789012"),
        (2**53 + 1, str(2**53 + 1)),
        (2**64 + 1, str(2**64 + 1)),
        (0.5, "0.5"),
        (True, "true"),
    ],
)
@pytest.mark.parametrize("beside", [None, "no JSON", {"group": 1.5, "key": 1.5}, {"group": "x", "key": "x"}], ids=str)
def test_what_stands_beside_a_value_in_its_block_does_not_change_its_text(
    value: Any, text: str, beside: Any, tmp_path: Path
):
    data = lines({"uri": "a.jpg", "group": value, "key": value, "label": "x"})
    if isinstance(beside, str):
        data += beside.encode()
    elif beside:
        data += lines({"uri": "b.jpg", "label": "x", **beside})
    (tmp_path / "t.jsonl").write_bytes(data)
    groups, keys = groups_and_keys(SourceConfig(uri=str(tmp_path), kind="table"))
    assert (groups[0], keys[0]) == (text, text)


def test_a_group_keeps_its_name_in_a_block_with_an_invalid_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 200)
    rows = [lines({"uri": f"{row}.jpg", "group": "2020-01-01"}) for row in range(20)]
    (tmp_path / "t.jsonl").write_bytes(b"".join([*rows, b"no\n"]))
    assert set(groups_and_keys(SourceConfig(uri=str(tmp_path), kind="table"))[0]) == {"2020-01-01"}


@pytest.mark.parametrize("header", ['uri,label,group,"a\nb"', 'uri,label,group,"a""b"', "uri,label,group,"])
def test_a_csv_file_has_texts_alone_whatever_its_line_of_names(header: str, tmp_path: Path):
    (tmp_path / "t.csv").write_text(f"{header}\n1.jpg,007,2020-01-01T00:00,1\n")
    source = SourceConfig(uri=str(tmp_path), kind="table")
    assert groups_and_keys(source)[0] == ["2020-01-01T00:00"]
    assert [image.label for image in images_of(list_images(source))] == ["007"]


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()], ids=str)
def test_numbers_that_a_float_has_rounded_name_nothing(kind: pa.DataType, tmp_path: Path):
    pq.write_table(pa.table({"uri": ["a.jpg"], "key": pa.array([2.0**60], kind)}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="too many digits for that type"):
        list_images(SourceConfig(uri=str(tmp_path), kind="table"))


@pytest.mark.parametrize("name", ["t.jsonl", "t.parquet"])
def test_dates_are_classes_and_extra_columns_as_they_stand(name: str, tmp_path: Path):
    if name == "t.jsonl":
        row = {"uri": "a.jpg", "label": "2020-01-01", "taken": "2020-01-01", "days": ["2020-01-01"]}
        (tmp_path / name).write_bytes(lines(row))
    else:
        pq.write_table(pa.table({"uri": ["a.jpg"], "label": [DAY], "taken": [DAY], "days": [[DAY]]}), tmp_path / name)
    source = SourceConfig(uri=str(tmp_path), kind="table", extra_columns=("taken", "days"))
    [image] = images_of(list_images(source))
    assert image.label == "2020-01-01"
    assert json.loads(image.extra) == {"taken": "2020-01-01", "days": ["2020-01-01"]}


def test_an_extra_column_of_texts_has_one_text_for_a_number(tmp_path: Path):
    pq.write_table(pa.table({"uri": ["a.jpg"], "id": [123456789012]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"uri": ["b.jpg", "c.jpg"], "id": [123456789012.0, None]}), tmp_path / "b.parquet")
    images = images_of(list_images(SourceConfig(uri=str(tmp_path), kind="table", extra_columns=("id:string",))))
    assert [json.loads(image.extra)["id"] for image in images] == ["123456789012", "123456789012", None]


def test_truth_is_one_class_in_every_kind_of_source(tmp_path: Path):
    write_tar(tmp_path / "a.tar", {"1.png": picture(1), "1.json": b'{"cat": true}'})
    (tmp_path / "t.jsonl").write_bytes(lines({"uri": "a.jpg", "cat": True}))
    pq.write_table(pa.table({"image": [picture(2)], "cat": [True]}), tmp_path / "images.parquet")
    parts = {
        "tar": SourceConfig(uri=str(tmp_path / "a.tar"), kind="webdataset", label_field="json.cat"),
        "table": SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table", label_field="cat"),
        "rows": SourceConfig(uri=str(tmp_path / "images.parquet"), kind="parquet", label_field="cat"),
    }
    images = images_of(list_images(SourceConfig(kind="several", parts=parts)))
    assert [image.label for image in images] == ["true"] * 3


def test_a_size_is_a_whole_number_as_pandas_writes_it_beside_a_missing_one(tmp_path: Path):
    rows = {"uri": ["a.jpg", "b.jpg"], "size_bytes": [3e11, None], "mtime_ns": [1.6e18, None]}
    pq.write_table(pa.table({name: rows[name] for name in ("uri", "size_bytes")}), tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("uri,size_bytes\nc.jpg,300000000000.0\n")
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="table"), 1 << 60)
    sizes = {image.key: image.size_bytes for image in images_of(listing)}
    assert sizes["a.jpg"] == sizes["c.jpg"] == 3 * 10**11
    # A time in nanoseconds has more digits than a float.
    pq.write_table(pa.table(rows), tmp_path / "t.parquet")
    [refused] = list_images(SourceConfig(uri=str(tmp_path / "t.parquet"), kind="table"), 1 << 60).rejections
    assert "mtime_ns is no whole number" in refused.detail


def test_a_key_of_a_record_is_called_as_in_a_table(tmp_path: Path):
    keys = [FeatureList(FLOAT_LIST, (7.0,)), b"7.0"]
    for name, key in zip("ab", keys, strict=True):
        features = {"image": picture(1), "id": key}
        (tmp_path / f"{name}.tfrecord").write_bytes(frame(encode_example(features)))
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="tfrecord", key_field="id"), 10_000)
    assert [each.key for each in (*images_of(listing), *listing.rejections)] == ["7", "7\x002"]


def test_a_rounded_number_is_no_key_of_a_record_and_no_class(tmp_path: Path):
    features = {"image": picture(1), "id": FeatureList(FLOAT_LIST, (2.0**24,))}
    (tmp_path / "a.tfrecord").write_bytes(frame(encode_example(features)))
    with pytest.raises(UsageError, match="more digits than that keeps"):
        list_images(SourceConfig(uri=str(tmp_path), kind="tfrecord", key_field="id"), 10_000)
    pq.write_table(pa.table({"uri": ["a.jpg"], "label": pa.array([2.0**24], pa.float32())}), tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="the labels of t.parquet are float"):
        list_images(SourceConfig(uri=str(tmp_path / "t.parquet"), kind="table"))
