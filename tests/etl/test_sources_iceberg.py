"""Iceberg tables as sources; what holds for tables of versions also of Delta is in `test_sources_parquet.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.dataset import open_dataset
from shardmill.values import Rejection
from tests.etl.building import ETL, build_source, images_of, list_images
from tests.etl.source_files import picture
from tests.lab.datasets import HERE
from tests.services.s3 import s3_client

pytest.importorskip("tests.etl.iceberg_tables", reason="pyiceberg is in the extra `iceberg`")

import pyiceberg.catalog
from pyiceberg.expressions import AlwaysTrue
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import BinaryType, IntegerType, LongType, NestedField, StringType
from pyiceberg.utils.config import Config

from tests.etl.iceberg_tables import catalog_in, with_deletes

SCHEMA = Schema(
    NestedField(1, "id", IntegerType()), NestedField(2, "label", StringType()), NestedField(3, "image", BinaryType())
)
BY_LABEL = PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "label"))


def rows(ids: range) -> pa.Table:
    columns = {"id": pa.array(ids, pa.int32()), "label": [f"c{number % 3}" for number in ids]}
    return pa.table({**columns, "image": pa.array([picture(number) for number in ids], pa.large_binary())})


def write(folder: Path, ids: range, spec: PartitionSpec | None = None) -> Table:
    catalog = catalog_in(folder)
    given = {} if spec is None else {"partition_spec": spec}
    table = catalog.create_table_if_not_exists("photos.train", SCHEMA, **given)
    table.append(rows(ids))
    return table


def source(uri: str) -> SourceConfig:
    return SourceConfig(kind="iceberg", uri=uri.removeprefix("file://"), key_field="id")


def current(table: Table) -> SourceConfig:
    """By its newest metadata file."""
    return source(table.refresh().metadata_location)


def ids_of(config: SourceConfig) -> list[int]:
    listing = list_images(config)
    assert not listing.rejections
    return sorted(int(image.key) for image in images_of(listing))


def snapshot_of(table: Table) -> int:
    snapshot = table.refresh().current_snapshot()
    assert snapshot is not None
    return snapshot.snapshot_id


@pytest.fixture
def as_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The catalog `local`, as users set it."""
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__URI", f"sqlite:///{tmp_path}/catalog.db")
    monkeypatch.setenv("PYICEBERG_CATALOG__LOCAL__WAREHOUSE", f"file://{tmp_path}")
    monkeypatch.setenv("PYICEBERG_CATALOG__EMPTY__URI", "sqlite:////no/such/folder/catalog.db")
    # The library has read its settings when it was imported.
    monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", Config())


@pytest.mark.parametrize("spec", [None, BY_LABEL], ids=["whole", "by label"])
def test_the_rows_of_a_snapshot_are_listed_and_read(spec: PartitionSpec | None, tmp_path: Path):
    table = write(tmp_path, range(9), spec)
    first = snapshot_of(table)
    table.append(rows(range(9, 12)))
    table.delete("id = 3")
    config = current(table)
    assert recognise(config.uri) == recognise(f"{config.uri}@{first}") == "iceberg"
    assert ids_of(config) == [0, 1, 2, *range(4, 12)]
    assert ids_of(source(f"{config.uri}@{first}")) == [*range(9)]
    reader = SOURCES["iceberg"](config).open(10_000)
    assert all(reader.read(image) == picture(int(image.key)) for image in reversed(images_of(list_images(config))))
    manifest = build_source(config, tmp_path / "dataset")
    assert (manifest.counts.accepted, manifest.class_names) == (11, ("c0", "c1", "c2"))
    assert manifest.source.uri == str(tmp_path / "photos" / "train")


@pytest.mark.usefixtures("as_default")
def test_a_table_is_found_by_its_folder_a_metadata_file_or_its_catalog(tmp_path: Path):
    """All are one source, and all its snapshots."""
    table = write(tmp_path, range(6))
    named, folder = "iceberg://local/photos.train", tmp_path / "photos" / "train"
    first = build_source(source(named), tmp_path / "dataset")
    table.append(rows(range(6, 9)))
    second = build_source(current(table), tmp_path / "dataset")
    assert (first.counts.accepted, second.counts.accepted, second.version) == (6, 9, 2)
    assert recognise(named) == recognise(str(folder)) == recognise(f"{folder}@{snapshot_of(table)}") == "iceberg"
    assert build_source(source(named), tmp_path / "dataset") == second
    assert ids_of(source(f"{folder}@{snapshot_of(table)}")) == ids_of(source(named)) == [*range(9)]
    with pytest.raises(UsageError, match="is known to its catalog; .* the newest is .*00002-.*metadata.json"):
        list_images(source(str(folder)))
    # What writers without a catalog leave.
    (folder / "metadata" / "version-hint.text").write_text("1\n")
    assert ids_of(source(str(folder))) == [*range(6)]
    # A folder that was moved as it is: locations lead to where it is now.
    folder.rename(tmp_path / "moved")
    assert ids_of(source(str(tmp_path / "moved"))) == [*range(6)]


