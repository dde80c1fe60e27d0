"""Parquet: the columns that other readers see, rows with images or without, and files of which a part was fetched."""

from __future__ import annotations

import io
import json
import random

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import IntegrityError
from shardmill.formats.parquet import PARQUET, _SparseFile, column_types, parquet_schema
from shardmill.formats.rows import NO_IMAGES, ByteRange, ChunkRows, RowSchema, StoredRow
from shardmill.typed_columns import ExtraColumn
from shardmill.values import ImageSample, SourceImage

NAMES = ("cat", "Hündin")
EXTRA = (ExtraColumn("note", "string"), ExtraColumn("sizes", "list<int64>"))
IMAGES = RowSchema("jpeg", (4, 5, 3), NAMES)
PREDICTIONS = RowSchema(NO_IMAGES, None, NAMES, extra=EXTRA, vector_size=2)
OURS = [("image", False), ("sample_id", False), ("label", False), ("height", False), ("width", False),
        ("source", False), ("source_sha256", False), ("notes", False)]  # fmt: skip
WITHOUT_IMAGES = [each for each in OURS if each[0] not in ("image", "height", "width")]


def row(number: int, image: bytes, extra: str = "", label_id: int | None = 1) -> StoredRow:
    label = None if label_id is None else NAMES[label_id]
    source = SourceImage(f"{number} é.jpg", 10, label=label, sample_id=number - 9, extra=extra)
    return StoredRow.of(source, label_id, ImageSample(image, 4, 5, 3, "ab" * 32, (), (), notes=("tiny", "gray")))


def read(chunks: list[list[StoredRow]], schema: RowSchema) -> tuple[bytes, list[ChunkRows]]:
    file = io.BytesIO()
    shard = PARQUET.write_shard(file, chunks, schema)
    data, end = file.getvalue(), 4
    for place in (*shard.chunks, shard.footer):
        assert place.start == end
        end += place.num_bytes
    assert end == len(data)
    footer = PARQUET.open_footer(shard.footer, data[shard.footer.start :])
    return data, [
        PARQUET.read_chunk(footer, number, place, data[place.start : place.start + place.num_bytes], schema)
        for number, place in enumerate(shard.chunks)
    ]


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        (IMAGES, OURS),
        (RowSchema("raw", (4, 5, 3), ()), [(name, name == "label") for name, _ in OURS]),
        (RowSchema("jpeg", None, NAMES, extra=EXTRA), [*OURS, ("note", True), ("sizes", True)]),
        (RowSchema("jpeg", None, NAMES, label_type="float32"), OURS),
        (PREDICTIONS, [*WITHOUT_IMAGES, ("note", True), ("sizes", True), ("embedding", False)]),
        (RowSchema(NO_IMAGES, None, ()), [(name, name == "label") for name, _ in WITHOUT_IMAGES]),
    ],
)
def test_only_what_may_be_missing_is_nullable(schema, fields):
    found = parquet_schema(schema)
    assert [(field.name, field.nullable) for field in found] == fields
    assert (found.metadata or {})[b"shardmill.class_names"] == json.dumps(
        schema.class_names, ensure_ascii=False
    ).encode()
    assert (b"shardmill.image" in (found.metadata or {})) == schema.has_images
    fixed = schema.encoding == "raw"
    assert not schema.has_images or found.field("image").type == (pa.binary(60) if fixed else pa.binary())


def test_the_manifests_types_are_those_of_the_columns():
    assert column_types(PREDICTIONS) == {
        "sample_id": "int64", "label": "int64", "source": "string", "source_sha256": "string", "notes": "string",
        "note": "string", "sizes": "list<int64>", "embedding": "float32[2]",
    }  # fmt: skip
    assert column_types(RowSchema("jpeg", None, (), label_type="list<int64>"))["label"] == "list<int64>"


