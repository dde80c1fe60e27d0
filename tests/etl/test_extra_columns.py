"""Extra columns: typed values of a source beside its images, equal in every kind of source, format and version."""

from __future__ import annotations

import csv
import json
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from etl.sources.extra import ExtraColumns
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.manifest import encode_manifest, parse_manifest
from shardmill.dataset.row_segments import LOOK_COLUMNS, ROWS_SCHEMA, SOURCE_COLUMNS
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.rows import OWN_COLUMNS, OWN_NAMES
from shardmill.formats.tf_example import FLOAT_LIST, FeatureList, encode_example
from shardmill.formats.tfrecord import frame
from shardmill.loader.batch import NAMES
from shardmill.loader.metadata import CLASS
from shardmill.loader.reader import read_split
from shardmill.values import Rejection, SourceImage
from tests.etl.building import images_of, list_images
from tests.etl.incremental import Row, build_from, stored, write_files
from tests.etl.source_files import add_member, picture

TYPES = {"caption": "string", "tags": "list<string>", "age": "int64", "ratio": "float32", "pair": "list<float32>"}
ROWS: list[Row] = [
    {
        "caption": f"image é {number}\n" if number % 3 else None,
        "tags": ["a", "b\"c"][: number % 3],
        "age": -number if number % 4 else None,
        "ratio": number / 8,
        "pair": [number / 4, 0.5],
    }
    for number in range(24)
]  # fmt: skip
FIELDS = tuple(f"{name}:{kind}" for name, kind in TYPES.items())


def as_csv(folder: Path, rows: list[Row]) -> SourceConfig:
    write_files(folder, len(rows))
    with open(folder / "table.csv", "w", newline="") as out:
        writer = csv.writer(out)
        writer.writerow(["uri", *TYPES])
        for number, row in enumerate(rows):
            texts = (json.dumps(value) if isinstance(value, list) else value for value in row.values())
            writer.writerow([f"{number:03d}.png", *texts])
    return SourceConfig(uri=str(folder / "table.csv"), kind="table", extra_columns=FIELDS)


def as_jsonl(folder: Path, rows: list[Row]) -> SourceConfig:
    write_files(folder, len(rows))
    lines = [json.dumps({"uri": f"{number:03d}.png", **row}) for number, row in enumerate(rows)]
    (folder / "table.jsonl").write_text("\n".join(lines))
    return SourceConfig(uri=str(folder / "table.jsonl"), kind="table", extra_columns=FIELDS)


def as_table(folder: Path, rows: list[Row]) -> SourceConfig:
    write_files(folder, len(rows))
    uris = pa.array([f"{number:03d}.png" for number in range(len(rows))])
    pq.write_table(typed(rows).append_column("uri", uris), folder / "table.parquet")
    return SourceConfig(uri=str(folder / "table.parquet"), kind="table", extra_columns=tuple(TYPES))


def as_parquet(folder: Path, rows: list[Row]) -> SourceConfig:
    table = typed(rows).append_column("image", pa.array([picture(number) for number in range(len(rows))]))
    pq.write_table(table, folder / "rows.parquet", row_group_size=15)
    return SourceConfig(uri=str(folder / "rows.parquet"), kind="parquet", extra_columns=tuple(TYPES))


def as_tar(folder: Path, rows: list[Row]) -> SourceConfig:
    with tarfile.open(folder / "a.tar", "w") as tar:
        for number, row in enumerate(rows):
            add_member(tar, f"{number:03d}.png", picture(number))
            add_member(tar, f"{number:03d}.json", json.dumps({"meta": row}).encode())
    return SourceConfig(
        uri=str(folder / "a.tar"), kind="webdataset", extra_columns=tuple(f"json.meta.{field}" for field in FIELDS)
    )


def as_records(folder: Path, rows: list[Row]) -> SourceConfig:
    with open(folder / "a.tfrecord", "wb") as out:
        for number, row in enumerate(rows):
            features: dict[str, Any] = {"image": picture(number)}
            features |= {"ratio": FeatureList(FLOAT_LIST, [row["ratio"]]), "pair": FeatureList(FLOAT_LIST, row["pair"])}
            features["tags"] = FeatureList(1, [tag.encode() for tag in row["tags"]])
            features |= {} if row["caption"] is None else {"caption": row["caption"].encode()}
            features |= {} if row["age"] is None else {"age": row["age"]}
            out.write(frame(encode_example(features)))
    return SourceConfig(uri=str(folder / "a.tfrecord"), kind="tfrecord", extra_columns=FIELDS)


def typed(rows: list[Row]) -> pa.Table:
    kinds = [pa.string(), pa.list_(pa.string()), pa.int32(), pa.float32(), pa.list_(pa.float32(), 2)]
    return pa.Table.from_pylist(rows, schema=pa.schema(list(zip(TYPES, kinds, strict=True))))