def test_a_table_in_a_bucket_is_read_like_a_local_one(tmp_path: Path, s3_server: str, s3_bucket: str):
    table = write(tmp_path, range(9))
    table.delete("id = 3")
    before = build_source(current(table), tmp_path / "dataset")
    folder, client = tmp_path / "photos", s3_client(s3_server)
    for file in (path for path in folder.rglob("*") if path.is_file()):
        client.upload_file(str(file), s3_bucket.removeprefix("s3://"), str(file.relative_to(folder)))
    remote = source(f"{s3_bucket}{current(table).uri.removeprefix(str(folder))}")
    assert recognise(remote.uri) == recognise(f"{s3_bucket}/train@{snapshot_of(table)}") == "iceberg"
    assert recognise(f"{s3_bucket}/train/data") == "parquet"
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest


@pytest.mark.parametrize("how", ["positions", "vectors", "equality"])
def test_rows_that_a_file_of_deletes_names_are_no_images(how: str, tmp_path: Path):
    table = write(tmp_path, range(3_000))
    table.append(rows(range(3_000, 3_010)))
    [small, large] = sorted((task.file for task in table.scan().plan_files()), key=lambda file: file.record_count)
    deleted = {large.file_path: [0, 7, 2_999], small.file_path: [9]}
    config = source(with_deletes(table, deleted, how)).model_copy(update={"key_field": ""})
    if how == "equality":
        with pytest.raises(UsageError, match="deleted by equality, .*rewrite_data_files"):
            list_images(config)
        return
    images = images_of(list_images(config))
    before = images_of(list_images(current(table).model_copy(update={"key_field": ""})))
    gone = {image.key for image in before} - {image.key for image in images}
    # The others keep their numbers, and so their keys.
    assert (len(images), sorted(int(key.rpartition("\0")[2]) for key in gone)) == (3_006, [0, 7, 9, 2_999])
    reader = SOURCES["iceberg"](config).open(10_000)
    start = {image.container: image for image in images if image.place == 8}
    first_ids = {large.file_path: 0, small.file_path: 3_000}
    for location, first in first_ids.items():
        image = next(each for path, each in start.items() if location.endswith(path))
        assert reader.read(image) == picture(first + 8)


def test_columns_are_those_of_the_table_whatever_names_its_files_have(tmp_path: Path):
    table = write(tmp_path, range(4))
    with table.update_schema() as update:
        update.rename_column("label", "old").rename_column("image", "photo").update_column("id", LongType())
        update.add_column("year", IntegerType())
    with table.update_schema() as update:
        update.delete_column("old").add_column("label", StringType())
    added = {"id": pa.array([4, 5], pa.int64()), "photo": pa.array([picture(4), picture(5)], pa.large_binary())}
    table.append(pa.table({**added, "label": ["new", "new"], "year": pa.array([2026, None], pa.int32())}))
    config = current(table).model_copy(update={"extra_columns": ("year",), "key_field": "id"})
    listing = list_images(config)
    # The column `label` of the older file is the dropped one, and no label of these rows.
    assert [each.detail for each in listing.rejections] == [f"row {number}: no label" for number in range(4)]
    assert {image.key: image.label for image in images_of(listing)} == {"4": "new", "5": "new"}
    with table.update_schema() as update:
        update.delete_column("label")
    table.append(pa.table({"id": pa.array([6], pa.int64()), "photo": pa.array([picture(6)], pa.large_binary())}))
    config = current(table).model_copy(update={"extra_columns": ("year",), "label_kind": "none"})
    tree = EtlTree(
        source=config, dataset=DatasetConfig(uri=str(tmp_path / "dataset")), etl=ETL.model_copy(update={"engine": HERE})
    )
    manifest = build_dataset(tree, run_id="r").manifest
    assert (manifest.counts.accepted, manifest.columns["year"]) == (7, "int64")
    dataset = open_dataset(str(tmp_path / "dataset"))
    years = [year for split in manifest.splits for year in dataset.to_pandas(split)["year"].tolist()]
    assert sorted(year for year in years if year == year and year is not None) == [2026]
    reader = SOURCES["iceberg"](config).open(10_000)
    assert all(reader.read(image) == picture(int(image.key)) for image in images_of(list_images(config)))


