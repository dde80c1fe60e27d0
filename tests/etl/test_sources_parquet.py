"""Parquet, Delta and TFRecord as sources."""

from __future__ import annotations

import gzip
import json
import lzma
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.listing.listing import Listing
from etl.plan import plan_build
from etl.sources import SOURCES
from etl.sources.kinds.parquet import ParquetFile
from etl.sources.recognise import recognise
from shardmill.dataset.manifest import Manifest
from shardmill.errors import IntegrityError, UsageError
from shardmill.formats.tf_example import (
    BYTES_LIST,
    FLOAT_LIST,
    INT64_LIST,
    FeatureList,
    FeatureValue,
    find_values,
    integers_at,
)
from shardmill.ids import sample_id_of
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.dataset import open_dataset
from shardmill.storage import StoredFile
from shardmill.values import Rejection
from tests.etl.annotations import mask_of
from tests.etl.building import ETL, build_source, images_of, list_images
from tests.etl.source_files import picture, record, records, write_records
from tests.lab.datasets import HERE
from tests.services.s3 import s3_client
from tests.shardmill.images.make import photo, png


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
        file = StoredFile("a.parquet", 60_000_000)
        assert ParquetFile(stream, file).rows_at_once(0, "image") == 4
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


LABELS = ("a b", "c/d", "é")


def write(table: Path, ids: range, *, partition: bool = True, overwrites: bool = False) -> None:
    """Rows of images, three classes; their labels are in the log alone, as folders, if they partition the table."""
    images = [png(photo(16 + number, 20)) for number in ids]
    rows = {"id": [*ids], "label": [LABELS[number % 3] for number in ids], "image": images}
    by = ["label"] if partition else None
    if overwrites:
        write_deltalake(str(table), pa.table(rows), mode="overwrite", partition_by=by)
    else:
        write_deltalake(str(table), pa.table(rows), mode="append", partition_by=by)


def source(table: Path | str) -> SourceConfig:
    return SourceConfig(kind="delta", uri=str(table), key_field="id")


def labels_of(config: SourceConfig) -> dict[str, str | None]:
    listing = list_images(config)
    assert not listing.rejections
    return {image.key.rpartition("\0")[2]: image.label for image in images_of(listing)}


def test_the_rows_of_a_version_are_listed_with_the_values_of_its_partitions(tmp_path: Path):
    table = tmp_path / "photos"
    write(table, range(9))
    write(table, range(9, 12))
    assert recognise(str(table)) == recognise(f"{table}@0") == "delta"
    assert labels_of(source(table)) == {str(number): LABELS[number % 3] for number in range(12)}
    assert len(labels_of(source(f"{table}@0"))) == 9

    # What was deleted or overwritten stays in the folder until VACUUM, and in no later version.
    DeltaTable(str(table)).delete("id = 3")
    assert sorted(map(int, labels_of(source(table)))) == [0, 1, 2, *range(4, 12)]
    assert len(labels_of(source(f"{table}@1"))) == 12
    manifest = build_source(source(table), tmp_path / "dataset")
    assert (manifest.counts.accepted, set(manifest.class_names)) == (11, set(LABELS))
    assert manifest.source.uri == str(table)


def test_later_versions_are_the_same_source(tmp_path: Path):
    table = tmp_path / "photos"
    write(table, range(6), partition=False)
    first = build_source(source(table), tmp_path / "dataset")
    write(table, range(6, 9), partition=False)
    second = build_source(source(table), tmp_path / "dataset")
    assert (first.counts.accepted, second.counts.accepted, second.version) == (6, 9, 2)
    assert build_source(source(f"{table}@0"), tmp_path / "other").content_digest == first.content_digest


