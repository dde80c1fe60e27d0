"""TFRecord files: features by their usual names, every checksum held, and damage that costs no more than it hits."""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from etl.config import SourceConfig
from etl.listing.listing import Listing
from etl.sources import SOURCES
from etl.sources.recognise import recognise
from shardmill.errors import UsageError
from shardmill.formats.tf_example import (
    BYTES_LIST,
    FLOAT_LIST,
    INT64_LIST,
    FeatureList,
    FeatureValue,
    find_values,
    integers_at,
)
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import picture, record, records, write_records
from tests.services.s3 import s3_client


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


def labels_of(listing: Listing) -> Counter[str | None]:
    return Counter(image.label for image in images_of(listing))


def test_classes_that_share_a_text_are_distinguished_by_their_number(tmp_path: Path):
    cranes = [record(label=135, text=b"crane"), record(label=518, text=b"crane"), record(label=1, text=b"tench")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", cranes * 3))
    assert labels_of(listing) == {"crane (135)": 3, "crane (518)": 3, "tench": 3}
    [warning] = listing.warnings
    assert "several classes have one image/class/text" in warning and "crane (135), crane (518)" in warning


def test_a_synset_tells_classes_apart_if_there_is_no_number(tmp_path: Path):
    cranes = [record(synset=b"n1", text=b"crane"), record(synset=b"n2", text=b"crane"), record(synset=b"n3", text=b"x")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", cranes))
    assert labels_of(listing) == {"crane (n1)": 1, "crane (n2)": 1, "x": 1}


def test_texts_that_go_with_their_numbers_are_the_names(tmp_path: Path):
    some = [record(label=number % 3, text=b"c%d" % (number % 3)) for number in range(9)]
    # A record that lacks one of the two is of the class that the other one says.
    some += [record(label=2), record(label=7), record(text=b"c1")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert labels_of(listing) == {"c0": 3, "c1": 4, "c2": 4, "7": 1} and not listing.warnings


def test_a_number_with_several_texts_is_one_class(tmp_path: Path):
    some = [record(label=3, text=b"Cat"), record(label=3, text=b"cat"), record(label=4, text=b"dog")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert labels_of(listing) == {"3": 2, "dog": 1} and "3 (Cat, cat)" in listing.warnings[0]


def test_a_number_that_is_always_the_same_says_nothing(tmp_path: Path):
    some = [record(label=0, text=b"cat"), record(label=0, text=b"dog"), record(label=0, text=b"cow")]
    listing = list_images(write_records(tmp_path / "a.tfrecord", some))
    assert (
        labels_of(listing) == {"cat": 1, "dog": 1, "cow": 1} and "every image/class/label is 0" in listing.warnings[0]
    )


def test_a_text_that_is_asked_for_is_the_class(tmp_path: Path):
    cranes = [record(label=135, text=b"crane"), record(label=518, text=b"crane")]
    source = write_records(tmp_path / "a.tfrecord", cranes).model_copy(update={"label_field": "image/class/text"})
    assert labels_of(list_images(source)) == {"crane": 2}


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
    assert labels_of(listing) == {"0": 1, "1": 1}
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


def test_files_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    local = write_records(tmp_path / "in" / "train-a.tfrecord", records(50))
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "pile/train-a.tfrecord")
    before = build_source(local, tmp_path / "local")
    remote = SourceConfig(uri=f"{s3_bucket}/pile", kind="tfrecord")
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest
