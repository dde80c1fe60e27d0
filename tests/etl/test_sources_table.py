"""Tables as sources: columns that name images, labels and splits; folders of tables; columns that come late."""

from __future__ import annotations

import json
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from etl.config import EtlTree, SourceConfig
from etl.plan import plan_build
from etl.sources import SOURCES, table_rows
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, RejectLimitExceeded, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.stores import open_store
from shardmill.values import NO_BLOCK, UNKNOWN_SIZE, RejectReason, SourceImage
from tests.etl.building import ETL, build_source, images_of, list_images
from tests.etl.source_files import write_table
from tests.lab.datasets import write_images
from tests.lab.scale import usually
from tests.services.s3 import s3_client

HF_LABELS = {
    b"huggingface": json.dumps(
        {"info": {"features": {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}}}
    ).encode()
}


def rejected(source: SourceConfig) -> dict[str, str]:
    return {each.key: f"{each.reason}: {each.detail}" for each in list_images(source).rejections}


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl", "t.jsonl.gz", "t.feather"])
def test_every_format_lists_the_same_images(name: str, tmp_path: Path):
    rows = {
        "uri": ["a.jpg", "./b/c.jpg", "ünïcode.jpg", "/abs/d.jpg", "s3://bucket/e.jpg"],
        "label": ["cat", "007", "dog", "cat", "dog"],
        "split": ["train", "val", "", "test", "train"],
    }
    images = images_of(list_images(write_table(tmp_path / name, rows)))
    assert [(image.key, image.label, image.split, image.size_bytes) for image in images] == [
        ("/abs/d.jpg", "cat", "test", UNKNOWN_SIZE),
        ("a.jpg", "cat", "train", UNKNOWN_SIZE),
        ("b/c.jpg", "007", "validation", UNKNOWN_SIZE),
        ("s3://bucket/e.jpg", "dog", "train", UNKNOWN_SIZE),
        ("ünïcode.jpg", "dog", None, UNKNOWN_SIZE),
    ]


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl", "t.arrow"])
def test_a_table_beside_its_images_becomes_the_dataset_of_the_folder_itself(name: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    files = sorted(file.relative_to(tmp_path).as_posix() for file in (tmp_path / "images").rglob("*.png"))
    source = write_table(tmp_path / name, {"uri": files, "label": [file.split("/")[1] for file in files]})
    of_folder = build_source(SourceConfig(uri=str(tmp_path / "images")), tmp_path / "folder")
    of_table = build_source(source, tmp_path / "table")
    assert of_table.counts.by_split == of_folder.counts.by_split
    assert of_table.class_names == of_folder.class_names
    # With the table in the folder itself, URIs are the folder's keys, and the two datasets are equal.
    keys = [file.partition("/")[2] for file in files]
    inside = write_table(tmp_path / "images" / name, {"uri": keys, "label": [key.split("/")[0] for key in keys]})
    assert build_source(inside, tmp_path / "inside").content_digest == of_folder.content_digest


def test_rows_that_cannot_be_used_are_rejections_with_their_numbers(tmp_path: Path):
    rows = {
        "uri": ["a.jpg", None, "c.jpg", "d.jpg", "ftp://host/e.jpg", "x" * 9000],
        "label": ["cat", "cat", "", "dog", "dog", "dog"],
        "split": ["train", "train", "train", "holdout", "test", "test"],
    }
    source = write_table(tmp_path / "t.parquet", rows)
    assert [image.key for image in images_of(list_images(source))] == ["a.jpg"]
    found = rejected(source)
    assert [found[f"t.parquet\0{row}"].split(": ", 2)[2].split(";")[0] for row in range(2, 7)] == [
        "no URI", "no label", "no split's name", "this URI scheme is not supported", "a URI of more than 8192 bytes",
    ]  # fmt: skip


@pytest.mark.parametrize("column, without", [("size_bytes", UNKNOWN_SIZE), ("mtime_ns", 0)])
@pytest.mark.parametrize(
    "cells, numbers",
    [
        (["5", "0", "5.0", "9" * 17, "9" * 18], [5, 0, 5, 10**17 - 1, 10**18 - 1]),
        (["", None, " 5", "-1", "1.5", "5 KB", "9" * 19], ["none", "none", *["refused"] * 5]),
        ([2**53 + 1, None], [2**53 + 1, "none"]),
        # From here on a float has rounded.
        ([2.0**53 - 1, None, 2.0**53, float("nan")], [2**53 - 1, "none", "refused", "none"]),
    ],
    ids=["texts", "odd texts", "integers", "floats"],
)
def test_sizes_and_times_are_whole_numbers_or_their_rows_are_refused(
    column: str, without: int, cells: list, numbers: list, tmp_path: Path
):
    source = write_table(tmp_path / "t.parquet", {"uri": [f"{row}.jpg" for row in range(len(cells))], column: cells})
    listing = list_images(source, max_source_bytes=1 << 62)
    found = {image.place - 1: getattr(image, column) for image in images_of(listing)}
    assert found == {row: without if n == "none" else n for row, n in enumerate(numbers) if n != "refused"}
    assert [each.detail for each in listing.rejections] == [
        f"row {row + 1}: {column} is no whole number" for row, number in enumerate(numbers) if number == "refused"
    ]


@pytest.mark.parametrize("cells", [[[5], None], [b"5", None], [{"n": 5}, None]], ids=["lists", "bytes", "structs"])
@pytest.mark.parametrize("column", ["size_bytes", "MTIME_NS", "key", "Group", "split", "labels"])
@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_column_whose_values_cannot_be_used_is_refused(suffix: str, column: str, cells: list, tmp_path: Path):
    if suffix == "jsonl" and isinstance(cells[0], bytes):
        cells = [[5], None]
    source = write_table(tmp_path / f"t.{suffix}", {"uri": ["0.jpg", "1.jpg"], column: cells})
    named = "the labels of" if column == "labels" else f"the column {column} of the table"
    with pytest.raises(UsageError, match=f"{named} t.{suffix} (is|are) (list|binary|struct).*; expected .*; "):
        list_images(source)
    if column == "labels":
        assert len(images_of(list_images(source.model_copy(update={"label_kind": "none"})))) == 2


def test_a_mask_is_named_like_an_image_and_a_row_without_one_is_refused(tmp_path: Path):
    rows = {
        "uri": ["a.jpg", "b.jpg", "c.jpg", "d.jpg", None],
        "mask": ["./a.png", None, "", "ftp://host/d.png", None],
    }
    source = write_table(tmp_path / "t.parquet", rows).model_copy(update={"mask_field": "mask"})
    [image] = images_of(list_images(source))
    assert image.key == "a.jpg" and json.loads(image.extra) == {"mask": "a.png"}
    assert [detail.split(": ", 2)[2].split(";")[0] for detail in rejected(source).values()] == [
        "no mask", "no mask", "this URI scheme is not supported", "no URI",
    ]  # fmt: skip


def test_lines_that_are_no_rows_are_rejections_and_cost_no_other_line(tmp_path: Path):
    (tmp_path / "t.csv").write_text("uri,label\na.jpg,cat\nb.jpg\nc.jpg,dog\n")
    (tmp_path / "t.jsonl").write_text('{"uri": "a.jpg", "label": 1}\n{"uri": \n[1]\n{"uri": "b.jpg", "label": "x"}\n')
    for name, num_bad in {"t.csv": 1, "t.jsonl": 2}.items():
        listing = list_images(SourceConfig(uri=str(tmp_path / name), kind="table"))
        assert (listing.num_images, len(listing.rejections)) == (2, num_bad)
        assert {str(each.reason) for each in listing.rejections} == {"bad_row"}


@pytest.mark.parametrize("name", ["t.csv", "t.tsv", "t.jsonl"])
def test_a_byte_order_mark_and_lines_of_windows_change_nothing_and_a_formula_is_a_text(name: str, tmp_path: Path):
    rows = [["uri", "label", "split"], ["a.jpg", "cat", "train"], ["b.jpg", "=1+1", "test"], ["c.jpg", "@cat", "val"]]
    if name == "t.jsonl":
        lines = [json.dumps(dict(zip(rows[0], row, strict=True))) for row in rows[1:]]
    else:
        lines = [(",", "\t")[name == "t.tsv"].join(row) for row in rows]
    (tmp_path / name).write_bytes("".join(f"{line}\r\n" for line in lines).encode("utf-8-sig"))
    listing = list_images(SourceConfig(uri=str(tmp_path / name), kind="table"))
    assert not listing.rejections and not listing.warnings
    assert [(image.key, image.label, image.split) for image in images_of(listing)] == [
        ("a.jpg", "cat", "train"),
        ("b.jpg", "=1+1", "test"),
        ("c.jpg", "@cat", "validation"),
    ]


def test_rows_after_an_invalid_line_keep_their_numbers(tmp_path: Path):
    lines = ['{"uri": "a.jpg", "label": "x"}', "no", "no", '{"uri": "b.jpg", "label": "x"}', '{"label": "x"}', "no"]
    (tmp_path / "t.jsonl").write_text("\n".join(lines))
    (tmp_path / "t.csv").write_text("uri,label\na.jpg,x\nno\nno\nb.jpg,x\n,x\nno\n")
    for name in ("t.jsonl", "t.csv"):
        listing = list_images(SourceConfig(uri=str(tmp_path / name), kind="table"))
        assert sorted(each.key for each in listing.rejections) == [f"{name}\0{row}" for row in (2, 3, 5, 6)]
        assert {image.key: image.place for image in images_of(listing)} == {"a.jpg": 1, "b.jpg": 4}


def test_a_column_that_is_nearly_called_split_is_not_ignored_in_silence(tmp_path: Path):
    (tmp_path / "t.csv").write_text("uri,label,splt\na.jpg,cat,train\n")
    [split] = list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table")).warnings
    assert "no column 'split', and its column 'splt' is ignored" in split and "source.split_field" in split


@pytest.mark.parametrize(
    "names, splits, alike",
    [
        (["train.csv", "val.csv"], [], "(train, val)"),
        (["train.csv", "val.csv"], ["train", "test"], ""),
        (["train.csv", "more.csv"], [], ""),
        # One table is no split beside another, whatever its name.
        (["train_and_val.csv"], [], ""),
    ],
    ids=str,
)
def test_tables_named_like_splits_are_reported_unless_a_column_has_the_splits(
    names: list[str], splits: list[str], alike: str, tmp_path: Path
):
    for row, name in enumerate(names):
        write_table(tmp_path / name, {"uri": [f"{row}.jpg"]} | ({"split": splits[row : row + 1]} if splits else {}))
    warnings = list_images(SourceConfig(uri=str(tmp_path), kind="table")).warnings
    assert [f"not recognized {alike}" in each for each in warnings] == ([True] if alike else [])


def test_of_the_tables_in_folders_one_is_looked_at_for_where_its_paths_lead_from(tmp_path: Path, monkeypatch):
    (tmp_path / "1.jpg").write_bytes(b"x")
    for name in ("a.csv", "folder/b.csv", "other/c.csv"):
        write_table(tmp_path / name, {"uri": ["1.jpg"]})
    source = SourceConfig(uri=str(tmp_path), kind="table")
    with pytest.raises(UsageError, match=r"folder/b\.csv names files as '1\.jpg', which is relative to"):
        list_images(source)
    (tmp_path / "folder" / "1.jpg").write_bytes(b"x")
    assert [image.key for image in images_of(list_images(source))] == ["1.jpg", "folder/1.jpg", "other/1.jpg"]


def test_values_of_a_column_that_comes_late_are_no_signs_of_labels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 400)
    colours = [{"colour": colour} for colour in ("red", "red", "blue", "blue") * 5]
    source = SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table")

    def write(rows: list[dict[str, str]]) -> None:
        lines = (json.dumps({"uri": f"{number}.jpg", **row}) + "\n" for number, row in enumerate(rows))
        (tmp_path / "t.jsonl").write_text("".join(lines))

    write([*[{}] * 30, *colours])
    assert list_images(source).class_names == ()
    write(colours)
    with pytest.raises(UsageError, match="'colour', whose values repeat like class names"):
        list_images(source)