def test_rows_that_moved_to_other_files_are_the_same_images(tmp_path: Path):
    """`OPTIMIZE` and `UPDATE` write rows anew: of these, what a row holds is compared, and only another is decoded."""
    table, dataset = tmp_path / "photos", DatasetConfig(uri=str(tmp_path / "dataset"))

    def built() -> tuple[Manifest, list[int]]:
        manifest = build_dataset(EtlTree(source=source(table), dataset=dataset, etl=here), run_id="r").manifest
        pages = [open_dataset(dataset.uri).to_pandas(split) for split in manifest.splits]
        return manifest, sorted(number for page in pages for number in page.sample_id)

    here = ETL.model_copy(update={"engine": HERE})
    for first in (0, 10, 20):
        write(table, range(first, first + 10), partition=False)
    first, ids = built()
    DeltaTable(str(table)).optimize.compact()
    assert built() == (first, ids)
    DeltaTable(str(table)).update(updates={"label": "'new'"}, predicate="id < 4")
    updated, same = built()
    assert (updated.version, updated.counts.accepted, same) == (2, 30, ids)
    assert {"new"} == {*updated.class_names} - {*first.class_names}
    DeltaTable(str(table)).delete("id = 7")
    deleted, left = built()
    assert (deleted.version, {*ids} - {*left}) == (3, {sample_id_of("7")})


def test_a_table_of_uris_is_read_like_any_other(tmp_path: Path):
    table = tmp_path / "names"
    (tmp_path / "1.png").write_bytes(png(photo()))
    rows = pa.table({"uri": [str(tmp_path / "1.png")], "label": ["cat"], "split": ["train"]})
    write_deltalake(str(table), rows, partition_by=["label"])
    manifest = build_source(SourceConfig(kind="delta", uri=str(table)), tmp_path / "dataset")
    assert (manifest.counts.accepted, manifest.class_names, list(manifest.splits)) == (1, ("cat",), ["train"])


def test_boxes_and_masks_are_those_of_the_rows(tmp_path: Path):
    (tmp_path / "1.png").write_bytes(png(photo(16, 20)))
    (tmp_path / "m.png").write_bytes(mask_of(16, 20, [2, 3, 9, 9]))
    own = {"boxes": pa.array([[[2.0, 3.0, 9.0, 9.0]]]), "names": pa.array([["cat"]])}
    boxes = {"field": "boxes", "labels_field": "names"}
    named = {"uri": [str(tmp_path / "1.png")], "outline": [str(tmp_path / "m.png")]}
    held = {"image": [png(photo(16, 20))], "outline": [(tmp_path / "m.png").read_bytes()]}
    masks = []
    for name, place in (("named", named), ("held", held)):
        write_deltalake(str(tmp_path / name), pa.table({**own, **place}))
        given = {"kind": "delta", "uri": str(tmp_path / name), "boxes": boxes, "mask_field": "outline"}
        manifest = build_source(SourceConfig.model_validate(given), tmp_path / f"{name}-dataset")
        assert (manifest.counts.accepted, manifest.class_names) == (1, ("cat",))
        assert {"boxes", "box_labels", "mask"} <= manifest.columns.keys()
        [sample] = open_dataset(str(tmp_path / f"{name}-dataset")).samples(next(iter(manifest.splits)))
        masks.append(sample["mask"])
    assert masks[0].any() and (masks[0] == masks[1]).all()


def test_what_would_read_other_rows_is_refused(tmp_path: Path):
    with pytest.raises(UsageError, match="there is no Delta table at"):
        list_images(source(tmp_path / "none"))
    table = tmp_path / "photos"
    write(table, range(3), partition=False)
    with pytest.raises(UsageError, match="has no version 7; its latest is 0"):
        list_images(source(f"{table}@7"))
    write(table, range(3, 6), partition=False, overwrites=True)
    DeltaTable(str(table)).vacuum(retention_hours=0, dry_run=False, enforce_retention_duration=False)
    assert len(labels_of(source(table))) == 3
    with pytest.raises(IntegrityError, match="has lost 1 of its 1 files"):
        list_images(source(f"{table}@0"))
    DeltaTable(str(table)).alter.add_feature(TableFeatures.DeletionVectors, allow_protocol_versions_increase=True)
    with pytest.raises(UsageError, match="needs readers that know deletionVectors"):
        list_images(source(table))