def test_other_readers_find_every_column_of_a_row():
    data, _ = read([[row(1, b"one")], [row(2, b"two"), row(3, b"three")]], IMAGES)
    table = pq.read_table(io.BytesIO(data)).to_pylist()
    assert table[2] == {
        "image": b"three", "sample_id": -6, "label": 1, "height": 4, "width": 5, "source": "3 é.jpg",
        "source_sha256": "ab" * 32, "notes": "tiny,gray",
    }  # fmt: skip
    assert [each["image"] for each in table] == [b"one", b"two", b"three"]


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
@pytest.mark.parametrize("layout", [{"compression": "snappy"}, {"data_page_size": 64, "write_batch_size": 1}])
def test_rows_that_another_writer_laid_out_otherwise_are_read_all_the_same(encoding, layout):
    schema = RowSchema(encoding, (4, 5, 3), NAMES)
    images = [bytes([number]) * (60 if encoding == "raw" else 9 + number) for number in range(20)]
    data, _ = read([[row(number, image) for number, image in enumerate(images)]], schema)
    file, table = io.BytesIO(), pq.read_table(io.BytesIO(data))
    with pq.ParquetWriter(file, table.schema, **{"compression": "NONE", "use_dictionary": False, **layout}) as writer:
        writer.write_table(table)
    data = file.getvalue()
    footer = PARQUET.open_footer(ByteRange(0, len(data)), data)
    found = PARQUET.read_chunk(footer, 0, ByteRange(4, len(data) - 4), data[4:], schema)
    assert [bytes(image) for image in found.images] == images
    assert found.sample_ids_N.tolist() == [number - 9 for number in range(20)] and set(found.labels_N.tolist()) == {1}


@pytest.mark.parametrize("vector_size", [0, 2])
def test_predictions_come_back_with_the_bytes_of_their_vectors(vector_size):
    vectors = [np.array([number, -0.5], "<f4").tobytes() if vector_size else b"" for number in range(3)]
    rows = [row(0, vectors[0], '{"note": "x", "sizes": [1, 2]}'), row(1, vectors[1], "{}", None), row(2, vectors[2])]
    schema = RowSchema(NO_IMAGES, None, (), extra=EXTRA, vector_size=vector_size)
    _, [found, last] = read([rows[:2], rows[2:]], schema)
    assert [bytes(image) for image in found.images] == vectors[:2] and bytes(last.images[0]) == vectors[2]
    assert (len(found.images), len(last.images)) == (2, 1)
    assert (found.labels_N.tolist(), found.labels_N.dtype) == ([1, -1], np.int64)
    assert found.sample_ids_N.tolist() == [-9, -8] and list(found.sources) == ["0 é.jpg", "1 é.jpg"]
    assert found.extra == {"note": ["x", None], "sizes": [[1, 2], None]}


@pytest.mark.parametrize("schema", [IMAGES, PREDICTIONS])
def test_what_is_no_parquet_is_an_integrity_error(schema):
    with pytest.raises(IntegrityError, match="Parquet footer does not parse"):
        PARQUET.open_footer(ByteRange(0, 20), b"x" * 20)
    file = io.BytesIO()
    vector = b"" if schema.has_images else b"\0" * 8
    shard = PARQUET.write_shard(file, [[row(1, vector)]], schema)
    footer = PARQUET.open_footer(shard.footer, file.getvalue()[shard.footer.start :])
    with pytest.raises(IntegrityError, match="Parquet row group"):
        PARQUET.read_chunk(footer, 0, shard.chunks[0], b"\xff" * shard.chunks[0].num_bytes, schema)


def test_a_file_of_parts_is_read_like_the_whole_file():
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    whole = rng.randbytes(100)
    runs = {10: memoryview(whole)[10:40], 60: whole[60:100]}
    sparse = _SparseFile(100, runs)
    known = io.BytesIO(bytes(byte if 10 <= place < 40 or place >= 60 else 0 for place, byte in enumerate(whole)))
    assert (sparse.size(), sparse.readable(), sparse.seekable()) == (100, True, True)
    for _ in range(300):
        offset, whence = rng.choice([(rng.randrange(110), 0), (0, 1), (-rng.randrange(100), 2)])
        assert sparse.seek(offset, whence) == known.seek(offset, whence) == sparse.tell()
        num_bytes = rng.choice([-1, 0, 1, 7, 30, 200, None])
        assert bytes(sparse.read(num_bytes)) == known.read(num_bytes)  # pyright: ignore[reportArgumentType]
        assert sparse.tell() == known.tell()