def test_a_repeated_uri_is_a_rejection(tmp_path: Path):
    source = write_table(tmp_path / "t.csv", {"uri": ["a.jpg", "b.jpg", "a.jpg"], "label": ["x", "y", "x"]})
    listing = list_images(source)
    assert listing.num_images == 2 and [str(each.reason) for each in listing.rejections] == ["duplicate_key"]


def test_whole_numbers_are_classes_by_name_where_the_table_has_names(tmp_path: Path):
    rows = {"uri": ["a.jpg", "b.jpg", "c.jpg"], "label": [1, 0, -1]}
    named = write_table(tmp_path / "named.parquet", rows, HF_LABELS)
    assert [image.label for image in images_of(list_images(named))] == ["dog", "cat"]
    assert len(list_images(named).rejections) == 1
    assert [image.label for image in images_of(list_images(write_table(tmp_path / "t.parquet", rows)))] == [
        "1", "0", "-1",
    ]  # fmt: skip
    # What pandas makes of whole numbers beside a missing one.
    floats = write_table(tmp_path / "f.parquet", {"uri": ["a.jpg", "b.jpg"], "label": [3.0, None]})
    assert [image.label for image in images_of(list_images(floats))] == ["3"]
    with pytest.raises(UsageError, match="the labels of g.parquet are double"):
        list_images(write_table(tmp_path / "g.parquet", {"uri": ["a.jpg"], "label": [0.5]}))


def test_a_key_column_names_the_image_and_the_uri_may_change(tmp_path: Path):
    write_images(tmp_path / "old", num_images=40)
    files = sorted((tmp_path / "old").rglob("*.png"))
    keys = [file.stem for file in files]

    def table(folder: str) -> SourceConfig:
        uris = [f"{folder}/{file.parent.name}/{file.name}" for file in files]
        labels = [file.parent.name for file in files]
        return write_table(tmp_path / "t.csv", {"uri": uris, "label": labels, "key": keys})

    before = build_source(table("old"), tmp_path / "before")
    shutil.move(tmp_path / "old", tmp_path / "new")
    assert build_source(table("new"), tmp_path / "after").content_digest == before.content_digest


def test_rows_with_keys_may_name_one_file_which_each_reads_whole(tmp_path: Path):
    source = write_table(tmp_path / "t.csv", {"uri": ["a.jpg", "a.jpg"], "key": ["x", "y"], "label": ["cat", "dog"]})
    images = images_of(list_images(source))
    assert [(image.key, image.container, image.block, image.label) for image in images] == [
        ("x", "a.jpg", NO_BLOCK, "cat"), ("y", "a.jpg", NO_BLOCK, "dog"),
    ]  # fmt: skip


def test_no_group_crosses_splits_and_none_moves_when_the_table_grows(tmp_path: Path):
    found = {}
    for num_rows in (400, 200):
        groups = [f"patient-{number % 50}" for number in range(num_rows)]
        source = write_table(
            tmp_path / "t.parquet", {"uri": [f"{row}.jpg" for row in range(num_rows)], "group": groups}
        )
        pairs = {(groups[image.place - 1], image.split) for image in planned_images(source, tmp_path)}
        found[num_rows] = dict(pairs)
        assert len(pairs) == 50
    assert found[200] == found[400]
    assert Counter(found[400].values()) == {"train": 40, "validation": 7, "test": 3}