def test_columns_of_other_names_than_their_files_have_are_refused(tmp_path: Path):
    """By the protocol from before features had names, as Spark wrote it."""
    table = tmp_path / "photos"
    write(table, range(3), partition=False)
    [log] = (table / "_delta_log").glob("*.json")
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "protocol" in action:
            action["protocol"] = {"minReaderVersion": 2, "minWriterVersion": 5}
        if "metaData" in action:
            action["metaData"]["configuration"] = {"delta.columnMapping.mode": "name"}
            schema = json.loads(action["metaData"]["schemaString"])
            for number, column in enumerate(schema["fields"]):
                column["metadata"] = {
                    "delta.columnMapping.id": number,
                    "delta.columnMapping.physicalName": f"c{number}",
                }
            action["metaData"]["schemaString"] = json.dumps(schema)
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(UsageError, match="needs readers that know columnMapping"):
        list_images(source(table))


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecord.gz", "mnist-train.tfrecord-00000-of-00001"])
def test_records_of_either_packing_are_listed_and_read(name: str, tmp_path: Path):
    source = write_records(tmp_path / name, records(30))
    assert recognise(source.uri) == "tfrecord"
    images = images_of(list_images(source))
    reader = SOURCES["tfrecord"](source).open(10_000)
    assert [reader.read(image) for image in images] == [
        picture(image.place and int(image.key.split("\0")[1])) for image in images
    ]
    assert {image.label for image in images} == {"0", "1", "2"}
    assert {image.split for image in images} == {"train" if "train" in name else None}


def test_features_are_found_by_usual_and_by_given_names(tmp_path: Path):
    usual = [{"image/encoded": picture(0), "image/class/label": 7, "image/class/text": b"cat"}]
    assert [image.label for image in images_of(list_images(write_records(tmp_path / "a.tfrecord", usual)))] == ["cat"]
    source = write_records(tmp_path / "b.tfrecord", [{"pic": picture(0), "kind": b"dog", "id": b"one"}])
    with pytest.raises(UsageError, match=r"has the features pic, kind, id; expected an encoded image"):
        list_images(source)
    given = source.model_copy(update={"image_field": "pic", "label_field": "kind", "key_field": "id"})
    [image] = images_of(list_images(given))
    assert (image.key, image.label) == ("one", "dog")
    with pytest.raises(UsageError, match="source\\.label_field = 'kin' is not a column; .* did you mean 'kind'"):
        list_images(given.model_copy(update={"label_field": "kin"}))


