"""Every shard format: what is written is read back, its parts cover the file, and other tools can read it."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardmill.errors import IntegrityError
from shardmill.formats import SHARD_FORMATS, tfrecord
from shardmill.formats.cutting import cut_chunks, cut_shards
from shardmill.formats.parquet import PARQUET, parquet_schema
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow, WrittenShard
from shardmill.formats.tf_example import encode_example, find_values, integers_at
from shardmill.values import ImageSample, SourceImage

_SEED = random.SystemRandom().randrange(2**32)
SHAPE_HWC = (4, 4, 3)
CLASS_NAMES = ("a", "b", "c")
SCHEMA = RowSchema("jpeg", SHAPE_HWC, CLASS_NAMES)


def make_rows(num_rows: int, encoding: str, *, labels: bool = True, seed: int = 1) -> list[StoredRow]:
    rng = random.Random(seed)
    return [
        StoredRow.of(
            SourceImage(f"a/{n} é.jpg", 10, label="a" if labels else None, sample_id=rng.randrange(-(2**63), 2**63)),
            n % 3 if labels else None,
            ImageSample(rng.randbytes(48 if encoding == "raw" else rng.randrange(1, 900)), 4, 4, 3, "ab" * 32, (), ()),
        )
        for n in range(num_rows)
    ]


def write(name: str, chunks: Sequence[Sequence[StoredRow]], schema: RowSchema = SCHEMA) -> tuple[bytes, WrittenShard]:
    file = io.BytesIO()
    written = SHARD_FORMATS[name].write_shard(file, chunks, schema)
    return file.getvalue(), written


@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
@pytest.mark.parametrize("name", SHARD_FORMATS)
def test_rows_survive_a_round_trip(name: str, encoding: str, labels: bool):
    shard_format = SHARD_FORMATS[name]
    chunks = list(cut_chunks(make_rows(500, encoding, labels=labels), 9_000))
    schema = RowSchema(encoding, SHAPE_HWC, CLASS_NAMES if labels else ())
    data, written = write(name, chunks, schema)
    footer = shard_format.open_footer(written.footer, data[written.footer.start :])
    assert len(written.chunks) == len(chunks) > 2
    for number, (place, chunk) in enumerate(zip(written.chunks, chunks, strict=True)):
        found = shard_format.read_chunk(
            footer, number, place, data[place.start : place.start + place.num_bytes], schema
        )
        assert [bytes(image) for image in found.images] == [row.sample.image for row in chunk]
        assert found.labels_N.tolist() == [-1 if row.label_id is None else row.label_id for row in chunk]
        assert found.sample_ids_N.tolist() == [row.source.sample_id for row in chunk]
        assert list(found.sources) == [row.source.key for row in chunk]


@pytest.mark.parametrize("name", SHARD_FORMATS)
def test_chunks_and_footer_cover_the_file_without_gaps(name: str):
    chunks = list(cut_chunks(make_rows(300, "jpeg"), 9_000))
    data, written = write(name, chunks)
    position = written.chunks[0].start
    for place in (*written.chunks, written.footer):
        assert place.start == position
        position += place.num_bytes
    assert position == len(data)


def test_chunks_close_at_their_size_and_shards_before_theirs():
    rows = make_rows(400, "jpeg")
    chunks = list(cut_chunks(rows, 5_000))
    assert [row for chunk in chunks for row in chunk] == rows
    assert all(sum(row.image_bytes for row in chunk) >= 5_000 for chunk in chunks[:-1])
    assert all(sum(row.image_bytes for row in chunk[:-1]) < 5_000 for chunk in chunks)
    shards = list(cut_shards(chunks, 20_000))
    assert [chunk for shard in shards for chunk in shard] == chunks and len(shards) > 3
    assert all(sum(row.image_bytes for chunk in shard for row in chunk) <= 20_000 for shard in shards)


def test_tensorflow_reads_the_tfrecord(tmp_path: Path):
    tf = pytest.importorskip("tensorflow")
    rows = make_rows(20, "jpeg")
    (tmp_path / "shard").write_bytes(write("tfrecord", [rows])[0])
    found = [tf.train.Example.FromString(record.numpy()) for record in tf.data.TFRecordDataset(str(tmp_path / "shard"))]
    for row, example in zip(rows, found, strict=True):
        features = example.features.feature
        assert features["image/encoded"].bytes_list.value[0] == row.sample.image
        assert features["image/class/label"].int64_list.value[0] == row.label_id
        assert features["image/sample_id"].int64_list.value[0] == row.source.sample_id
        assert features["image/filename"].bytes_list.value[0].decode() == row.source.key
        assert sample_id_of(example.SerializeToString()) == row.source.sample_id


def sample_id_of(example: bytes) -> int:
    place = find_values(example, 0, len(example), [b"image/sample_id"])[b"image/sample_id"]
    return int(integers_at(example, np.array([place]))[0])


def test_plain_parquet_readers_need_nothing_of_ours():
    rows = make_rows(20, "jpeg")
    table = pq.read_table(io.BytesIO(write("parquet", [rows])[0]))
    assert table.column("image").to_pylist() == [row.sample.image for row in rows]
    assert table.column("label").to_pylist() == [row.label_id for row in rows]


@pytest.mark.parametrize("encoding", ["jpeg", "raw"])
def test_images_are_where_they_were_read(encoding: str):
    schema = RowSchema(encoding, SHAPE_HWC, CLASS_NAMES)
    chunks = list(cut_chunks(make_rows(60, encoding), 1_000))
    data, written = write("parquet", chunks, schema)
    footer = PARQUET.open_footer(written.footer, data[written.footer.start :])
    for number, place in enumerate(written.chunks):
        chunk = data[place.start : place.start + place.num_bytes]
        assert all(
            memoryview(image).obj is chunk for image in PARQUET.read_chunk(footer, number, place, chunk, schema).images
        )


OTHER_LAYOUTS = {
    "pages": {"data_page_size": 64, "write_batch_size": 1},
    "dictionary": {"use_dictionary": True},
    "compressed": {"compression": "snappy"},
    "version_2": {"data_page_version": "2.0"},
    "optional": {"schema": parquet_schema(SCHEMA).remove(0).insert(0, pa.field("image", pa.binary()))},
}


@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_images_of_another_layout_are_read_all_the_same(layout: str):
    rows = make_rows(40, "jpeg")
    table = pq.read_table(io.BytesIO(write("parquet", [rows])[0]))
    given = {"compression": "NONE", "use_dictionary": False, "schema": table.schema, **OTHER_LAYOUTS[layout]}
    file = io.BytesIO()
    with pq.ParquetWriter(file, **given) as writer:
        writer.write_table(table.cast(given["schema"]))
    data = file.getvalue()
    place = ByteRange(4, len(data) - 4)
    found = PARQUET.read_chunk(PARQUET.open_footer(ByteRange(0, len(data)), data), 0, place, data[4:], SCHEMA)
    assert [bytes(image) for image in found.images] == [row.sample.image for row in rows]


def test_a_page_that_does_not_add_up_is_an_integrity_error_or_other_images():
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    data, written = write("parquet", [make_rows(20, "jpeg")])
    footer, (place,) = PARQUET.open_footer(written.footer, data[written.footer.start :]), written.chunks
    page_bytes = pq.read_metadata(io.BytesIO(data)).row_group(0).column(0).total_compressed_size
    num_refused = 0
    for _ in range(200):
        altered = bytearray(data[place.start : place.start + place.num_bytes])
        # In the page's header or its first length, or anywhere in it.
        altered[rng.randrange(rng.choice((30, page_bytes)))] = rng.randrange(256)
        try:
            assert len(PARQUET.read_chunk(footer, 0, place, bytes(altered), SCHEMA).images) == 20
        except IntegrityError:
            num_refused += 1
    assert num_refused > 10


@pytest.mark.parametrize("data", [b"\x0a", b"\xff\xff\xff", b"\x0a\xff\x01\x00", b"hello"])
def test_what_is_not_an_example_is_an_integrity_error(data: bytes):
    with pytest.raises(IntegrityError, match="not a tf.Example"):
        find_values(data, 0, len(data), [b"n"])


def test_example_bytes_follow_from_the_features_alone():
    assert encode_example({"a": 1, "b": b"x"}) == encode_example({"a": 1, "b": b"x"})


def test_a_shard_alone_says_what_its_labels_mean():
    import pyarrow.parquet as pq

    schema = RowSchema("jpeg", SHAPE_HWC, ("cat", "Hündin", 'a "b"'))
    shard = write("parquet", [make_rows(3, "jpeg")], schema)[0]
    metadata = pq.read_metadata(io.BytesIO(shard)).metadata
    assert json.loads(metadata[b"shardmill.class_names"]) == list(schema.class_names)
    assert json.loads((pq.read_schema(io.BytesIO(shard)).metadata or {})[b"shardmill.class_names"])
    assert b"image/class/text" in write("tfrecord", [make_rows(3, "jpeg")], schema)[0]


@pytest.mark.parametrize("shape_HWC", [SHAPE_HWC, None])
@pytest.mark.parametrize("encoding", ["raw", "jpeg"])
def test_a_parquet_shard_alone_says_what_its_images_are(encoding: str, shape_HWC: tuple[int, int, int] | None):
    if encoding == "raw" and shape_HWC is None:
        shape_HWC = (2, 8, 3)  # raw has one shape, always
    shard = write("parquet", [make_rows(3, encoding)], RowSchema(encoding, shape_HWC, CLASS_NAMES))[0]
    table = pq.read_table(io.BytesIO(shard))
    image = json.loads((table.schema.metadata or {})[b"shardmill.image"])
    assert image == {"encoding": encoding, "dtype": "uint8", "shape_HWC": shape_HWC and list(shape_HWC)}
    if encoding == "raw":
        # Enough to see the pixels with nothing but NumPy.
        pixels = np.frombuffer(table["image"][0].as_py(), image["dtype"]).reshape(image["shape_HWC"])
        assert pixels.tobytes() == make_rows(3, encoding)[0].sample.image


@pytest.mark.skipif(tfrecord._native_find_values is None, reason="the native kernel is not built")
def test_the_kernel_finds_what_python_finds_and_declines_the_same_damage(monkeypatch):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    data = write("tfrecord", [make_rows(20, "jpeg")])[0]
    names = (b"image/encoded", b"image/class/label", b"image/sample_id", b"image/filename", b"none")

    def found_by(kernel: object, chunk: bytes) -> list | str:
        monkeypatch.setattr(tfrecord, "_native_find_values", kernel)
        try:
            return tfrecord._find_all(chunk, names).tolist()
        except IntegrityError as error:
            return str(error)

    num_refused = 0
    native = tfrecord._native_find_values
    for trial in range(300):
        altered = bytearray(data)
        if trial:
            altered[rng.randrange(len(data))] = rng.randrange(256)
        if trial % 3 == 2:
            del altered[rng.randrange(len(data)) :]
        ours = found_by(native, bytes(altered))
        assert ours == found_by(None, bytes(altered))
        num_refused += isinstance(ours, str)
    assert num_refused > 10
