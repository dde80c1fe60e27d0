"""A Delta table: one version's rows, whatever else lies in its folder, with the values that only its log knows."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, TableFeatures, write_deltalake

from etl.config import EtlTree, SourceConfig
from etl.job import build_dataset
from etl.sources.recognise import recognise
from shardmill.dataset.manifest import Manifest
from shardmill.errors import IntegrityError, UsageError
from shardmill.ids import sample_id_of
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.dataset import open_dataset
from tests.etl.annotations import mask_of
from tests.etl.building import ETL, build_source, images_of, list_images
from tests.lab.datasets import HERE
from tests.shardmill.images.make import photo, png

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
