"""Relative URIs lead from the folder of the table that names them, wherever the source begins."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from shardmill.errors import UsageError
from shardmill.values import RejectReason, SourceImage
from tests.etl.building import build_source, images_of, list_images
from tests.lab.datasets import write_images
from tests.services.s3 import s3_client


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def table_of(uri: str) -> SourceConfig:
    return SourceConfig(uri=uri, kind="table")


def two_folders(root: Path) -> None:
    for name in ("a", "b"):
        write(root / name / "labels.csv", f"uri,label\n1.jpg,{name}\n./2.jpg,{name}\n")
        for number in (1, 2):
            write(root / name / f"{number}.jpg", f"{name}{number}")


def read_all(source: SourceConfig) -> dict[str, bytes]:
    reader = SOURCES["table"](source).open(1_000)

    def data(image: SourceImage) -> bytes:
        assert reader.is_there(image.container or image.key)
        found = reader.read(image)
        assert isinstance(found, bytes)
        return found

    return {image.key: data(image) for image in images_of(list_images(source))}


@pytest.mark.parametrize("uri", ["", "/*/labels.csv", "/{a,b}/labels.csv"])
def test_tables_of_two_folders_name_the_files_beside_them(uri: str, tmp_path: Path):
    two_folders(tmp_path)
    found = read_all(table_of(f"{tmp_path}{uri}"))
    assert found == {"a/1.jpg": b"a1", "a/2.jpg": b"a2", "b/1.jpg": b"b1", "b/2.jpg": b"b2"}


def test_a_table_in_the_root_keeps_its_keys(tmp_path: Path):
    two_folders(tmp_path)
    assert list(read_all(table_of(f"{tmp_path}/a/labels.csv"))) == ["1.jpg", "2.jpg"]
    write(tmp_path / "c" / "t.csv", "uri\n../a/1.jpg\nd/../3.jpg\n")
    keys = [image.key for image in images_of(list_images(table_of(f"{tmp_path}/c")))]
    assert keys == ["../a/1.jpg", "d/../3.jpg"]


def test_one_file_has_one_key_whichever_table_names_it(tmp_path: Path):
    two_folders(tmp_path)
    write(tmp_path / "a" / "more.csv", "uri,label\n../b/1.jpg,b\n../../elsewhere.jpg,x\n")
    write(tmp_path / "index.csv", "uri,label\nb/2.jpg,b\n")
    listing = list_images(table_of(str(tmp_path)))
    assert [image.key for image in images_of(listing)] == [
        "../elsewhere.jpg", "a/1.jpg", "a/2.jpg", "b/1.jpg", "b/2.jpg",
    ]  # fmt: skip
    assert [str(each.reason) for each in listing.rejections] == ["duplicate_key"] * 2


def test_absolute_uris_stay_and_faults_are_those_of_the_row(tmp_path: Path):
    rows = ["/abs/1.jpg", "s3://bucket/2.jpg", "https://host/3.jpg", "C:\\\\4.jpg", "ftp://host/5.jpg", "sub\\6.jpg"]
    write(tmp_path / "a" / "t.csv", "uri\n" + "\n".join(rows) + "\n")
    listing = list_images(table_of(str(tmp_path)))
    keys = [image.key for image in images_of(listing)]
    assert keys == ["/abs/1.jpg", "a/sub/6.jpg", "https://host/3.jpg", "s3://bucket/2.jpg"]
    assert sorted(each.key for each in listing.rejections) == ["a/t.csv\x004", "a/t.csv\x005"]


def test_names_are_looked_up_beside_the_table(tmp_path: Path):
    write(tmp_path / "a" / "t.csv", "uri\nx\\1.jpg\n")
    write(tmp_path / "a" / "x\\1.jpg", "x")
    write(tmp_path / "b" / "t.csv", "uri\n0001\n")
    write(tmp_path / "b" / "0001", "x")
    assert [image.key for image in images_of(list_images(table_of(str(tmp_path))))] == ["a/x\\1.jpg", "b/0001"]


def test_a_key_of_its_own_reads_the_file_beside_its_table(tmp_path: Path):
    for name in ("a", "b"):
        write(tmp_path / name / "t.csv", f"uri,key\n1.jpg,k{name}\n1.jpg,same\n")
        write(tmp_path / name / "1.jpg", name)
    # The key is the image, whatever table has it.
    assert read_all(table_of(str(tmp_path))) == {"ka": b"a", "kb": b"b", "same": b"a"}
    [again] = list_images(table_of(str(tmp_path))).rejections
    assert (again.key, again.reason) == ("same\x002", RejectReason.DUPLICATE_KEY)


def test_paths_from_the_source_s_root_are_distinguished_from_lost_files(tmp_path: Path):
    write(tmp_path / "images" / "1.jpg", "x")
    write(tmp_path / "lists" / "t.csv", "uri\nimages/1.jpg\n")
    with pytest.raises(UsageError, match=r"the table lists/t\.csv names files as 'images/1\.jpg'") as caught:
        list_images(table_of(str(tmp_path)))
    assert "../images/1.jpg" in caught.value.fix
    write(tmp_path / "lists" / "t.csv", "uri\n../images/1.jpg\n")
    assert read_all(table_of(str(tmp_path))) == {"images/1.jpg": b"x"}


def test_tables_in_a_bucket_lead_from_their_folders(tmp_path: Path, s3_bucket: str, s3_server: str):
    write_images(tmp_path / "images", num_images=20)
    bucket, client = s3_bucket.removeprefix("s3://"), s3_client(s3_server)
    for name in ("a", "b"):
        files = sorted((tmp_path / "images").rglob("*.png"))[name == "b" :: 2]
        uris = [file.name for file in files] if name == "a" else [f"../pictures/{file.name}" for file in files]
        for file in files:
            client.upload_file(str(file), bucket, f"pile/{'a' if name == 'a' else 'pictures'}/{file.name}")
        client.put_object(Bucket=bucket, Key=f"pile/{name}/t.csv", Body="\n".join(["uri", *uris]).encode())
    manifest = build_source(table_of(f"{s3_bucket}/pile"), tmp_path / "dataset")
    assert manifest.counts.accepted == 20 and not manifest.counts.rejected