WRITERS: list[Callable[[Path, list[Row]], SourceConfig]] = [
    as_csv, as_jsonl, as_table, as_parquet, as_tar, as_records
]  # fmt: skip


def expected(writer: Callable, rows: list[Row]) -> list[Row]:
    """Tar keeps no trailing space of a text member, but JSON's; CSV cannot tell an empty caption from none."""
    return [{**row, "caption": row["caption"] or ""} if writer is as_csv else row for row in rows]


@pytest.mark.parametrize("writer", WRITERS)
def test_every_kind_of_source_hands_its_columns_on_typed(tmp_path: Path, writer: Callable):
    source = writer(tmp_path, ROWS)
    prefix = "json.meta." if writer is as_tar else ""
    manifest = build_from(source, tmp_path / "dataset").manifest
    found = {name.removeprefix(prefix): kind for name, kind in manifest.columns.items()}
    assert TYPES.items() <= found.items()
    values = stored(tmp_path / "dataset")
    keys = sorted(values, key=lambda key: int(key.rpartition("\0")[2].partition(".")[0]))
    rows = [{name.removeprefix(prefix): value for name, value in values[key].items()} for key in keys]
    assert rows == expected(writer, ROWS)


def test_a_batch_has_the_values_of_its_rows_in_every_format(tmp_path: Path):
    build_from(as_parquet(tmp_path, ROWS), tmp_path / "dataset")
    dataset = open_dataset(str(tmp_path / "dataset"))
    for name in dataset.manifest.formats:
        batches = list(read_split(dataset, "train", batch_size=8, format=name))
        found = {}
        for batch in batches:
            assert set(batch.extra) == set(TYPES) and all(len(values) == 8 for values in batch.extra.values())
            for place, sample_id in enumerate(batch.sample_ids_N.tolist()):
                row = {column: values[place] for column, values in batch.extra.items()}
                assert batch.weights_N[place] or not any(row.values())
                found[sample_id] = row
        images = images_of(list_images(as_parquet(tmp_path, ROWS), 10_000))
        by_id = {image.sample_id: ROWS[image.place] for image in images}
        assert {key: row for key, row in found.items() if key} == {key: by_id[key] for key in found if key}
    file = pq.ParquetFile(dataset.files("train", "parquet")[0])
    assert file.schema_arrow.field("ratio").type == pa.float32()
    assert file.schema_arrow.field("tags").type.value_type == pa.string()


@pytest.mark.parametrize("writer", [as_csv, as_table])
def test_a_changed_value_alone_changes_its_row_and_no_other(tmp_path: Path, writer: Callable):
    build_from(writer(tmp_path, ROWS), tmp_path / "dataset")
    rows = [{**row, "age": 7} if number == 5 else row for number, row in enumerate(ROWS)]
    source = writer(tmp_path, rows)
    child = build_from(source, tmp_path / "dataset")
    full = build_from(source, tmp_path / "full")
    assert (child.manifest.operation, child.num_images_read) == ("incremental", 1)
    assert child.manifest.content_digest == full.manifest.content_digest
    assert stored(tmp_path / "dataset") == stored(tmp_path / "full")
    compacted = compact_dataset(open_dataset(str(tmp_path / "dataset")), "c").manifest
    assert compacted.operation == "compact" and stored(tmp_path / "dataset") == stored(tmp_path / "full")
    assert build_from(source, tmp_path / "dataset").skipped


def test_another_type_of_the_same_values_is_another_dataset(tmp_path: Path):
    source = as_csv(tmp_path, ROWS).model_copy(update={"label_kind": "none"})
    first = build_from(source.model_copy(update={"extra_columns": ("age:int64",)}), tmp_path / "dataset").manifest
    second = build_from(source.model_copy(update={"extra_columns": ("age:float64",)}), tmp_path / "dataset").manifest
    without = build_from(source.model_copy(update={"extra_columns": ()}), tmp_path / "dataset").manifest
    assert len({each.content_digest for each in (first, second, without)}) == 3
    assert {each.operation for each in (first, second, without)} == {"full"}


def test_types_that_differ_between_files_are_an_error_that_names_both(tmp_path: Path):
    (tmp_path / "rows").mkdir()
    for name, values in (("a", [1]), ("b", [0.5])):
        pq.write_table(pa.table({"image": [picture(1)], "size": values}), tmp_path / "rows" / f"{name}.parquet")
    source = SourceConfig(uri=str(tmp_path / "rows"), kind="parquet", extra_columns=("size",))
    with pytest.raises(UsageError, match=r"float64 in b.parquet and int64 in a.parquet") as failed:
        list_images(source)
    assert "size:float64" in str(failed.value.fix)
    given = list_images(source.model_copy(update={"extra_columns": ("size:float64",)}))
    assert [json.loads(image.extra) for image in images_of(given)] == [{"size": 1.0}, {"size": 0.5}]


