"""ZIP archives: what Python's zipfile writes is listed and read; damage, bombs and encryption are rejections."""

from __future__ import annotations

import io
import struct
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.kinds.zip import read_zip_member, zip_members
from shardmill.errors import IntegrityError, UsageError
from shardmill.values import Rejection
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import picture, zip_bytes, zip_source
from tests.services.s3 import s3_client


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_members_are_found_and_read_as_zipfile_does(kind: int, streamed: bool):
    members = {f"dir/é{number}.jpg": bytes([number % 7]) * (number * 37 % 9000) for number in range(300)}
    data = zip_bytes(members, kind, streamed=streamed)
    found = list(zip_members(io.BytesIO(data), len(data)))
    assert [(each.name, each.size_bytes) for each in found] == [(name, len(each)) for name, each in members.items()]
    file = io.BytesIO(data)
    assert [read_zip_member(file, each.start, each.size_bytes) for each in found] == list(members.values())


@pytest.mark.drill
def test_more_members_than_the_old_format_counts():
    data = zip_bytes({f"{number}": b"" for number in range(70_000)}, zipfile.ZIP_STORED)
    assert sum(1 for _ in zip_members(io.BytesIO(data), len(data))) == 70_000


def test_folders_are_classes_and_splits(tmp_path: Path):
    members = {"train/cat/1.png": picture(1), "val/dog/2.png": picture(2), "__MACOSX/._2.png": b"x", "train/": b""}
    listing = list_images(zip_source(tmp_path / "a.zip", zip_bytes(members)))
    assert [(image.label, image.split) for image in images_of(listing)] == [("cat", "train"), ("dog", "validation")]
    assert [str(each.reason) for each in listing.rejections] == ["not_an_image_name"]
    with pytest.raises(UsageError, match="ZIP archives have their classes in folders"):
        list_images(SourceConfig(uri=str(tmp_path / "a.zip"), kind="zip", label_field="cls"))


def test_damage_is_never_an_image_with_other_bytes(tmp_path: Path):
    expected = {f"c/{number}.png": picture(number) for number in range(4)}
    data = zip_bytes(expected)
    for place in range(0, len(data), 61):
        damaged = bytearray(data)
        damaged[place] ^= 0x55
        file = io.BytesIO(bytes(damaged))
        try:
            for member in zip_members(file, len(data)):
                if member.is_file and member.size_bytes < 10_000:
                    assert read_zip_member(file, member.start, member.size_bytes) in expected.values()
        except IntegrityError:
            pass
    for length in range(0, len(data), 501):
        with pytest.raises(IntegrityError, match="no directory"):
            list(zip_members(io.BytesIO(data[:length]), length))


def test_a_damaged_member_costs_itself_and_a_cut_archive_nothing_else(tmp_path: Path):
    (tmp_path / "in").mkdir()
    data = bytearray(zip_bytes({f"c/{number}.png": picture(number) for number in range(40)}, zipfile.ZIP_STORED))
    data[data.index(picture(7)) + 100] ^= 1
    zip_source(tmp_path / "in" / "a.zip", bytes(data))
    zip_source(tmp_path / "in" / "b.zip", zip_bytes({"c/x.png": picture(99)})[:-30])
    manifest = build_source(SourceConfig(uri=str(tmp_path / "in"), kind="zip"), tmp_path / "d", max_reject_fraction=0.1)
    assert manifest.counts.by_reason == {"damaged_container": 2} and manifest.counts.accepted == 39


def test_a_bomb_is_unpacked_to_its_stated_size_and_no_further(tmp_path: Path):
    data = bytearray(zip_bytes({"c/1.png": bytes(100_000_000)}))
    directory = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, directory + 24, 1_000)
    source = zip_source(tmp_path / "a.zip", bytes(data))
    [image] = images_of(list_images(source))
    read = SOURCES["zip"](source).open(10_000).read(image)
    assert isinstance(read, Rejection) and read.reason == "damaged_container"


def test_encrypted_members_and_links_are_rejections(tmp_path: Path):
    data = bytearray(zip_bytes({"c/1.png": picture(1), "c/2.png": picture(2), "c/3.png": picture(3)}))
    first = data.index(b"PK\x01\x02")
    data[first + 8] |= 1
    last = data.rindex(b"PK\x01\x02")
    struct.pack_into("<I", data, last + 38, 0o120777 << 16)
    listing = list_images(zip_source(tmp_path / "a.zip", bytes(data)))
    assert listing.num_images == 1 and Counter(str(e.reason) for e in listing.rejections) == {"not_regular_file": 2}


def test_archives_in_a_bucket_give_the_dataset_of_local_ones(tmp_path: Path, s3_bucket: str, s3_server: str):
    local = zip_source(tmp_path / "a.zip", zip_bytes({f"c{n % 2}/{n}.png": picture(n) for n in range(40)}))
    s3_client(s3_server).upload_file(local.uri, s3_bucket.removeprefix("s3://"), "pile/a.zip")
    before = build_source(local, tmp_path / "local")
    remote = SourceConfig(uri=f"{s3_bucket}/pile/a.zip", kind="zip")
    assert build_source(remote, tmp_path / "remote").content_digest == before.content_digest
