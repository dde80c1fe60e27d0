"""Tar archives: samples by their common names, labels from members or folders, and no silent loss in a damaged one."""

from __future__ import annotations

import gzip
import io
import tarfile
from collections import Counter
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.kinds.webdataset import tar_members
from shardmill.errors import IntegrityError, UsageError
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import add_member, labels, picture, reasons, samples, write_tar
from tests.services.s3 import s3_client


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_members_are_found_as_tarfile_finds_them(form: int, tmp_path: Path):
    long = 90 if form == tarfile.USTAR_FORMAT else 300
    members = {f"dir/é{number}/{'x' * (number % long)}.jpg": b"a" * number for number in range(700)}
    write_tar(tmp_path / "a.tar", members, form=form)
    with tarfile.open(tmp_path / "a.tar") as tar, open(tmp_path / "a.tar", "rb") as file:
        expected = [(each.name, each.offset_data, each.size) for each in tar]
        found = [(each.name, each.start, each.size_bytes) for each in tar_members(file, 10**9)]
    assert found == expected


@pytest.mark.parametrize(
    ("label_field", "first"), [("", "0"), ("cls", "0"), ("json.class.name", "c0"), ("json.id", "0")]
)
def test_labels_come_from_the_configured_member(label_field: str, first: str, tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", samples()).model_copy(update={"label_field": label_field})
    listing = list_images(source)
    assert listing.num_images == 40 and not listing.rejections
    assert labels(listing)["0000.png"] == first


def test_a_sample_without_a_label_is_a_rejection_and_so_is_a_label_without_an_image(tmp_path: Path):
    members = samples(4)
    del members["0001.cls"], members["0002.png"]
    listing = list_images(write_tar(tmp_path / "a.tar", members))
    assert labels(listing) == {"0000.png": "0", "0003.png": "0"}
    assert reasons(listing) == {"bad_label": 1, "not_an_image_name": 2}


@pytest.mark.parametrize("stem", ["img_{:04d}.v1", "{:04d}.2024.05", "shot.{:05d}", "a.b/c.d.{}"])
@pytest.mark.parametrize(("label_field", "suffix"), [("", "cls"), ("", "CLS"), ("txt", "txt"), ("json.label", "json")])
def test_dots_in_names_lose_no_label(stem: str, label_field: str, suffix: str, tmp_path: Path):
    """1,200 samples of `shot.` are one by WebDataset's rule, and more members than are kept at once."""
    members = {}
    for number in range(1_200 if stem.startswith("shot") else 8):
        members[f"{stem.format(number)}.png"] = b"%d" % number
        text = b'{"label": "%d"}' % (number % 3) if suffix == "json" else b"%d" % (number % 3)
        members[f"{stem.format(number)}.{suffix}"] = text
    source = write_tar(tmp_path / "a.tar", members).model_copy(update={"label_field": label_field})
    listing = list_images(source)
    expected = {f"{stem.format(number)}.png": str(number % 3) for number in range(len(members) // 2)}
    assert labels(listing) == expected and not listing.rejections


def test_a_suffix_with_a_dot_may_be_the_label(tmp_path: Path):
    source = write_tar(
        tmp_path / "a.tar", {"1.png": picture(1), "1.seg.cls": b"x", "2.png": picture(2), "2.seg.cls": b"y"}
    )
    listing = list_images(source.model_copy(update={"label_field": "seg.cls"}))
    assert labels(listing) == {"1.png": "x", "2.png": "y"}


@pytest.mark.parametrize("text", [
    b"7", b"7\r\n", b" 7 ", b"\xef\xbb\xbf7", b"\xef\xbb\xbf7\r\n", "7".encode("utf-16"), b"\xfe\xff\x007\x00\n",
])  # fmt: skip
def test_a_label_is_its_text_whatever_editor_wrote_it(text: bytes, tmp_path: Path):
    members = {"1.png": picture(1), "1.cls": text, "2.png": picture(2), "2.cls": b"7"}
    assert list_images(write_tar(tmp_path / "a.tar", members)).class_names == ("7",)


@pytest.mark.parametrize(("value", "label", "problem"), [
    ("1.0", "1", ""), ("-2.0", "-2", ""), ("3", "3", ""), ('"cat"', "cat", ""), ("1e3", "1000", ""),
    ("0.5", None, 'json.label is 0.5, which is no class; source.label_kind = "float" takes numbers'),
    ("NaN", None, 'json.label is nan, which is no class; source.label_kind = "float" takes numbers'),
    ("[1, 2]", None, (
        'json.label has 2 values, but a class is one value; source.label_kind = "multi_label" or "float_vector" takes '
        "all"
    )),
    ("[4]", "4", ""), ("[]", None, "json.label is an empty list"),
    ('{"id": 1}', None, "json.label is an object; source.label_field may name a field of it"),
    ("null", None, "no json.label beside it"), ('""', None, "no json.label"),
])  # fmt: skip
def test_a_value_of_json_is_a_class_or_says_why_not(value: str, label: str | None, problem: str, tmp_path: Path):
    members = {"0.png": picture(0), "0.json": b'{"label": "x"}'}
    members |= {"1.png": picture(1), "1.json": b'\xef\xbb\xbf{"label": %s}' % value.encode()}
    source = write_tar(tmp_path / "a.tar", members).model_copy(update={"label_field": "json.label"})
    listing = list_images(source)
    assert labels(listing).get("1.png") == label
    assert [each.detail for each in listing.rejections] == ([problem] if problem else [])


def test_labels_that_are_not_utf8_are_not_mixed_up(tmp_path: Path):
    members = {"1.png": picture(1), "1.cls": b"caf\xe9", "2.png": picture(2), "2.cls": b"caf\xea", "3.png": picture(3)}
    listing = list_images(write_tar(tmp_path / "a.tar", members | {"3.cls": b"tea"}))
    assert listing.class_names == ("tea",)
    assert [each.detail for each in listing.rejections] == ["cls is not UTF-8"] * 2


def test_folders_in_a_plain_tar_are_classes(tmp_path: Path):
    names = ["pile/train/cat/1.png", "pile/train/dog/2.png", "pile/val/dog/3.png"]
    listing = list_images(write_tar(tmp_path / "a.tar", {f"./{name}": picture(0) for name in names}))
    assert labels(listing) == {f"./{name}": name.split("/")[2] for name in names}
    assert Counter(image.split for image in images_of(listing)) == {"train": 2, "validation": 1}
    splits = {"train/cat/1.png": "train", "val/dog/2.png": "validation"}
    listing = list_images(write_tar(tmp_path / "b.tar", {name: picture(0) for name in splits}))
    assert {image.key.partition("\0")[2]: image.split for image in images_of(listing)} == splits
    top = write_tar(tmp_path / "a.tar", {name: picture(0) for name in names}).model_copy(update={"label_level": 1})
    assert set(labels(list_images(top)).values()) == {"pile"}


def test_captions_beside_images_do_not_make_folders_classes(tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", {"00/1.png": picture(1), "00/1.txt": b"a dog", "00/1.json": b"{}"})
    assert labels(list_images(source)) == {"00/1.png": None}
    captioned = source.model_copy(update={"label_field": "txt"})
    assert labels(list_images(captioned)) == {"00/1.png": "a dog"}


def test_one_of_several_images_of_a_sample_is_chosen_by_its_suffix(tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", {"1.rgb.png": picture(1), "1.mask.png": picture(2), "1.cls": b"x"})
    assert set(labels(list_images(source))) == {"1.rgb.png", "1.mask.png"}
    chosen = source.model_copy(update={"image_field": "rgb.png"})
    assert labels(list_images(chosen)) == {"1.rgb.png": "x"}


def test_names_of_shards_are_splits_and_patterns_choose_them(tmp_path: Path):
    for number, name in enumerate(["set-train-000.tar", "set-train-001.tar", "set-val-000.tar"]):
        write_tar(tmp_path / name, {f"{number}.png": picture(number), f"{number}.cls": b"x"})
    (tmp_path / "README.md").write_text("about")
    everything = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))
    assert Counter(image.split for image in images_of(everything)) == {"train": 2, "validation": 1}
    assert reasons(everything) == {"not_an_image_name": 1}
    for pattern, count in {"set-train-*.tar": 2, "set-train-{000..000}.tar": 1, "set-*-000.tar": 2}.items():
        assert list_images(SourceConfig(uri=f"{tmp_path}/{pattern}", kind="webdataset")).num_images == count
    with pytest.raises(UsageError, match=r"2 of the files that it names do not exist, such as set-train-002\.tar"):
        list_images(SourceConfig(uri=f"{tmp_path}/set-train-{{000..003}}.tar", kind="webdataset"))
    write_tar(tmp_path / "extra.tar", {"9.png": picture(9), "9.cls": b"x"})
    with pytest.raises(UsageError, match="set-train-000\\.tar names a split, but extra\\.tar does not"):
        list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))


def test_a_member_twice_is_one_image_and_one_rejection(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for number in (1, 2, 1):
            add_member(tar, f"{number}.png", picture(number))
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.tar"), kind="webdataset"))
    assert listing.num_images == 2 and reasons(listing) == {"duplicate_key": 1}


@pytest.mark.parametrize("packed", [False, True])
def test_an_archive_cut_anywhere_loses_nothing_silently(packed: bool, tmp_path: Path):
    """What was listed reads back; the rest is one rejection, and only a whole archive has none."""
    write_tar(tmp_path / "whole.tar", samples(6))
    whole = (tmp_path / "whole.tar").read_bytes()
    # Behind the end marker there is only padding.
    data = gzip.compress(whole) if packed else whole.rstrip(b"\0")
    name = "cut.tar.gz" if packed else "cut.tar"
    source = SourceConfig(uri=str(tmp_path / name), kind="webdataset", label_field="cls")
    for length in range(40, len(data), 617 if packed else 1777):
        (tmp_path / name).write_bytes(data[:length])
        batches = list(SOURCES["webdataset"](source).list())
        rejections = [each for batch in batches for each in batch.rejections]
        assert "damaged_container" in {str(each.reason) for each in rejections}
        reader = SOURCES["webdataset"](source).open(10**6)
        for image in images_of(list_images(source)) if sum(batch.images.num_rows for batch in batches) else []:
            read = reader.read(image)
            assert isinstance(read, Rejection) or read.startswith(b"\x89PNG")


def test_damage_in_a_packed_archive_is_seen_by_its_checksum(tmp_path: Path):
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w") as tar:
        for name, data in samples(30).items():
            add_member(tar, name, data)
    data = bytearray(gzip.compress(raw.getvalue(), 0))
    data[len(data) // 2] ^= 1
    (tmp_path / "a.tgz").write_bytes(bytes(data))
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.tgz"), kind="webdataset", label_field="cls"))
    assert reasons(listing)["damaged_container"] == 1


def test_hostile_headers_end_an_archive_at_once(tmp_path: Path):
    def header(size: bytes, kind: bytes = b"0") -> bytes:
        block = bytearray(tarfile.TarInfo("x.png").tobuf(tarfile.USTAR_FORMAT))
        block[124:136], block[156:157], block[148:156] = size, kind, b" " * 8
        block[148:156] = b"%06o\0 " % sum(block)
        return bytes(block)

    negative = b"\xff" * 12
    huge = b"\x80" + b"\x00" * 3 + b"\xff" * 8
    for hostile in (header(negative), header(huge), header(b"77777777777\0", b"x"), b"\0" * 511 + b"x"):
        with pytest.raises(IntegrityError):
            list(tar_members(io.BytesIO(hostile + bytes(2048)), 10**6))
    bad_pax = b"99999999999999 path=x\n"
    with pytest.raises(IntegrityError, match="pax"):
        list(tar_members(io.BytesIO(header(b"%011o\0" % len(bad_pax), b"x") + bad_pax.ljust(512, b"\0")), 10**6))


def test_a_bomb_ends_as_a_rejection_after_bounded_work(tmp_path: Path):
    """A member of 8 GB of zeros in a few MB is not unpacked to its end."""
    member = tarfile.TarInfo("0.png")
    member.size = 8 << 30
    with gzip.open(tmp_path / "bomb.tar.gz", "wb", compresslevel=1) as out:
        out.write(member.tobuf() + bytes(1 << 20))
    write_tar(tmp_path / "sound.tar", samples(1))
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))
    assert reasons(listing)["damaged_container"] == 1


def test_hostile_names_are_keys_and_nothing_else(tmp_path: Path):
    names = ["../../etc/passwd.png", "/abs.png", "a\x1b[2J.png", "b\nc.png", "x" * 5000 + ".png"]
    hostile = {}
    for number, name in enumerate(names):
        hostile |= {name: picture(number), f"{name.removesuffix('.png')}.cls": b"0"}
    source = write_tar(tmp_path / "in" / "a.tar", hostile | samples(40))
    manifest = build_source(source, tmp_path / "dataset")
    assert manifest.counts.accepted == 45 and not manifest.counts.rejected
    assert sorted(each.name for each in tmp_path.iterdir()) == ["dataset", "in"]


def test_an_archive_that_changed_after_the_listing_gives_no_bytes(tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", samples(3))
    images = images_of(list_images(source))
    write_tar(tmp_path / "a.tar", samples(4))
    read = SOURCES["webdataset"](source).open(10**6).read(images[0])
    assert isinstance(read, Rejection) and read.reason == "source_changed"


def test_archives_in_a_bucket_are_listed_and_read_by_ranges(tmp_path: Path, s3_bucket: str, s3_server: str):
    write_tar(tmp_path / "train-0.tar", samples(50))
    write_tar(tmp_path / "train-1.tar.gz", {f"b{name}": data for name, data in samples(30).items()}, "w:gz")
    bucket = s3_bucket.removeprefix("s3://")
    for name in ("train-0.tar", "train-1.tar.gz"):
        s3_client(s3_server).upload_file(str(tmp_path / name), bucket, f"pile/{name}")
    local = build_source(SourceConfig(uri=f"{tmp_path}/train-*", kind="webdataset"), tmp_path / "local")
    remote = build_source(SourceConfig(uri=f"{s3_bucket}/pile", kind="webdataset"), tmp_path / "remote")
    assert remote.content_digest == local.content_digest and remote.counts.by_split == {"train": 80}