def test_files_without_ids_and_partition_columns_are_read_by_the_tables_names(tmp_path: Path):
    """As files are that another program has written, and that were then added to a table."""
    catalog = catalog_in(tmp_path)
    table = catalog.create_table("photos.train", SCHEMA, partition_spec=BY_LABEL)
    file = tmp_path / "photos" / "train" / "label=c1" / "a.parquet"
    file.parent.mkdir()
    pq.write_table(rows(range(1, 10, 3)), file)
    table.add_files([str(file)])
    # Hive keeps the values of partitions in names of folders alone.
    pq.write_table(rows(range(1, 10, 3)).drop_columns(["label"]), file)
    listing = list_images(current(table))
    assert not listing.rejections
    assert {image.key: image.label for image in images_of(listing)} == {"1": "c1", "4": "c1", "7": "c1"}


def test_what_would_read_other_rows_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no Iceberg table at .*; expected a folder with metadata/"):
        list_images(source(str(tmp_path / "none")))
    catalog = catalog_in(tmp_path)
    empty = catalog.create_table("photos.empty", SCHEMA)
    with pytest.raises(UsageError, match="the table .* is empty"):
        list_images(current(empty))
    table = write(tmp_path, range(4))
    first, uri = snapshot_of(table), current(table).uri
    with pytest.raises(UsageError, match="has no snapshot 7; expected one that has not expired"):
        list_images(source(f"{uri}@7"))
    with pytest.raises(UsageError, match="source\\.key_field = 'idd' is not a column; .* did you mean 'id'"):
        list_images(source(uri).model_copy(update={"key_field": "idd"}))
    # A snapshot that a build has planned is the one that it reads, whatever comes after it.
    config = source(uri)
    planned = list_images(config)
    pinned = source(SOURCES["iceberg"](config).uri)
    assert pinned.uri.endswith(f"photos/train@{first}")
    table.overwrite(rows(range(50, 53)), overwrite_filter=AlwaysTrue())
    assert ids_of(pinned) == ids_of(config) == [0, 1, 2, 3] and ids_of(current(table)) == [50, 51, 52]
    [image, *_] = images_of(planned)
    assert SOURCES["iceberg"](pinned).open(10_000).read(image) == picture(int(image.key))
    file = tmp_path / "photos" / "train" / image.container
    file.write_bytes(file.read_bytes()[:200])
    read = SOURCES["iceberg"](pinned).open(10_000).read(image)
    assert isinstance(read, Rejection) and read.reason == "source_changed"
    with pytest.raises(UsageError, match="no images below .*: all 1 inputs .*damaged_container"):
        list_images(pinned)
    file.unlink()
    with pytest.raises(IntegrityError, match="has lost 1 of its 1 files, .*expire_snapshots deletes"):
        list_images(pinned)
    Path(uri).write_text("{}")
    with pytest.raises(StorageError, match="cannot be opened: .*; expected readable metadata"):
        list_images(source(uri))


def test_tables_that_are_spread_over_other_places_are_refused(tmp_path: Path):
    catalog = catalog_in(tmp_path)
    properties = {"write.data.path": f"file://{tmp_path}/elsewhere"}
    table = catalog.create_table("photos.train", SCHEMA, properties=properties)
    table.append(rows(range(3)))
    with pytest.raises(UsageError, match="has files elsewhere, such as .*/elsewhere/"):
        list_images(current(table))
    with pytest.raises(UsageError, match="is not in a folder metadata"):
        list_images(source("photos/v1.metadata.json"))


@pytest.mark.usefixtures("as_default")
def test_what_a_catalog_does_not_find_is_said_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, range(3))
    with pytest.raises(UsageError, match="the catalog local has no table photos.other"):
        list_images(source("iceberg://local/photos.other"))
    with pytest.raises(UsageError, match="no settings of a catalog lcoal; expected one of empty, local; correct"):
        list_images(source("iceberg://lcoal/photos.train"))
    with pytest.raises(StorageError, match="the catalog empty cannot be asked for .*`pyiceberg --catalog empty list`"):
        list_images(source("iceberg://empty/photos.train"))
    with pytest.raises(UsageError, match="expected iceberg://CATALOG/NAMESPACE.TABLE"):
        list_images(source("iceberg://local"))
    monkeypatch.setitem(sys.modules, "pyiceberg.catalog.sql", None)
    with pytest.raises(UsageError, match="the catalog local needs a package: .*`pip install 'pyiceberg.sql-sqlite.'`"):
        list_images(source("iceberg://local/photos.train"))
