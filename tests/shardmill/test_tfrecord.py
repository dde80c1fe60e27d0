"""TFRecord: the bytes of a record, labels and values of every kind, and what is cut or lacks a feature."""

from __future__ import annotations

import io
import struct

import pytest

from shardmill.errors import IntegrityError
from shardmill.formats import tfrecord
from shardmill.formats.rows import ByteRange, RowSchema, StoredRow
from shardmill.formats.tf_example import BYTES_LIST, FeatureList, decode_lists, encode_example
from shardmill.formats.tfrecord import TFRECORD, frame, read_chunk
from shardmill.typed_columns import ExtraColumn
from shardmill.values import ImageSample, SourceImage

NAMES = ("a", "b", "c")
PLAIN = RowSchema("jpeg", (4, 4, 3), NAMES)
REQUIRED = ("image/encoded", "image/filename", "image/sample_id")


def row(number: int, extra: str = "", label_id: int | None = None, mask: bytes = b"") -> StoredRow:
    source = SourceImage(f"{number}.jpg", 10, label=None if label_id is None else NAMES[label_id], sample_id=number - 9,
                         extra=extra)  # fmt: skip
    return StoredRow.of(source, label_id, ImageSample(bytes([number]) * 5, 4, 4, 3, "ab" * 32, (), ()), mask=mask)


def written(rows: list[StoredRow], schema: RowSchema) -> tuple[bytes, list[dict[str, FeatureList]]]:
    """A chunk, and what its records hold for other readers."""
    file, records, start = io.BytesIO(), [], 0
    shard = TFRECORD.write_shard(file, [rows], schema)
    data = file.getvalue()
    assert (shard.chunks, shard.footer) == ((ByteRange(0, len(data)),), ByteRange(len(data), 0))
    while start < len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        records.append(decode_lists(memoryview(data)[start + 12 : start + 12 + length]))
        start += length + 16
    return data, records


def test_a_record_is_framed_as_tensorflow_frames_it():
    # "123456789" has the CRC-32C 0xE3069283, by which implementations are checked.
    assert frame(b"123456789").hex() == "090000000000000037f97139" + b"123456789".hex() + "e5b08ac7"


@pytest.mark.parametrize(
    ("label_type", "extra", "feature", "label"),
    [
        ("list<int64>", '{"label": ["c", "a"]}', "image/class/label", [0, 2]),
        ("float32", '{"label": 1.5}', "image/label", 1.5),
        ("float32[2]", '{"label": [0.5, -2.0]}', "image/label", [0.5, -2.0]),
    ],
)
def test_labels_of_every_kind_have_their_feature(label_type, extra, feature, label):
    schema = RowSchema("jpeg", (4, 4, 3), NAMES, label_type=label_type)
    data, [record] = written([row(1, extra)], schema)
    [found] = read_chunk(None, 0, ByteRange(0, len(data)), data, schema).labels_N
    assert (found.tolist() if hasattr(found, "tolist") else list(found)) == label
    assert list(record[feature].values) == (label if isinstance(label, list) else [label])
    assert len({"image/label", "image/class/label"} & record.keys()) == 1


def test_values_come_back_and_a_null_is_no_feature():
    columns = (("flag", "bool"), ("note", "string"), ("sizes", "list<int64>"), ("weight", "float64"), ("mask", "png"))
    schema = RowSchema("jpeg", (4, 4, 3), NAMES, extra=tuple(ExtraColumn(*each) for each in sorted(columns)))
    rows = [row(1, '{"flag": true, "note": "é", "sizes": [], "weight": 0.5}', 2, b"png"), row(2, "{}", None, b"other")]
    data, records = written(rows, schema)
    found = read_chunk(None, 0, ByteRange(0, len(data)), data, schema)
    assert found.extra == {"flag": [True, None], "note": ["é", None], "sizes": [[], None], "weight": [0.5, None],
                           "mask": [b"png", b"other"]}  # fmt: skip
    assert [bytes(image) for image in found.images] == [b"\1" * 5, b"\2" * 5]
    assert (list(found.sources), found.labels_N.tolist()) == (["1.jpg", "2.jpg"], [2, -1])
    assert found.sample_ids_N.tolist() == [-8, -7]
    assert list(records[0]["image/class/text"].values) == [b"c"] and not {"flag", "weight"} & records[1].keys()


@pytest.mark.parametrize("kernel", dict.fromkeys((tfrecord._native_find_values, None)))
def test_what_a_record_lacks_is_at_no_place_with_and_without_the_kernel(kernel, monkeypatch):
    monkeypatch.setattr(tfrecord, "_native_find_values", kernel)
    data, _ = written([row(1), row(2, label_id=1)], PLAIN)
    places = tfrecord._find_all(data, (b"none", b"image/encoded", b"image/class/label"))
    assert places[:, 0].tolist() == [[-1, -1]] * 2 and places[0, 2].tolist() == [-1, -1]
    assert [data[start:stop] for start, stop in places[:, 1].tolist()] == [b"\1" * 5, b"\2" * 5]


@pytest.mark.parametrize("missing", REQUIRED)
def test_a_record_without_a_required_feature_is_named(missing):
    data = b"".join(
        frame(encode_example({name: 1 if name == "image/sample_id" else b"x" for name in names}))
        for names in (REQUIRED, set(REQUIRED) - {missing})
    )
    with pytest.raises(IntegrityError, match=f"chunk 7 lacks the feature '{missing}'"):
        read_chunk(None, 7, ByteRange(0, len(data)), data, PLAIN)


@pytest.mark.parametrize(("cut", "inside"), [(1, "a record$"), (4, "a record$"), (-11, "a record's header$")])
def test_a_chunk_that_ends_inside_a_record_is_an_error(cut, inside):
    """`cut`: so many bytes are missing of two records, or (negative) so many of a third one are there."""
    data, _ = written([row(1), row(2)], PLAIN)
    data = data[:-cut] if cut > 0 else data + frame(b"third")[:-cut]
    with pytest.raises(IntegrityError, match=f"a TFRecord chunk ends inside {inside}"):
        read_chunk(None, 0, ByteRange(0, len(data)), data, PLAIN)


def test_a_value_of_another_type_is_an_error():
    schema = RowSchema("jpeg", (4, 4, 3), NAMES, extra=(ExtraColumn("note", "string"),))
    features = {"image/encoded": b"x", "image/filename": b"x", "image/sample_id": 1}
    for wrong in (1, FeatureList(BYTES_LIST, [b"two", b"values"])):
        data = frame(encode_example({**features, "note": wrong}))
        with pytest.raises(IntegrityError, match="a feature is not a string"):
            read_chunk(None, 0, ByteRange(0, len(data)), data, schema)