def test_a_named_split_comes_before_the_group_and_no_group_leaves_it_to_the_content(tmp_path: Path):
    rows = {"uri": ["a.jpg", "b.jpg", "c.jpg"], "patient": ["x", "x", None], "split": ["test", None, None]}
    source = write_table(tmp_path / "t.csv", rows).model_copy(update={"group_field": "patient"})
    found = {image.key: image.split for image in planned_images(source, tmp_path)}
    assert found["a.jpg"] == "test" and found["b.jpg"] is not None and found["c.jpg"] is None


def planned_images(source: SourceConfig, folder: Path) -> list[SourceImage]:
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / "dataset")), etl=ETL)
    return images_of(plan_build(tree, run_id="r").listing)


def test_missing_and_too_large_files_are_rejections_when_they_are_read(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    (tmp_path / "images" / "big.png").write_bytes(b"x" * 3_000)
    files = [str(file) for file in sorted((tmp_path / "images").rglob("*.png"))]
    source = write_table(tmp_path / "t.csv", {"path": [*files, "images/gone.png"]})
    manifest = build_source(source, tmp_path / "dataset", max_source_bytes=2_000, max_changed_fraction=0.1)
    assert manifest.counts.by_reason == {"missing": 1, "too_large_bytes": 1} and manifest.counts.accepted == 40


def test_sizes_in_a_table_are_held_against_the_files(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40)
    files = sorted((tmp_path / "images").rglob("*.png"))
    sizes = [file.stat().st_size for file in files]
    sizes[3] += 1
    rows = {"uri": [str(file) for file in files], "size_bytes": sizes}
    source = write_table(tmp_path / "t.parquet", rows)
    manifest = build_source(source, tmp_path / "dataset", max_changed_fraction=0.1)
    assert manifest.counts.by_reason == {"source_changed": 1}
    # Sizes of another export in every row: the files are as they were.
    rows["size_bytes"] = [size + 7 for size in sizes]
    source = write_table(tmp_path / "t.parquet", rows)
    says = r"40 of 40 inputs have another size than size_bytes of their row.*; correct the column or leave it out$"
    with pytest.raises(RejectLimitExceeded, match=says):
        build_source(source, tmp_path / "other", max_changed_fraction=0.1)


def test_a_table_in_a_bucket_names_objects_and_no_file_of_this_machine(tmp_path: Path, s3_bucket: str, s3_server: str):
    write_images(tmp_path / "images", num_images=40)
    files = sorted((tmp_path / "images").rglob("*.png"))
    bucket = s3_bucket.removeprefix("s3://")
    for file in files:
        s3_client(s3_server).upload_file(str(file), bucket, f"pile/{file.parent.name}/{file.name}")
    uris = [f"{file.parent.name}/{file.name}" for file in files[1:]]
    uris += [f"s3a://{bucket}/pile/{files[0].parent.name}/{files[0].name}", str(files[0]), f"file://{files[0]}"]
    write_table(tmp_path / "t.csv", {"uri": uris})
    s3_client(s3_server).upload_file(str(tmp_path / "t.csv"), bucket, "pile/t.csv")
    source = SourceConfig(uri=f"{s3_bucket}/pile/t.csv", kind="table")
    manifest = build_source(source, tmp_path / "dataset", max_reject_fraction=0.1)
    assert manifest.counts.accepted == 40 and manifest.counts.by_reason == {"bad_row": 2}


def test_a_file_that_is_not_a_table_ends_with_one_line(tmp_path: Path):
    with pytest.raises(UsageError, match=r"source .*/none.csv contains no \.parquet or \.csv"):
        list_images(SourceConfig(uri=str(tmp_path / "none.csv"), kind="table"))
    source = write_table(tmp_path / "t.csv", {"file": ["a.jpg"], "image_id": ["a"]})
    with pytest.raises(UsageError, match=r"t\.csv has the columns file, image_id; expected .*; image ids are not URIs"):
        list_images(source)
    with pytest.raises(UsageError, match="source\\.uri_field = 'fiel' is not a column; .* did you mean 'file'\\?"):
        list_images(source.model_copy(update={"uri_field": "fiel"}))
    # A column of JSON lines may come with any row: that it never came is known at the end.
    source = write_table(tmp_path / "t.jsonl", {"uri": ["a.jpg"], "splits": ["test"]})
    with pytest.raises(UsageError, match="source\\.split_field = 'splt' is not a column; .* did you mean 'splits'\\?"):
        list_images(source.model_copy(update={"split_field": "splt"}))
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 no table PAR1")
    with pytest.raises(IntegrityError, match=r"the table broken\.parquet does not parse"):
        list_images(SourceConfig(uri=str(tmp_path / "broken.parquet"), kind="table"))


def test_one_long_text_for_every_row_is_refused_before_it_is_written_out(tmp_path: Path):
    long = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"uri": long}), tmp_path / "bomb.parquet")
    assert (tmp_path / "bomb.parquet").stat().st_size < 1_000_000
    with pytest.raises(IntegrityError, match="would become more than"):
        list_images(SourceConfig(uri=str(tmp_path / "bomb.parquet"), kind="table"))


def test_very_many_rows_are_listed_without_one_object_for_each(tmp_path: Path):
    """Memory that Python holds is that of a batch; names that do not exist are not looked for."""
    num_rows = usually(400_000, 1_000_000)
    uris = pa.array(np.char.add(np.char.add("pile/", np.arange(num_rows).astype("U7")), ".jpg"))
    pq.write_table(pa.table({"uri": uris}), tmp_path / "t.parquet")
    source = SOURCES["table"](SourceConfig(uri=str(tmp_path / "t.parquet"), kind="table"))
    tracemalloc.start()
    num_listed = sum(batch.images.num_rows for batch in source.list())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_listed == num_rows and peak_bytes < 20_000_000


def test_a_reader_opens_by_the_absolute_uri_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Tasks have a working directory of their own."""
    write_images(tmp_path / "images", num_images=1)
    write_table(tmp_path / "images" / "t.csv", {"uri": ["class_0/00000.png"]})
    monkeypatch.chdir(tmp_path)
    relative = SourceConfig(uri="images/t.csv", kind="table")
    source = SOURCES["table"](relative)
    assert source.uri == f"{open_store(tmp_path).uri}/images/t.csv"
    monkeypatch.chdir("/")
    reader = SOURCES["table"](relative.model_copy(update={"uri": source.uri})).open(10_000)
    [image] = images_of(list_images(relative.model_copy(update={"uri": source.uri})))
    assert reader.read(image) == (tmp_path / "images" / "class_0" / "00000.png").read_bytes()
    assert reader.is_there(image.key)


def test_a_csv_file_without_a_header_line_is_reported(tmp_path: Path):
    (tmp_path / "t.csv").write_text("a.jpg,cat\nb.jpg,dog\n")
    with pytest.raises(UsageError) as caught:
        list_images(SourceConfig(uri=str(tmp_path / "t.csv"), kind="table"))
    assert "such as uri,label" in caught.value.fix


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def table_of(uri: str) -> SourceConfig:
    return SourceConfig(uri=uri, kind="table")


def two_folders(root: Path) -> None:
    for name in ("a", "b"):
        write(root / name / "labels.csv", f"uri,label\n1.jpg,{name}\n./2.jpg,{name}\n")
        for number in (1, 2):
            write(root / name / f"{number}.jpg", f"{name}{number}")


def read_all(source: SourceConfig) -> dict[str, bytes]:
    reader = SOURCES["table"](source).open(1_000)

    def data(image: SourceImage) -> bytes:
        assert reader.is_there(image.container or image.key)
        found = reader.read(image)
        assert isinstance(found, bytes)
        return found

    return {image.key: data(image) for image in images_of(list_images(source))}


@pytest.mark.parametrize("uri", ["", "/*/labels.csv", "/{a,b}/labels.csv"])
def test_tables_of_two_folders_name_the_files_beside_them(uri: str, tmp_path: Path):
    two_folders(tmp_path)
    found = read_all(table_of(f"{tmp_path}{uri}"))
    assert found == {"a/1.jpg": b"a1", "a/2.jpg": b"a2", "b/1.jpg": b"b1", "b/2.jpg": b"b2"}


def test_a_table_in_the_root_keeps_its_keys(tmp_path: Path):
    two_folders(tmp_path)
    assert list(read_all(table_of(f"{tmp_path}/a/labels.csv"))) == ["1.jpg", "2.jpg"]
    write(tmp_path / "c" / "t.csv", "uri\n../a/1.jpg\nd/../3.jpg\n")
    keys = [image.key for image in images_of(list_images(table_of(f"{tmp_path}/c")))]
    assert keys == ["../a/1.jpg", "d/../3.jpg"]


def test_one_file_has_one_key_whichever_table_names_it(tmp_path: Path):
    two_folders(tmp_path)
    write(tmp_path / "a" / "more.csv", "uri,label\n../b/1.jpg,b\n../../elsewhere.jpg,x\n")
    write(tmp_path / "index.csv", "uri,label\nb/2.jpg,b\n")
    listing = list_images(table_of(str(tmp_path)))
    assert [image.key for image in images_of(listing)] == [
        "../elsewhere.jpg", "a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg",
    ]  # fmt: skip
    assert [str(each.reason) for each in listing.rejections] == ["duplicate_key"] * 2


def test_absolute_uris_stay_and_faults_are_those_of_the_row(tmp_path: Path):
    rows = ["/abs/1.jpg", "s3://bucket/2.jpg", "https://host/3.jpg", "C:\\\\4.jpg", "ftp://host/5.jpg", "sub\\6.jpg"]
    write(tmp_path / "a" / "t.csv", "uri\n" + "\n".join(rows) + "\n")
    listing = list_images(table_of(str(tmp_path)))
    keys = [image.key for image in images_of(listing)]
    assert keys == ["/abs/1.jpg", "a/sub/6.jpg", "https://host/3.jpg", "s3://bucket/2.jpg"]
    assert sorted(each.key for each in listing.rejections) == ["a/t.csv\x004", "a/t.csv\x005"]


def test_names_are_looked_up_beside_the_table(tmp_path: Path):
    write(tmp_path / "a" / "t.csv", "uri\nx\\1.jpg\n")
    write(tmp_path / "a" / "x\\1.jpg", "x")
    write(tmp_path / "b" / "t.csv", "uri\n0001\n")
    write(tmp_path / "b" / "0001", "x")
    assert [image.key for image in images_of(list_images(table_of(str(tmp_path))))] == ["a/x\\1.jpg", "b/0001"]


def test_a_key_of_its_own_reads_the_file_beside_its_table(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name / "t.csv", f"uri,key\n1.jpg,k{name}\n1.jpg,same\n")
        write(tmp_path / name / "1.jpg", name)
    # The key is the image, whatever table has it.
    assert read_all(table_of(str(tmp_path))) == {"ka": b"a", "kb": b"b", "same": b"a"}
    [again] = list_images(table_of(str(tmp_path))).rejections
    assert (again.key, again.reason) == ("same\x002", RejectReason.DUPLICATE_KEY)


def test_paths_from_the_source_s_root_are_distinguished_from_lost_files(tmp_path: Path):
    write(tmp_path / "images" / "1.jpg", "x")
    write(tmp_path / "lists" / "t.csv", "uri\nimages/1.jpg\n")
    with pytest.raises(UsageError, match=r"the table lists/t\.csv names files as 'images/1\.jpg'") as caught:
        list_images(table_of(str(tmp_path)))
    assert "../images/1.jpg" in caught.value.fix
    write(tmp_path / "lists" / "t.csv", "uri\n../images/1.jpg\n")
    assert read_all(table_of(str(tmp_path))) == {"images/1.jpg": b"x"}


def test_tables_in_a_bucket_lead_from_their_folders(tmp_path: Path, s3_bucket: str, s3_server: str):
    write_images(tmp_path / "images", num_images=20)
    bucket, client = s3_bucket.removeprefix("s3://"), s3_client(s3_server)
    for name in ("a", "b"):
        files = sorted((tmp_path / "images").rglob("*.png"))[name == "b" :: 2]
        uris = [file.name for file in files] if name == "a" else [f"../pictures/{file.name}" for file in files]
        for file in files:
            client.upload_file(str(file), bucket, f"pile/{'a' if name == 'a' else 'pictures'}/{file.name}")
        client.put_object(Bucket=bucket, Key=f"pile/{name}/t.csv", Body="\n".join(["uri", *uris]).encode())
    manifest = build_source(table_of(f"{s3_bucket}/pile"), tmp_path / "dataset")
    assert manifest.counts.accepted == 20 and not manifest.counts.rejected


VALUES = {"split": "test", "group": "g", "label": "cat", "key": "k", "size_bytes": 5, "mtime_ns": 5}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(table_rows, "_BLOCK_BYTES", 100)


def table(tmp_path: Path, last: dict[str, Any], first: dict[str, Any] | None = None) -> SourceConfig:
    rows = [{"uri": f"{row}.jpg", **(first or {})} for row in range(20)] + [{"uri": "20.jpg", **last}]
    (tmp_path / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", VALUES)
def test_a_key_that_comes_late_is_not_ignored(name: str, tmp_path: Path):
    with pytest.raises(UsageError, match=rf"row 21 of the table t\.jsonl is the first with the key '{name}'") as caught:
        list_images(table(tmp_path, {name: VALUES[name]}))
    assert "write it in the first row too" in caught.value.fix
    assert (f"set source.{name}_field={name}" in caught.value.fix) == ("_" not in name)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("name", ["split", "group", "label", "key"])
@pytest.mark.parametrize("is_named", [True, False], ids=["in the config", "in the first row"])
def test_a_column_that_the_config_or_the_first_row_names_may_come_late(name: str, is_named: bool, tmp_path: Path):
    source = table(tmp_path, {name: VALUES[name]}, first=None if is_named else {name: None})
    if is_named:
        source = source.model_copy(update={f"{name}_field": name})
    listing = list_images(source)
    [last] = [image for image in images_of(listing) if image.place == 21]
    found = {"split": last.split, "label": last.label, "key": last.key.rpartition("\0")[2], "group": "g"}
    assert found[name] == VALUES[name]
    # As in a table whose rows lack a value: a label and a key are needed, a split and a group are not.
    assert len(listing.rejections) == (20 if name in ("label", "key") else 0)


@pytest.mark.usefixtures("small_blocks")
def test_a_column_of_the_config_that_no_row_has_is_no_column(tmp_path: Path):
    source = table(tmp_path, {"split": "test"}).model_copy(update={"split_field": "splt"})
    with pytest.raises(UsageError, match="source.split_field = 'splt' is not a column; .*did you mean 'split'"):
        list_images(source)


@pytest.mark.usefixtures("small_blocks")
def test_a_better_name_for_the_same_column_is_not_taken_halfway(tmp_path: Path):
    with pytest.raises(UsageError, match="row 21 .* is the first with the key 'label'"):
        list_images(table(tmp_path, {"label": "cat", "class": "cat"}, first={"class": "dog"}))
    with pytest.raises(UsageError, match="row 21 .* is the first with the key 'uri'"):
        (tmp_path / "t.jsonl").write_text('{"path": "a.jpg"}\n' * 20 + '{"path": "b.jpg", "uri": "c.jpg"}\n')
        list_images(SourceConfig(uri=str(tmp_path / "t.jsonl"), kind="table"))


@pytest.mark.usefixtures("small_blocks")
def test_a_key_without_values_changes_nothing(tmp_path: Path):
    assert list_images(table(tmp_path, {"split": None, "label": None, "more": 1})).num_images == 21


@pytest.mark.usefixtures("small_blocks")
def test_a_late_key_that_is_named_like_one_of_ours_is_reported(tmp_path: Path):
    [warning] = list_images(table(tmp_path, {"splt": "test"})).warnings
    assert "its column 'splt' is ignored" in warning
    with pytest.raises(UsageError, match="category"):
        list_images(table(tmp_path, {"category": "cat"}))


def test_a_shard_number_behind_the_suffix_hides_no_format(tmp_path: Path):
    source = write_table(tmp_path / "t.csv", {"uri": ["a.jpg", "b.jpg"], "label": ["cat", "dog"]})
    numbered = (tmp_path / "t.csv").rename(tmp_path / "t.csv-00000-of-00002")
    assert recognise(str(numbered)) == "table"
    assert list_images(source.model_copy(update={"uri": str(numbered)})).num_images == 2
