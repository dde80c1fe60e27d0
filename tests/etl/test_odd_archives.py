"""Archives as people's tools write them: odd names, prefixes, packings and links hide neither images nor labels."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

from etl.config import SourceConfig
from etl.listing.listing import Listing
from etl.sources import SOURCES
from etl.sources.kinds.zip import read_zip_member, zip_members
from etl.sources.recognise import recognise
from tests.etl.building import build_source, images_of, list_images
from tests.etl.source_files import add_member, labels, picture, samples, write_tar, zip_bytes, zip_source

MS_DOS, UNIX, NTFS = 0, 3, 10


def zip_of(*members: tuple[bytes, bytes, int]) -> bytes:
    """Stored members of (name, extra field, host), written without the flag that says UTF-8."""
    body, directory = b"", b""
    for number, (name, extra, host) in enumerate(members):
        data = picture(number)
        facts = struct.pack("<3I2H", zlib.crc32(data), len(data), len(data), len(name), len(extra))
        directory += struct.pack("<4s6H", b"PK\x01\x02", host << 8 | 20, 20, 0, 0, 0, 33) + facts
        directory += struct.pack("<3H2I", 0, 0, 0, 0o100644 << 16, len(body)) + name + extra
        body += struct.pack("<4s5H", b"PK\x03\x04", 20, 0, 0, 0, 33) + facts + name + extra + data
    end = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, len(members), len(members), len(directory), len(body), 0)
    return body + directory + end


def unicode_path(name: str, raw: bytes) -> bytes:
    data = b"\x01" + struct.pack("<I", zlib.crc32(raw)) + name.encode()
    return struct.pack("<HH", 0x7075, len(data)) + data


def details(listing: Listing) -> Counter[str]:
    return Counter(each.detail for each in listing.rejections)


@pytest.mark.parametrize(("raw", "extra", "host", "name"), [
    (b"cat\\1.png", b"", UNIX, "cat/1.png"),
    (b"data\\train/cat\\1.png", b"", NTFS, "data/train/cat/1.png"),
    (b"data\\cat/1.png", b"", MS_DOS, "data/cat/1.png"),
    (b"cat/a\\b.png", b"", UNIX, "cat/a\\b.png"),
    ("caf\u00e9/1.png".encode(), b"", UNIX, "caf\u00e9/1.png"),
    ("caf\u00e9\\\u9ce5.png".encode(), b"", MS_DOS, "caf\u00e9/\u9ce5.png"),
    (b"caf\x82/1.png", b"", MS_DOS, "caf\u00e9/1.png"),
    (b"caf?/1.png", unicode_path("caf\u00e9/1.png", b"caf?/1.png"), UNIX, "caf\u00e9/1.png"),
    (b"_\\1.png", unicode_path("\u9ce5\\1.png", b"_\\1.png"), MS_DOS, "\u9ce5/1.png"),
    (b"\x8d\x92\x5c/1.png", b"", MS_DOS, "\u00ec\u00c6\\/1.png"),
    (b"caf\xe9/1.png", unicode_path("caf\u00e9/1.png", b"caf\xe9/1.png"), UNIX, "caf\u00e9/1.png"),
    (b"caf\xe9/1.png", unicode_path("old/1.png", b"renamed since"), UNIX, "caf\u0398/1.png"),
])  # fmt: skip
def test_a_zip_name_is_read_as_its_writer_meant_it(raw: bytes, extra: bytes, host: int, name: str):
    data = zip_of((raw, extra, host))
    [member] = zip_members(io.BytesIO(data), len(data))
    assert member.name == name and read_zip_member(io.BytesIO(data), member.start, member.size_bytes) == picture(0)


def test_backslashes_lead_nowhere(tmp_path: Path):
    names = [b"..\\..\\etc\\1.png", b"C:\\cat\\2.png", b"\\\\host\\cat\\3.png", b"..\\4.png"]
    source = zip_source(tmp_path / "a.zip", zip_of(*((name, b"", UNIX) for name in names)))
    listing = list_images(source)
    assert labels(listing) == {"../../etc/1.png": "etc", "C:/cat/2.png": "cat", "//host/cat/3.png": "cat"}
    assert [str(each.reason) for each in listing.rejections] == ["bad_label"]


@pytest.mark.parametrize("count", [5, 70_000])
@pytest.mark.parametrize("prefix", [b"#" * 1000, b"MZ" * 40_000, zip_bytes({"x/0.png": b"another archive"})])
def test_an_archive_behind_other_bytes_is_read(count: int, prefix: bytes):
    """Self-extracting ones, HTTP headers, one archive behind another; with more members than 16 bits count, too."""
    members = {f"cat/{number}.png": b"%d" % number for number in range(count)}
    data = prefix + zip_bytes(members, zipfile.ZIP_STORED)
    file = io.BytesIO(data)
    found = list(zip_members(io.BytesIO(data), len(data)))
    assert [each.name for each in found] == list(members)
    for each in found[:: count // 5]:
        assert read_zip_member(file, each.start, each.size_bytes) == members[each.name]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("kind", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_members_of_other_packings_are_read_and_checked(kind: int, streamed: bool):
    members = {f"c/{number}": bytes([number]) * (number * 7919 % 200_000) for number in range(12)}
    data = zip_bytes(members, kind, streamed=streamed)
    found = list(zip_members(io.BytesIO(data), len(data)))
    file = io.BytesIO(data)
    assert [read_zip_member(file, each.start, each.size_bytes) for each in found] == list(members.values())


def test_lzma_without_an_end_mark_is_read():
    """As 7-Zip writes it."""
    data = picture(0) * 3
    packed = lzma.compress(data, lzma.FORMAT_ALONE)
    # The 13 bytes of that format: properties, and a size that ZIP states elsewhere. Python ends it with a mark.
    body = packed[:5] + packed[13:]
    head = b"\x09\x04" + struct.pack("<H", 5)
    local = struct.pack("<4s5H3I2H", b"PK\x03\x04", 63, 0, 14, 0, 33, zlib.crc32(data), 0, len(data), 1, 0) + b"a"
    assert read_zip_member(io.BytesIO(local + head + body), 0, len(data)) == data


def test_a_member_that_is_no_file_says_why(tmp_path: Path):
    data = bytearray(zip_bytes({f"c/{number}.png": picture(number) for number in range(4)}))
    places = [place for place in range(len(data)) if data[place : place + 4] == b"PK\x01\x02"]
    struct.pack_into("<H", data, places[0] + 10, 93)
    struct.pack_into("<H", data, places[1] + 10, 9)
    data[places[2] + 8] |= 1
    listing = list_images(zip_source(tmp_path / "a.zip", bytes(data)))
    read = "; stored, Deflate, bzip2 and LZMA are read"
    assert details(listing) == {f"packed with Zstandard{read}": 1, f"packed with Deflate64{read}": 1, "encrypted": 1}


def linked_tar(file: Path, form: int = tarfile.PAX_FORMAT) -> SourceConfig:
    """Two images, each with a second name: of one in another class, and of one with a long path."""
    with tarfile.open(file, "w", format=form) as tar:
        for number, (name, link) in enumerate((("./cat/1.png", "dog/2.png"), (f"cat/{'x' * 200}.png", "cat/4.png"))):
            add_member(tar, name, picture(number))
            entry = tarfile.TarInfo(link)
            entry.type, entry.linkname = tarfile.LNKTYPE, name
            tar.addfile(entry)
    return SourceConfig(uri=str(file), kind="webdataset")


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_hard_link_has_the_bytes_of_its_target(form: int, tmp_path: Path):
    source = linked_tar(tmp_path / "a.tar", form)
    images = images_of(list_images(source))
    reader = SOURCES["webdataset"](source).open(10_000)
    read = {image.key.partition("\0")[2]: (image.label, reader.read(image)) for image in images}
    assert read["dog/2.png"] == ("dog", picture(0)) and read["cat/4.png"] == ("cat", picture(1)) and len(read) == 4


def test_links_that_lead_to_nothing_say_so(tmp_path: Path):
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        add_member(tar, "cat/1.png", picture(1))
        for number, (kind, target) in enumerate(((tarfile.LNKTYPE, "gone.png"), (tarfile.SYMTYPE, "cat/1.png"))):
            entry = tarfile.TarInfo(f"cat/link{number}.png")
            entry.type, entry.linkname = kind, target
            tar.addfile(entry)
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.tar"), kind="webdataset"))
    hard = "a hard link to gone.png, which is not among the files before it"
    assert details(listing) == {hard: 1, "a symbolic link": 1}


def test_a_hard_link_in_a_packed_archive_is_a_rejection_that_says_so(tmp_path: Path):
    linked_tar(tmp_path / "a.tar")
    (tmp_path / "a.tar").write_bytes(gzip.compress((tmp_path / "a.tar").read_bytes()))
    listing = list_images(SourceConfig(uri=str(tmp_path / "a.tar"), kind="webdataset"))
    assert listing.num_images == 2 and all(detail.startswith("a hard link to ") for detail in details(listing))


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    ".tar.xz": lzma.compress, ".txz": lzma.compress, ".tar.bz2": bz2.compress, ".tbz2": bz2.compress,
    ".tar.zst": lambda data: pa.Codec("zstd").compress(data, asbytes=True), ".tar": gzip.compress, ".tgz": bytes,
}  # fmt: skip


@pytest.mark.parametrize("suffix", PACKINGS)
def test_packed_archives_give_the_dataset_of_a_plain_one(suffix: str, tmp_path: Path):
    """Of whatever packing their first bytes tell, whatever their names say."""
    plain = write_tar(tmp_path / "a.tar", samples(40))
    data = (tmp_path / "a.tar").read_bytes()
    before = build_source(plain, tmp_path / "before")
    (tmp_path / "in").mkdir()
    # The key of an image has the archive's name.
    file = tmp_path / "in" / f"a{suffix}"
    file.write_bytes(PACKINGS[suffix](data))
    assert recognise(str(tmp_path / "in")) == "webdataset" == recognise(str(file))
    source = SourceConfig(uri=str(file), kind="webdataset")
    assert build_source(source, tmp_path / "after").counts.by_split == before.counts.by_split
    reader = SOURCES["webdataset"](source).open(10_000)
    images = images_of(list_images(source))
    assert [reader.read(image) for image in reversed(images)] == [picture(number) for number in reversed(range(40))]


@pytest.mark.parametrize("suffix", [".tar.xz", ".tar.bz2", ".tar.zst"])
def test_a_packed_archive_that_is_cut_lists_what_is_whole(suffix: str, tmp_path: Path):
    write_tar(tmp_path / "a.tar", samples(300))
    data = PACKINGS[suffix]((tmp_path / "a.tar").read_bytes())
    (tmp_path / f"b{suffix}").write_bytes(data[: len(data) * 3 // 4])
    (tmp_path / "a.tar").unlink()
    write_tar(tmp_path / "c.tar", {"x.png": picture(1), "x.cls": b"0"})
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))
    assert "damaged_container" in {str(each.reason) for each in listing.rejections} and 0 < listing.num_images < 301
