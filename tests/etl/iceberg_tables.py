"""Iceberg tables of a catalog in SQLite, and deletes by position, which pyiceberg reads and does not write."""

from __future__ import annotations

import io
import json
import time
import uuid
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyroaring
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.manifest import (
    POSITIONAL_DELETE_SCHEMA,
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
    write_manifest_list,
)
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation, Snapshot, Summary
from pyiceberg.typedef import Record

if int(pa.__version__.partition(".")[0]) < 18:
    pytest.skip("pyiceberg writes tables with pyarrow 18 or later", allow_module_level=True)


def catalog_in(folder: Path) -> SqlCatalog:
    """With the namespace `photos`; its tables are in `folder/photos`."""
    catalog = SqlCatalog("local", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}")
    catalog.create_namespace_if_not_exists("photos")
    return catalog


class _DeleteManifest(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def _positions(deletes: Mapping[str, Sequence[int]]) -> bytes:
    pairs = [(path, row) for path, rows in deletes.items() for row in rows]
    columns = {"file_path": [path for path, _ in pairs], "pos": [row for _, row in pairs]}
    out = io.BytesIO()
    pq.write_table(pa.table(columns, schema=POSITIONAL_DELETE_SCHEMA.as_arrow()), out)
    return out.getvalue()


def _vectors(deletes: Mapping[str, Sequence[int]]) -> bytes:
    """A Puffin file of Roaring bitmaps."""
    blobs, about = b"PFA1", []
    for path, rows in deletes.items():
        bitmap = b"\xd1\xd3\x39\x64" + (1).to_bytes(8, "little") + bytes(4) + pyroaring.BitMap(rows).serialize()
        blob = len(bitmap).to_bytes(4, "big") + bitmap + zlib.crc32(bitmap).to_bytes(4, "big")
        about.append({
            "type": "deletion-vector-v1", "fields": [], "snapshot-id": -1, "sequence-number": -1,
            "offset": len(blobs), "length": len(blob), "properties": {"referenced-data-file": path},
        })  # fmt: skip
        blobs += blob
    footer = json.dumps({"blobs": about}).encode()
    return blobs + b"PFA1" + footer + len(footer).to_bytes(4, "little") + bytes(4) + b"PFA1"


def with_deletes(table: Table, deletes: Mapping[str, Sequence[int]], how: str) -> str:
    """The metadata file of a further snapshot without some rows (data file -> their numbers in it), written as the
    format's specification says. `how`: positions, vectors or equality."""
    metadata, current, made = table.metadata, table.current_snapshot(), uuid.uuid4().hex
    assert current is not None
    place, snapshot_id, number = f"{table.location()}/data/{made}-deletes", current.snapshot_id + 1, 90
    data = (_vectors if how == "vectors" else _positions)(deletes)
    Path(place.removeprefix("file://")).write_bytes(data)
    deleted = DataFile.from_args(
        content=DataFileContent.EQUALITY_DELETES if how == "equality" else DataFileContent.POSITION_DELETES,
        file_path=place, file_format=FileFormat.PUFFIN if how == "vectors" else FileFormat.PARQUET,
        partition=Record(), record_count=sum(map(len, deletes.values())), file_size_in_bytes=len(data),
    )  # fmt: skip
    deleted.spec_id = metadata.default_spec_id
    output = table.io.new_output(f"{table.location()}/metadata/{made}-m0.avro")
    with _DeleteManifest(table.spec(), table.schema(), output, snapshot_id, "null") as writer:
        writer.add_entry(
            ManifestEntry.from_args(status=ManifestEntryStatus.ADDED, snapshot_id=snapshot_id, data_file=deleted)
        )
    manifest: ManifestFile = writer.to_manifest_file()
    manifest_list = table.io.new_output(f"{table.location()}/metadata/snap-{made}.avro")
    with write_manifest_list(2, manifest_list, snapshot_id, current.snapshot_id, number, "null") as written:
        written.add_manifests([*current.manifests(table.io), manifest])
    facts = {
        "snapshot-id": snapshot_id, "parent-snapshot-id": current.snapshot_id, "sequence-number": number,
        "timestamp-ms": time.time_ns() // 1_000_000, "manifest-list": manifest_list.location,
        "summary": Summary(Operation.DELETE), "schema-id": metadata.current_schema_id,
    }  # fmt: skip
    snapshot = Snapshot.model_validate(facts)
    later = metadata.model_copy(
        update={
            "snapshots": [*metadata.snapshots, snapshot], "current_snapshot_id": snapshot_id,
            "last_sequence_number": number,
        }
    )  # fmt: skip
    output = table.io.new_output(f"{table.location()}/metadata/{number:05d}-{made}.metadata.json")
    ToOutputFile.table_metadata(later, output)
    return output.location.removeprefix("file://")
