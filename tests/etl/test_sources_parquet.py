"""Images in a Parquet column: rows are images, row groups are read once, and no file can claim more than it holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlTree, SourceConfig
from etl.plan import plan_build
from etl.sources import SOURCES
from etl.sources.parquet_columns import BytesRows
from etl.sources.recognise import recognise
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.values import Rejection
from tests.etl.building import ETL, build_source, images_of, list_images
from tests.etl.source_files import picture
from tests.services.s3 import s3_client


def write_rows(file: Path, columns: dict[str, list], **options: object) -> SourceConfig:
    file.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), file, **options)
    return SourceConfig(uri=str(file), kind="parquet")


def pictures(count: int) -> list[bytes]:
    return [picture(number) for number in range(count)]


def test_rows_are_keyed_by_number_or_by_a_key_column(tmp_path: Path):
    source = write_rows(
        tmp_path / "a.parquet", {"image": pictures(3), "label": ["x", "y", "x"], "key": ["p", "q", "r"]}
    )
    assert [image.key for image in images_of(list_images(source))] == ["p", "q", "r"]
    source = write_rows(tmp_path / "a.parquet", {"image": pictures(3), "class": ["x", "y", "x"]}, row_group_size=2)
    images = images_of(list_images(source))
    assert [(image.key, image.label, image.block) for image in images] == [
        ("a.parquet\0" "0", "x", 0), ("a.parquet\0" "1", "y", 0), ("a.parquet\0" "2", "x", 1),
    ]  # fmt: skip


def test_a_large_row_group_is_several_units(tmp_path: Path):
    few = pictures(40)
    rows = {"image": [few[number % 40] for number in range(3_000)], "label": ["x"] * 3_000}
    source = write_rows(tmp_path / "a.parquet", rows, row_group_size=2_500)
    images = images_of(list_images(source))
    blocks = Counter(image.block for image in images)
    # The numbers of the groups stay for blocks that are first in theirs.
    assert blocks == {0: 1_024, 2: 1_024, 4: 452, 1: 500}
    plan = plan_build(
        EtlTree(
            source=source, dataset=DatasetConfig(uri=str(tmp_path / "dataset")),
            etl=ETL.model_copy(update={"unit_min_images": 100}),
        ), run_id="r",
    )  # fmt: skip
    assert max(unit.num_images for unit in plan.units) < 2_500
    # Read from the middle of the group, rows are the right ones.
    reader = SOURCES["parquet"](source).open(10_000)
    by_place = sorted(images, key=lambda image: (image.block, image.place))
    assert all(reader.read(image) == few[image.place % 40] for image in by_place[::97])


def test_splits_come_from_a_column_or_from_the_files_names(tmp_path: Path):
    rows = {"image": pictures(3), "split": ["train", "val", "odd"]}
    listing = list_images(write_rows(tmp_path / "a.parquet", rows))
    assert [image.split for image in images_of(listing)] == ["train", "validation"]
    assert [str(each.reason) for each in listing.rejections] == ["bad_row"]
    for name in ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet", "test-00000-of-00001.parquet"):
        write_rows(tmp_path / "hf" / "data" / name, {"image": pictures(2)})
    listing = list_images(SourceConfig(uri=str(tmp_path / "hf"), kind="parquet"))
    assert Counter(image.split for image in images_of(listing)) == {"train": 4, "test": 2}
    assert recognise(str(tmp_path / "hf")) == "parquet"


def test_rows_without_an_image_or_with_too_large_a_one_are_rejections(tmp_path: Path):
    images = [*pictures(40), None, b"x" * 5000, b""]
    manifest = build_source(
        write_rows(tmp_path / "a.parquet", {"image": images}), tmp_path / "d", max_source_bytes=4000,
        max_reject_fraction=0.5,
    )  # fmt: skip
    assert manifest.counts.by_reason == {"bad_row": 1, "too_large_bytes": 1, "empty_file": 1}


def test_another_image_column_is_another_dataset(tmp_path: Path):
    """The listing is the same; what is read is not."""
    rows = {"image": pictures(40), "mask": pictures(80)[40:]}
    source = write_rows(tmp_path / "a.parquet", rows)
    first = build_source(source, tmp_path / "d")
    second = build_source(source.model_copy(update={"image_field": "mask"}), tmp_path / "d")
    assert second.version == 2 and second.content_digest != first.content_digest
    with pytest.raises(UsageError, match="source\\.image_field = 'masc' is not a column; .* did you mean 'mask'"):
        list_images(source.model_copy(update={"image_field": "masc"}))


def test_a_file_without_images_is_refused_and_recognised_as_a_table(tmp_path: Path):
    source = write_rows(tmp_path / "a.parquet", {"uri": ["a.jpg"], "label": ["x"]})
    assert recognise(source.uri) == "table"
    with pytest.raises(UsageError, match=r"a\.parquet has the columns uri, label; .* source\.kind=table"):
        list_images(source)


def test_damage_costs_the_rows_that_it_hits_and_no_other_file(tmp_path: Path):
    write_rows(tmp_path / "in" / "a.parquet", {"image": pictures(60)}, row_group_size=20, use_dictionary=False)
    write_rows(tmp_path / "in" / "b.parquet", {"image": pictures(90)[60:]})
    (tmp_path / "in" / "c.parquet").write_bytes(b"no Parquet at all")
    source = SourceConfig(uri=str(tmp_path / "in"), kind="parquet")
    group = pq.read_metadata(tmp_path / "in" / "a.parquet").row_group(1).column(0)
    data = bytearray((tmp_path / "in" / "a.parquet").read_bytes())
    start = group.data_page_offset
    data[start : start + 12] = b"\xff" * 12
    (tmp_path / "in" / "a.parquet").write_bytes(bytes(data))
    manifest = build_source(source, tmp_path / "dataset", max_reject_fraction=0.5)
    assert manifest.counts.by_reason == {"damaged_container": 21} and manifest.counts.accepted == 70


def test_a_footer_that_claims_more_rows_than_bytes_lists_nothing(tmp_path: Path):
    nothing = pa.array(np.zeros(3_000_000, np.int32))
    images = pa.DictionaryArray.from_arrays(nothing, pa.array([b"x"]))
    pq.write_table(pa.table({"image": images}), tmp_path / "in.parquet")
    assert (tmp_path / "in.parquet").stat().st_size < 100_000
    [batch] = [
        batch
        for batch in SOURCES["parquet"](SourceConfig(uri=str(tmp_path / "in.parquet"), kind="parquet")).list()
        if batch.rejections
    ]
    assert "claims 3000000 rows" in batch.rejections[0].detail


def test_one_large_image_for_every_row_is_decoded_a_few_rows_at_a_time(tmp_path: Path):
    """The page holds it once; 64 rows of it at once would be 4 GB."""
    one = pa.DictionaryArray.from_arrays(pa.array(np.zeros(1_000, np.int32)), pa.array([bytes(60_000_000)]))
    pq.write_table(
        pa.table({"image": one}), tmp_path / "a.parquet", dictionary_pagesize_limit=1 << 30, store_schema=False
    )
    with open(tmp_path / "a.parquet", "rb") as stream:
        assert BytesRows(stream, "a.parquet", "")._rows_at_once(0) == 4
    source = SourceConfig(uri=str(tmp_path / "a.parquet"), kind="parquet")
    [image, *_] = images_of(list_images(source))
    read = SOURCES["parquet"](source).open(1_000).read(image)
    assert isinstance(read, Rejection) and read.reason == "too_large_bytes"


def test_files_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    rows = {"image": pictures(50), "label": [number % 3 for number in range(50)]}
    local = write_rows(tmp_path / "a.parquet", rows, row_group_size=10)
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "pile/a.parquet")
    remote = SourceConfig(uri=f"{s3_bucket}/pile/a.parquet", kind="parquet")
    before = build_source(local, tmp_path / "local")
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest
    # A folder there is recognised by looking, as a local one is.
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "hf/data/a.parquet")
    found = [recognise(f"{s3_bucket}/{name}") for name in ("pile", "hf", "pile/a.parquet", "nothing", "pile/*.csv")]
    assert found == ["parquet", "parquet", "parquet", "folders", "table"]
