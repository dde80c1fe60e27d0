"""Tables as other programs write them: encodings, delimiters, spaces, Windows' paths, Arrow's types."""

from __future__ import annotations

import base64
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, UsageError
from tests.etl.building import images_of, list_images

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
        "uri, label\na.jpg, cät\nb.jpg, dog\n",
        'uri , "label"\r\na.jpg , "cät"\r\nb.jpg, dog\r\n',
        "label, uri\ncät, a.jpg\ndog, b.jpg\n",
        "URI,Label\na.jpg,cät\nb.jpg,dog \n",
        "uri,label,,\na.jpg,cät,,\nb.jpg,dog,,\n",
        '"uri","label"\n"a.jpg","cät"\n"b.jpg","dog"\n',
        ".\\a.jpg,cät\r\nb.jpg,dog\r\n".join(["uri,label\r\n", ""]),
    ],
)
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
