"""What stands in a table: its forms, its values, its extra columns."""

from __future__ import annotations

import base64
import datetime
import gzip
import importlib.util
import json
import sys
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig, SplitFractions
from etl.listing.list_source import Listed, list_source
from etl.listing.splits import with_group_splits
from etl.sources import SOURCES, table_rows
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.tf_example import FLOAT_LIST, FeatureList, encode_example
from shardmill.formats.tfrecord import frame
from shardmill.jobs.observer import SilentObserver
from tests.etl.building import images_of, list_images
from tests.etl.source_files import picture, write_tar

# Of pyarrow 26: a column `image` of struct<bytes: binary_view, path: string_view> with one row, b"a" and "x".
VIEWS = (
    "UEFSMRUEFQoVDkwVAhUAEgAABRABAAAAYRUAFRIVFiwVAhUQFQYVBhw2ACgBYRgBYRERAAAACSACAAAAAgIBAgAVBBUKFQ5MFQIVABIAAAUQAQ"
    "AAAHgVABUSFRYsFQIVEBUGFQYcNgAoAXgYAXgREQAAAAkgAgAAAAICAQIAFQQZTDUAGAZzY2hlbWEVAgA1AhgFaW1hZ2UVBAAVDCUCGAVieXRl"
    "cwAVDCUCGARwYXRoJQBMHAAAABYCGRwZLCYAHBUMGTUABhAZKAVpbWFnZQVieXRlcxUCFgIWchZ6JjImCBw2ACgBYRgBYRERABksFQQVABUCAB"
    "UAFRAVAgA8FgIZBhk2AAACAAAAJgAcFQwZNQAGEBkoBWltYWdlBHBhdGgVAhYCFnIWeiasASaCARw2ACgBeBgBeBERABksFQQVABUCABUAFRAV"
    "AgA8FgIZBhk2AAACAAAAFuQBFgImCBb0AQAZHBgMQVJST1c6c2NoZW1hGJgCLy8vLy84Z0FBQUFRQUFBQUFBQUtBQXdBQmdBRkFBZ0FDZ0FBQU"
    "FBQkJBQU1BQUFBQ0FBSUFBQUFCQUFJQUFBQUJBQUFBQUVBQUFBRUFBQUFxUC8vL3dBQUFRMFlBQUFBSUFBQUFBUUFBQUFDQUFBQVVBQUFBQlFB"
    "QUFBRkFBQUFhVzFoWjJVQUFBQ2cvLy8vMlAvLy93QUFBUmdRQUFBQUdBQUFBQVFBQUFBQUFBQUFCQUFBQUhCaGRHZ0FBQUFBeVAvLy94QUFGQU"
    "FJQUFZQUJ3QU1BQUFBRUFBUUFBQUFBQUFCRnhBQUFBQWNBQUFBQkFBQUFBQUFBQUFGQUFBQVlubDBaWE1BQUFBRUFBUUFCQUFBQUE9PQAYIHBh"
    "cnF1ZXQtY3BwLWFycm93IHZlcnNpb24gMjYuMC4xGSwcAAAcAAAAPQIAAFBBUjE="
)
TABLE = "uri,label\na.jpg,cät\nb.jpg,dog\n"
FOUND = [("a.jpg", "cät"), ("b.jpg", "dog")]