def test_a_flipped_byte_anywhere_is_one_rejection_or_ends_the_file(tmp_path: Path):
    """Never an image with other bytes, and never an image less without a rejection."""
    source = write_records(tmp_path / "a.tfrecord", records(5))
    data = (tmp_path / "a.tfrecord").read_bytes()
    expected = {picture(number) for number in range(5)}
    for place in range(0, len(data), len(data) // 60):
        damaged = bytearray(data)
        damaged[place] ^= 0x10
        (tmp_path / "a.tfrecord").write_bytes(bytes(damaged))
        batches = list(SOURCES["tfrecord"](source).list())
        num_images = sum(batch.images.num_rows for batch in batches)
        rejections = [each for batch in batches for each in batch.rejections]
        assert num_images < 5 and [str(each.reason) for each in rejections] == ["damaged_container"]
        reader = SOURCES["tfrecord"](source).open(10_000)
        assert num_images == 0 or {reader.read(image) for image in images_of(list_images(source))} <= expected


@pytest.mark.parametrize("packed", [False, True])
def test_a_cut_file_lists_the_records_before_the_cut(packed: bool, tmp_path: Path):
    name = "a.tfrecord.gz" if packed else "a.tfrecord"
    source = write_records(tmp_path / name, records(5))
    data = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(data[: len(data) * 3 // 4])
    listing = list_images(source)
    assert 0 < listing.num_images < 5 and [str(each.reason) for each in listing.rejections] == ["damaged_container"]


def test_records_altered_after_the_listing_give_no_bytes(tmp_path: Path):
    source = write_records(tmp_path / "a.tfrecord", records(3))
    [image, *_] = images_of(list_images(source))
    write_records(tmp_path / "a.tfrecord", records(3, start=10))
    read = SOURCES["tfrecord"](source).open(10_000).read(image)
    assert isinstance(read, Rejection) and read.reason == "source_changed"


def test_records_without_an_image_or_a_label_are_rejections(tmp_path: Path):
    some = [*records(3), {"label": 1}, {"image": picture(9)}, {"image": 5, "label": 1}]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert sorted(str(each.reason) for each in listing.rejections) == ["bad_label", "bad_row", "bad_row"]


def test_empty_and_unpacked_lists_are_read_as_protocol_buffers_say():
    """Writers other than TensorFlow's leave integers unpacked; datasets have features without a value."""

    def field(number: int, payload: bytes) -> bytes:
        return bytes([number << 3 | 2, len(payload)]) + payload

    def feature(name: bytes, value: bytes) -> bytes:
        return field(1, field(1, name) + field(2, value))

    unpacked = field(3, bytes([1 << 3, 7]))
    example = field(1, feature(b"n", unpacked) + feature(b"none", field(3, b"")) + feature(b"no", field(1, b"")))
    found = find_values(example, 0, len(example), [b"n", b"none", b"no"])
    assert list(found) == [b"n"] and integers_at(example, np.array([found[b"n"]])).tolist() == [7]


def record_labels(listing: Listing) -> Counter[str | None]:
    return Counter(image.label for image in images_of(listing))


def test_classes_that_share_a_text_are_distinguished_by_their_number(tmp_path: Path):
    cranes = [record(label=135, text=b"crane"), record(label=518, text=b"crane"), record(label=1, text=b"tench")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", cranes * 3))
    assert record_labels(listing) == {"crane (135)": 3, "crane (518)": 3, "tench": 3}
    [warning] = listing.warnings
    assert "several classes have one image/class/text" in warning and "crane (135), crane (518)" in warning


def test_a_synset_distinguishes_classes_without_a_number(tmp_path: Path):
    cranes = [record(synset=b"n1", text=b"crane"), record(synset=b"n2", text=b"crane"), record(synset=b"n3", text=b"x")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", cranes))
    assert record_labels(listing) == {"crane (n1)": 1, "crane (n2)": 1, "x": 1}


def test_texts_that_go_with_their_numbers_are_the_names(tmp_path: Path):
    some = [record(label=number % 3, text=b"c%d" % (number % 3)) for number in range(9)]
    # A record that lacks one of the two is of the class that the other one says.
    some += [record(label=2), record(label=7), record(text=b"c1")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert record_labels(listing) == {"c0": 3, "c1": 4, "c2": 4, "7": 1} and not listing.warnings


def test_a_number_with_several_texts_is_one_class(tmp_path: Path):
    some = [record(label=3, text=b"Cat"), record(label=3, text=b"cat"), record(label=4, text=b"dog")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert record_labels(listing) == {"3": 2, "dog": 1} and "3 (Cat, cat)" in listing.warnings[0]


def test_a_number_that_is_always_the_same_says_nothing(tmp_path: Path):
    some = [record(label=0, text=b"cat"), record(label=0, text=b"dog"), record(label=0, text=b"cow")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert (
        record_labels(listing) == {"cat": 1, "dog": 1, "cow": 1}
        and "every image/class/label is 0" in listing.warnings[0]
    )


def test_a_text_that_is_asked_for_is_the_class(tmp_path: Path):
    cranes = [record(label=135, text=b"crane"), record(label=518, text=b"crane")]
    source = write_records(tmp_path / "a.tfrecord", cranes).model_copy(update={"label_field": "image/class/text"})
    assert record_labels(list_images(source)) == {"crane": 2}


@pytest.mark.parametrize(
    ("kind", "values"), [(INT64_LIST, [1, 4]), (BYTES_LIST, [b"a", b"b"]), (FLOAT_LIST, [0.0, 1.0])]
)
def test_a_label_of_several_values_is_never_its_first_one(kind: int, values: list, tmp_path: Path):
    some: list[dict[str, FeatureValue]] = [{"image": picture(0), "label": 1}]
    some.append({"image": picture(1), "label": FeatureList(kind, values)})
    source = write_records(tmp_path / "a.tfrecord", some)
    listing = list_images(source)
    [rejection] = listing.rejections
    assert str(rejection.reason) == "bad_label" and rejection.detail.startswith("feature label has 2 values")
    assert 'source.label_kind = "multi_label"' in rejection.detail


def test_float_labels_are_whole_numbers_or_no_classes(tmp_path: Path):
    values = [0.0, 1.0, 0.5, float("nan")]
    some: list[dict[str, FeatureValue]] = [
        {"image": picture(number), "label": FeatureList(FLOAT_LIST, [value])} for number, value in enumerate(values)
    ]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert record_labels(listing) == {"0": 1, "1": 1}
    assert {each.detail.split(",")[0] for each in listing.rejections} == {
        "feature label is 0.5",
        "feature label is nan",
    }


def test_a_label_that_the_first_record_lacks_is_not_lost(tmp_path: Path):
    some: list[dict[str, FeatureValue]] = [{"image": picture(0), "label": FeatureList(INT64_LIST, [])}]
    source = write_records(tmp_path / "a.tfrecord", [*some, *records(3)])
    with pytest.raises(UsageError, match=r"has the feature label, but the first record has no label"):
        list_images(source)


def test_a_record_with_several_images_is_a_rejection(tmp_path: Path):
    several: dict[str, FeatureValue] = {"image": FeatureList(BYTES_LIST, [picture(0), picture(1)]), "label": 1}
    listing = list_images(write_records(tmp_path / "a.tfrecord", [*records(2), several]))
    assert [each.detail for each in listing.rejections] == ["image has 2 values, expected one encoded image"]


def test_a_packed_file_with_a_plain_name_is_read(tmp_path: Path):
    source = write_records(tmp_path / "a.tfrecord", records(30))
    before = images_of(list_images(source))
    (tmp_path / "a.tfrecord").write_bytes(gzip.compress((tmp_path / "a.tfrecord").read_bytes()))
    after = images_of(list_images(source))
    assert [(each.key, each.label) for each in after] == [(each.key, each.label) for each in before]
    assert SOURCES["tfrecord"](source).open(10_000).read(after[7]) == picture(int(after[7].key.split("\0")[1]))


def test_a_length_that_looks_like_a_packed_file_is_a_length(tmp_path: Path):
    """A first record of 0x088b1f bytes begins as gzip does."""
    source = write_records(tmp_path / "a.tfrecord", [{"image": picture(0), "label": 1, "pad": bytes(0x088B1F - 650)}])
    size = (tmp_path / "a.tfrecord").stat().st_size - 16
    write_records(tmp_path / "a.tfrecord", [{"image": picture(0), "label": 1, "pad": bytes(2 * 0x088B1F - 650 - size)}])
    assert (tmp_path / "a.tfrecord").read_bytes()[:3] == b"\x1f\x8b\x08"
    [image] = images_of(list_images(source))
    assert SOURCES["tfrecord"](source).open(10_000).read(image) == picture(0)


@pytest.mark.parametrize(("pack", "named"), [(gzip.compress, "gzip"), (zlib.compress, "zlib"), (lzma.compress, "xz")])
def test_packed_data_that_is_no_tfrecord_names_its_packing(pack: Callable[[bytes], bytes], named: str, tmp_path: Path):
    (tmp_path / "a.tfrecord").write_bytes(pack(bytes(500)))
    with pytest.raises(UsageError, match=f"no record at byte 0.*{named}"):
        list_images(SourceConfig(uri=str(tmp_path / "a.tfrecord"), kind="tfrecord"))


def test_tfrecord_files_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    local = write_records(tmp_path / "in" / "train-a.tfrecord", records(50))
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "pile/train-a.tfrecord")
    before = build_source(local, tmp_path / "local")
    remote = SourceConfig(uri=f"{s3_bucket}/pile", kind="tfrecord")
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest
