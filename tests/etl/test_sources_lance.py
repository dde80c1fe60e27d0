"""Lance tables as sources; what holds for tables of versions also of Delta is in `test_sources_parquet.py`."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, UsageError
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import picture
from tests.shardmill.images.make import photo, png

lance = pytest.importorskip("lance")


def write(table: Path, ids: range, **options: object) -> SourceConfig:
    rows = pa.table(
        {
            "id": [*ids],
            "label": [f"c{number % 3}" for number in ids],
            "image": pa.array([picture(number) for number in ids], pa.large_binary()),
        }
    )
    lance.write_dataset(rows, str(table), mode="append" if table.exists() else "create", **options)
    return SourceConfig(kind="lance", uri=str(table), key_field="id")


def ids_of(source: SourceConfig) -> list[int]:
    listing = list_images(source)
    assert not listing.rejections
    return sorted(int(image.key) for image in images_of(listing))


def test_the_rows_of_a_version_are_listed_and_read(tmp_path: Path):
    source = write(tmp_path / "t", range(9))
    write(tmp_path / "t", range(9, 12))
    lance.dataset(source.uri).delete("id = 3")
    assert recognise(source.uri) == recognise(f"{source.uri}@1") == "lance"
    assert ids_of(source) == [0, 1, 2, *range(4, 12)]
    assert ids_of(source.model_copy(update={"uri": f"{source.uri}@1"})) == [*range(9)]
    reader = SOURCES["lance"](source).open(10_000)
    assert all(reader.read(image) == picture(int(image.key)) for image in reversed(images_of(list_images(source))))
    manifest = build_source(source, tmp_path / "dataset")
    assert (manifest.counts.accepted, manifest.class_names) == (11, ("c0", "c1", "c2"))
    assert manifest.source.uri == source.uri


def test_rows_are_keyed_by_their_number_without_a_key_column(tmp_path: Path):
    source = write(tmp_path / "t", range(6)).model_copy(update={"key_field": ""})
    first = {image.key for image in images_of(list_images(source))}
    lance.dataset(source.uri).delete("id = 2")
    left = {image.key for image in images_of(list_images(source))}
    [gone] = first - left
    assert left < first and gone.rpartition("\0")[2] == "2"


def test_later_versions_are_the_same_source(tmp_path: Path):
    source = write(tmp_path / "t", range(6))
    first = build_source(source, tmp_path / "dataset")
    write(tmp_path / "t", range(6, 9))
    second = build_source(source, tmp_path / "dataset")
    assert (first.counts.accepted, second.counts.accepted, second.version) == (6, 9, 2)
    # Compaction moves rows to other files, and changes none.
    lance.dataset(source.uri).optimize.compact_files()
    assert build_source(source, tmp_path / "dataset").content_digest == second.content_digest


def test_a_large_fragment_is_several_blocks(tmp_path: Path):
    source = write(tmp_path / "t", range(2_500))
    images = images_of(list_images(source))
    assert sorted({image.block for image in images}) == [0, 1, 2]
    reader = SOURCES["lance"](source).open(10_000)
    assert all(reader.read(image) == picture(int(image.key)) for image in images[::97])


@pytest.mark.parametrize("stored", ["2.1", "2.2"])
def test_blobs_are_images(stored: str, tmp_path: Path):
    """Columns that a scan does not read; their type is one of bytes, and from 2.2 on one of its own."""
    field = pa.field("image", pa.large_binary(), metadata={"lance-encoding:blob": "true"})
    schema = pa.schema([field, pa.field("id", pa.int64())])
    rows = pa.table({"image": [picture(number) for number in range(4)], "id": [*range(4)]}, schema=schema)
    lance.write_dataset(rows, str(tmp_path / "t"), data_storage_version=stored)
    source = SourceConfig(kind="lance", uri=str(tmp_path / "t"), key_field="id")
    reader = SOURCES["lance"](source).open(10_000)
    images = images_of(list_images(source))
    assert [reader.read(image) for image in images] == [picture(int(image.key)) for image in images]


def test_rows_that_name_their_images_are_read_like_those_of_any_table(tmp_path: Path):
    (tmp_path / "1.png").write_bytes(png(photo()))
    lance.write_dataset(pa.table({"uri": [str(tmp_path / "1.png")], "label": ["cat"]}), str(tmp_path / "t"))
    manifest = build_source(SourceConfig(kind="lance", uri=str(tmp_path / "t")), tmp_path / "dataset")
    assert (manifest.counts.accepted, manifest.class_names) == (1, ("cat",))


def test_what_cannot_be_read_is_said_in_one_line(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no Lance table at .*; expected a folder with _versions"):
        list_images(SourceConfig(kind="lance", uri=str(tmp_path / "none")))
    source = write(tmp_path / "t", range(4), max_rows_per_file=2)
    with pytest.raises(UsageError, match="has no version 7"):
        list_images(source.model_copy(update={"uri": f"{source.uri}@7"}))
    with pytest.raises(UsageError, match="source\\.key_field = 'idd' is not a column; .* did you mean 'id'"):
        list_images(source.model_copy(update={"key_field": "idd"}))
    [image, *_] = images_of(list_images(source))
    file = tmp_path / "t" / image.container
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    listing = list_images(source)
    assert (listing.num_images, [str(each.reason) for each in listing.rejections]) == (2, ["damaged_container"])
    assert "does not parse as Lance" in next(iter(listing.rejections)).detail
    read = SOURCES["lance"](source).open(10_000).read(image)
    assert isinstance(read, Rejection) and read.reason == "source_changed"
    file.unlink()
    with pytest.raises(IntegrityError, match="has lost 1 of its 2 files"):
        list_images(source)


def test_a_named_column_of_uris_goes_before_columns_of_bytes(tmp_path: Path):
    """Small pictures of the images may stand beside their paths."""
    files = [tmp_path / f"{number}.png" for number in range(4)]
    for number, file in enumerate(files):
        file.write_bytes(picture(number))
    rows = pa.table({"path": [str(file) for file in files], "label": ["a", "b"] * 2, "small": [b"x"] * 4})
    lance.write_dataset(rows, str(tmp_path / "t"))
    source = SourceConfig(kind="lance", uri=str(tmp_path / "t"), uri_field="path")
    reader = SOURCES["lance"](source).open(10_000)
    assert [reader.read(image) for image in images_of(list_images(source))] == [picture(number) for number in range(4)]