def listed(file: Path) -> list[tuple[str, str | None]]:
    listing = list_images(SourceConfig(uri=str(file), kind="table"))
    assert not listing.rejections and not listing.warnings
    return [(image.key, image.label) for image in images_of(listing)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.csv.gz", "t.jsonl"])
def test_every_unicode_encoding_is_read(encoding: str, name: str, tmp_path: Path):
    text = TABLE.replace(",", "\t") if ".tsv" in name else TABLE
    if name == "t.jsonl":
        text = "".join(json.dumps({"uri": uri, "label": label}, ensure_ascii=False) + "\n" for uri, label in FOUND)
    data = text.encode(encoding)
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert listed(tmp_path / name) == FOUND


@pytest.mark.parametrize("name", ["t.csv", "t.jsonl"])
def test_another_encoding_is_named_with_the_place_and_the_way_out(name: str, tmp_path: Path):
    text = TABLE if name == "t.csv" else '{"uri": "a.jpg", "label": "cät"}\n'
    (tmp_path / name).write_bytes(text.encode("cp1252"))
    with pytest.raises(UsageError, match=rf"the table {name} is not UTF-8: byte 0xe4 near byte \d+") as caught:
        list_images(SourceConfig(uri=str(tmp_path / name), kind="table"))
    assert "iconv -f WINDOWS-1252" in caught.value.fix


def test_letters_on_the_border_of_two_reads_stay_whole(tmp_path: Path):
    rows = [(f"{row:06}.jpg", "ä" * 40) for row in range(30_000)]
    for encoding in ("utf-8", "utf-16"):
        lines = "".join(f"{uri},{label}\n" for uri, label in rows)
        (tmp_path / "t.csv").write_bytes(f"uri,label\n{lines}".encode(encoding))
        assert listed(tmp_path / "t.csv") == rows


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
def test_the_delimiter_is_the_one_of_the_line_of_names(name: str, delimiter: str, tmp_path: Path):
    (tmp_path / name).write_text(TABLE.replace(",", delimiter), encoding="utf-8")
    assert listed(tmp_path / name) == FOUND


@pytest.mark.parametrize(
    "text",
    [
        "uri;label;size, mm\na.jpg;cät;1\nb.jpg;dog;2\n",
        'uri,label,"a;b;c;d"\na.jpg,cät,1\nb.jpg,dog,2\n',
        "\n\r\nuri;label\na.jpg;cät\nb.jpg;dog\n",
        "uri;label\ra.jpg;cät\rb.jpg;dog\r",
    ],
)
def test_names_may_hold_another_delimiter_and_empty_lines_may_stand_before_them(text: str, tmp_path: Path):
    (tmp_path / "t.csv").write_bytes(text.encode())
    assert listed(tmp_path / "t.csv") == FOUND


def test_a_delimiter_that_the_first_line_names_holds(tmp_path: Path):
    (tmp_path / "t.csv").write_text('sep=;\r\nuri;label;"a,b"\r\na.jpg;cat;\r\nb.jpg\r\n', encoding="utf-8")
    listing = list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table"))
    assert [(image.key, image.label, image.place) for image in images_of(listing)] == [("a.jpg", "cat", 1)]
    assert [each.key for each in listing.rejections] == ["t.csv\x002"]


@pytest.mark.parametrize(
    "text",
    [
        "uri, label\na.jpg, cät\nb.jpg, dog\n", 'uri , "label"\r\na.jpg , "cät"\r\nb.jpg, dog\r\n',
        "label, uri\ncät, a.jpg\ndog, b.jpg\n", "URI,Label\na.jpg,cät\nb.jpg,dog \n",
        "uri,label,,\na.jpg,cät,,\nb.jpg,dog,,\n", '"uri","label"\n"a.jpg","cät"\n"b.jpg","dog"\n',
        ".\\a.jpg,cät\r\nb.jpg,dog\r\n".join(["uri,label\r\n", ""]),
    ],
)  # fmt: skip
def test_spaces_case_quotes_and_empty_columns_change_nothing(text: str, tmp_path: Path):
    (tmp_path / "t.csv").write_bytes(text.encode())
    assert listed(tmp_path / "t.csv") == FOUND


def test_a_quoted_value_behind_a_space_may_have_quotes_and_a_column_keeps_its_spaces_without_that_style(tmp_path: Path):
    (tmp_path / "t.csv").write_text('uri, label\na.jpg, "a ""b"""\n b.jpg,"c"\n')
    assert listed(tmp_path / "t.csv") == [("a.jpg", 'a "b"'), ("b.jpg", "c")]
    (tmp_path / "t.csv").write_text("uri,label\n a.jpg,x\n")
    assert listed(tmp_path / "t.csv") == [(" a.jpg", "x")]


@pytest.mark.parametrize("header", ["uri,label,label", "uri, label,label", "uri,uri,label", "uri,label,split,split"])
def test_a_column_that_is_used_and_there_twice_is_named(header: str, tmp_path: Path):
    (tmp_path / "t.csv").write_text(f"{header}\n" + ",".join(["a"] * (header.count(",") + 1)) + "\n")
    with pytest.raises(UsageError, match="the column '(uri|label|split)' occurs 2 times"):
        list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table"))


@pytest.mark.parametrize("header", ["uri,Label,LABEL", "uri,Label ,LABEL", "URI,Uri,label"])
def test_columns_that_differ_only_in_case_are_named(header: str, tmp_path: Path):
    (tmp_path / "t.csv").write_text(f"{header}\na,b,c\n")
    source = SourceConfig(uri=str(tmp_path / "t.csv"), kind="table")
    with pytest.raises(UsageError, match="the columns '.*', '.*' differ only in case or spaces") as caught:
        list_images(source)
    assert "_field to one" in caught.value.fix


def test_one_of_two_columns_may_be_chosen_as_it_is_written(tmp_path: Path):
    (tmp_path / "t.csv").write_text("uri,Label,LABEL\na.jpg,b,c\n")
    source = SourceConfig(uri=str(tmp_path / "t.csv"), kind="table", label_field="LABEL")
    assert list_images(source).class_names == ("c",)


def test_an_extra_column_that_is_there_twice_is_named(tmp_path: Path):
    (tmp_path / "t.csv").write_text("uri,label,note,note\na.jpg,b,c,d\n")
    source = SourceConfig(uri=str(tmp_path / "t.csv"), kind="table", extra_columns=("note",))
    with pytest.raises(UsageError, match="the column 'note' occurs 2 times"):
        list_images(source)


def test_a_name_that_is_twice_in_an_object_of_json_refuses_its_line(tmp_path: Path):
    (tmp_path / "t.jsonl").write_text('{"uri": "a.jpg", "label": 1, "label": 2}\n{"uri": "b.jpg", "label": 1}\n')
    listing = list_images(SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table"))
    assert [image.key for image in images_of(listing)] == ["b.jpg"]
    assert ["the name 'label' occurs twice" in each.detail for each in listing.rejections] == [True]


def test_backslashes_lead_to_files_below_the_table_and_drives_are_refused(tmp_path: Path):
    (tmp_path / "t.csv").write_text(
        "uri,label\ni\\a.jpg,x\n.\\i\\b.jpg,x\nC:\\i\\c.jpg,x\nd:/d.jpg,x\n\\\\host\\e.jpg,x\n"
    )
    listing = list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table"))
    assert [image.key for image in images_of(listing)] == ["i/a.jpg", "i/b.jpg"]
    assert {each.detail.split(": ")[1].partition(";")[0] for each in listing.rejections} == {
        "a path with a drive or a share of Windows"
    }
    assert len(listing.rejections) == 3


def test_a_file_that_is_named_with_a_backslash_is_found_by_its_name(tmp_path: Path):
    (tmp_path / "i\\a.jpg").write_bytes(b"x")
    (tmp_path / "t.csv").write_text("uri,label\ni\\a.jpg,x\n")
    assert listed(tmp_path / "t.csv") == [("i\\a.jpg", "x")]


def test_ids_are_distinguished_from_paths_without_a_suffix(tmp_path: Path):
    (tmp_path / "t.csv").write_text("id,breed\n000bec,pug\n001513,dingo\n")
    with pytest.raises(UsageError) as caught:
        list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table"))
    assert "image ids are not URIs" in caught.value.fix
    by_id = SourceConfig(uri=str(tmp_path / "t.csv"), kind="table", uri_field="id", label_field="breed")
    with pytest.raises(UsageError, match="names files as '000bec', which has no suffix, and no such files exist"):
        list_images(by_id)
    (tmp_path / "001513").write_bytes(b"x")
    assert list_images(by_id).num_images == 2


@pytest.mark.parametrize("kind", ["table", "parquet"])
def test_a_column_of_lists_of_images_is_named_as_what_it_is(kind: str, tmp_path: Path):
    lists = [[{"bytes": b"x", "path": ""}]] if kind == "parquet" else [["a.jpg", "b.jpg"]]
    pq.write_table(pa.table({"images": lists, "label": [1]}), tmp_path / "t.parquet")
    uri_field = "images" if kind == "table" else ""
    with pytest.raises(UsageError, match="lists of images|is list<") as caught:
        list_images(SourceConfig(uri=str(tmp_path / "t.parquet"), kind=kind, uri_field=uri_field))
    assert "a row for each" in caught.value.fix


def read_first(source: SourceConfig) -> bytes:
    [image, *_] = images_of(list_images(source))
    data = SOURCES["parquet"](source).open(1_000).read(image)
    assert isinstance(data, bytes)
    return data


@pytest.mark.parametrize(
    "kind",
    [
        pa.large_binary(),
        pa.dictionary(pa.int32(), pa.binary()),
        pa.struct([("bytes", pa.large_binary()), ("path", pa.large_string())]),
        pa.struct([("bytes", pa.binary()), ("path", pa.dictionary(pa.int8(), pa.string()))]),
    ],
    ids=str,
)
@pytest.mark.parametrize("label", [pa.string(), pa.large_string(), pa.dictionary(pa.int8(), pa.string())], ids=str)
def test_arrows_types_of_bytes_and_texts_are_one(kind: pa.DataType, label: pa.DataType, tmp_path: Path):
    is_struct = pa.types.is_struct(kind)
    images = [{"bytes": each, "path": "p"} if is_struct else each for each in (b"a", b"b")]
    if pa.types.is_dictionary(kind):
        column = pa.array(images).dictionary_encode()
    elif is_struct and pa.types.is_dictionary(kind.field("path").type):
        paths = pa.array(["p", "p"]).dictionary_encode().cast(kind.field("path").type)
        column = pa.StructArray.from_arrays([pa.array([b"a", b"b"]), paths], fields=list(kind))
    else:
        column = pa.array(images, kind)
    rows = pa.table({"image": column, "label": pa.array(["cat", "dog"], label)})
    pq.write_table(rows, tmp_path / "images.parquet")
    assert recognise(str(tmp_path)) == "parquet"
    source = SourceConfig(uri=str(tmp_path), kind="parquet")
    assert [image.label for image in images_of(list_images(source))] == ["cat", "dog"]
    assert read_first(source) == b"a"


def test_types_that_this_arrow_may_not_know_are_bytes_and_texts_in_parquet(tmp_path: Path):
    (tmp_path / "images.parquet").write_bytes(base64.b64decode(VIEWS))
    assert recognise(str(tmp_path)) == "parquet"
    assert read_first(SourceConfig(uri=str(tmp_path), kind="parquet")) == b"a"


def test_a_file_that_ends_inside_its_footer_is_damaged(tmp_path: Path):
    pq.write_table(pa.table({"uri": ["a.jpg"]}), tmp_path / "t.parquet")
    data = (tmp_path / "t.parquet").read_bytes()
    for damaged in (data[:-3], data[:4] + data[-40:], b"PAR1", b""):
        (tmp_path / "t.parquet").write_bytes(damaged)
        with pytest.raises(IntegrityError, match="does not parse"):
            list_images(SourceConfig(uri=str(tmp_path / "t.parquet"), kind="table"))


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
def test_what_stands_beside_a_value_in_its_block_does_not_change_its_text(value: Any, text: str, beside: Any, tmp_path):
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


SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "make_table.py"
spec = importlib.util.spec_from_file_location("make_table", SCRIPT)
assert spec is not None and spec.loader is not None
make_table = importlib.util.module_from_spec(spec)
sys.modules["make_table"] = make_table
spec.loader.exec_module(make_table)


def listed_make_table(table: Path) -> dict[str, tuple[str | None, str | None]]:
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
    assert listed_make_table(tmp_path / "t.csv") == {
        "val2017/000000000001.jpg": ("cat", "validation"),
        "val2017/000000000002.jpg": ("dog", "validation"),
    }


@pytest.mark.parametrize("from_devkit", [False, True])
def test_imagenet_gives_validation_images_the_synset_of_the_ground_truth(from_devkit: bool, tmp_path: Path):
    names = [
        "train/n02/a.JPEG", "train/n01/b.JPEG", "val/ILSVRC2012_val_00000001.JPEG", "val/ILSVRC2012_val_00000002.JPEG",
    ]  # fmt: skip
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
    assert listed_make_table(tmp_path / "t.csv") == {
        names[0]: ("n02", "train"), names[1]: ("n01", "train"), names[2]: ("n02", "validation"),
        names[3]: ("n01", "validation"),
    }  # fmt: skip
    (tmp_path / "val" / "ILSVRC2012_val_00000003.JPEG").write_bytes(b"x")
    with pytest.raises(SystemExit, match="ILSVRC2012_val_00000003.JPEG is not in the ground truth"):
        make_table.main(["imagenet", str(tmp_path), str(tmp_path / "t.csv"), *truth])


def test_all_frames_of_a_video_are_in_one_split(tmp_path: Path):
    for video in range(20):
        for number in range(5):
            file = tmp_path / "frames" / ("run", "walk")[video % 2] / f"{video // 2:02d}" / f"{number:06d}.jpg"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(b"x")
    make_table.main(["frames", str(tmp_path / "frames"), str(tmp_path / "frames.csv")])
    split_of: dict[str, set[str | None]] = {}
    config = SourceConfig(uri=str(tmp_path / "frames.csv"), kind="table")
    source = SOURCES[config.kind](config)
    grouped = Listed(source.uri, lambda: with_group_splits(source.list(), SplitFractions()))
    listing = list_source(grouped, seed=0, max_source_bytes=1_000, observer=SilentObserver())
    for image in images_of(listing):
        video = image.key.rpartition("/")[0]
        assert image.label == video.split("/")[1]
        split_of.setdefault(video, set()).add(image.split)
    # Equal names in two classes are two videos.
    assert len(split_of) == 20 and all(len(splits) == 1 for splits in split_of.values())
    assert len(set.union(*split_of.values())) > 1