def test_parts_of_a_source_may_lack_a_column_but_not_have_another_type(tmp_path: Path):
    parts = {}
    for name, columns in (("x", {"size": [1]}), ("y", {"size": [0.5]}), ("z", {})):
        pq.write_table(pa.table({"image": [picture(1)], **columns}), tmp_path / f"{name}.parquet")
        extra = tuple(columns)
        parts[name] = SourceConfig(uri=str(tmp_path / f"{name}.parquet"), kind="parquet", extra_columns=extra)
    with pytest.raises(UsageError, match="int64 in one part of the source and float64 in another"):
        list_images(SourceConfig(kind="several", parts=parts))
    del parts["y"]
    build_from(SourceConfig(kind="several", parts=parts), tmp_path / "dataset")
    rows = stored(tmp_path / "dataset")
    assert {key.partition("\0")[0]: row for key, row in rows.items()} == {"x": {"size": 1}, "z": {"size": None}}


@pytest.mark.parametrize("columns", [{"age": "decimal"}, {"label": "float32[x]"}, {"label": "float32[99999999999]"}])
def test_a_manifest_with_a_type_that_nobody_knows_is_refused(tmp_path: Path, columns: dict[str, str]):
    manifest = build_from(as_parquet(tmp_path, ROWS), tmp_path / "dataset").manifest
    altered = manifest.model_copy(update={"columns": manifest.columns | columns})
    with pytest.raises(IntegrityError, match="columns"):
        parse_manifest(encode_manifest(altered), 1, "here")


def test_a_value_of_another_type_rejects_its_row(tmp_path: Path):
    (tmp_path / "table.csv").write_text("uri,age\na.png,3\nb.png,old\nc.png,\nd.png,2.5\n")
    source = SourceConfig(uri=str(tmp_path / "table.csv"), kind="table", extra_columns=("age:int64",))
    listing = list_images(source)
    assert [json.loads(image.extra)["age"] for image in images_of(listing)] == [3, None]
    assert [(str(each.reason), each.detail) for each in listing.rejections] == [
        ("bad_row", "row 2: age = 'old' is no int64"), ("bad_row", "row 4: age = '2.5' is no int64"),
    ]  # fmt: skip


def test_a_column_that_no_input_has_is_an_error_before_any_work(tmp_path: Path):
    source = as_parquet(tmp_path, ROWS).model_copy(update={"extra_columns": ("captoin",)})
    with pytest.raises(UsageError, match="captoin"):
        build_from(source, tmp_path / "dataset")


@pytest.mark.parametrize("entry", ["", "a:text", ":int64"])
def test_an_entry_of_the_config_is_a_name_or_a_name_and_a_type(entry: str):
    with pytest.raises(ValueError, match="NAME:TYPE"):
        SourceConfig(extra_columns=(entry,))


@pytest.mark.parametrize(
    "entries",
    [
        ("label",), ("a", "a:int64"), ("class_name",), ("weights:float32",), ("source_bytes",), ("sample_ids",),
        ("images:string",), ("extra",), ("source_width:int64",), ("image/encoded",),
    ],
)  # fmt: skip
def test_a_name_is_used_once(entries: tuple[str, ...]):
    with pytest.raises(ValueError, match="names without duplicates"):
        SourceConfig(extra_columns=entries)


def test_no_name_of_metadata_and_of_batches_is_a_user_s():
    everything = {*ROWS_SCHEMA.names, *SOURCE_COLUMNS, *LOOK_COLUMNS, CLASS, *NAMES}
    assert everything <= {*OWN_COLUMNS, *OWN_NAMES}


def test_values_keep_their_types_however_odd(tmp_path: Path):
    image = SourceImage("x", 1, 1, "", container="x")
    columns = ExtraColumns(("f:float64", "b:bool", "s:string", "n:list<int64>"))
    for value, text in (
        ({"f": float("inf"), "b": 1, "s": 5, "n": []}, '{"b":true,"f":Infinity,"n":[],"s":"5"}'),
        ({"f": "0.1", "b": "false", "s": "", "n": "[1, 2]"}, '{"b":false,"f":0.1,"n":[1,2],"s":""}'),
    ):
        assert columns.of_record(image, value) == replace(image, extra=text)
    for value in ({"b": 2}, {"n": [1, None]}, {"f": [1.0]}, {"s": ["a"]}, {"n": [2**63]}):
        assert isinstance(columns.of_record(image, value), Rejection)
