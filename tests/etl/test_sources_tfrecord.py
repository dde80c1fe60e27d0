"""TFRecord files: features by their usual names, every checksum held, and damage that costs no more than it hits."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from shardmill.errors import UsageError
from shardmill.formats.tf_example import FeatureValue, decode_example, encode_example
from shardmill.formats.tfrecord import frame
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.test_sources_webdataset import picture
from tests.services.s3 import s3_client


def write_records(file: Path, records: list[dict[str, FeatureValue]]) -> SourceConfig:
    file.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(frame(encode_example(record)) for record in records)
    file.write_bytes(gzip.compress(data, 1) if file.name.endswith(".gz") else data)
    return SourceConfig(uri=str(file), kind="tfrecord")


def records(count: int, start: int = 0) -> list[dict[str, FeatureValue]]:
    return [{"image": picture(start + number), "label": number % 3, "id": b"n%d" % number} for number in range(count)]


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
    assert (image.key, image.label) == ("b.tfrecord\0one", "dog")
    with pytest.raises(UsageError, match=r"source\.label_field = 'kin' is no column; .* did you mean 'kind'"):
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
    assert decode_example(memoryview(example)) == {"n": 7}


def test_files_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    local = write_records(tmp_path / "in" / "train-a.tfrecord", records(50))
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "pile/train-a.tfrecord")
    before = build_source(local, tmp_path / "local")
    remote = SourceConfig(uri=f"{s3_bucket}/pile", kind="tfrecord")
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest
