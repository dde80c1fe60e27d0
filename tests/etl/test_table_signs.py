"""A table beside images that names them, and another column beside, is a sign of labels, whatever it is called."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import SourceConfig
from shardmill.errors import AccessDenied
from shardmill.stores.local import LocalStore
from tests.etl.building import list_images
from tests.etl.labelled_sources import KINDS, Kind, refuses
from tests.etl.source_files import picture, write_tar, zip_bytes, zip_source
from tests.services.s3 import s3_client

NAMED = b"file,emotion\n1.jpg,glad\n2.jpg,sad\n3.jpg,sad\n"


def source_of(kind: Kind, folder: Path, members: dict[str, bytes]) -> SourceConfig:
    """The same files as a folder, a tar or a ZIP archive."""
    if kind == "webdataset":
        return write_tar(folder / "a.tar", members)
    if kind == "zip":
        return zip_source(folder / "a.zip", zip_bytes(members))
    for name, data in members.items():
        (folder / "images" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "images" / name).write_bytes(data)
    return SourceConfig(uri=str(folder / "images"))


def images(*names: str) -> dict[str, bytes]:
    return {name: picture(place) for place, name in enumerate(names)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["train.csv", "data.tsv"])
@pytest.mark.parametrize(
    "names",
    [
        ("1.jpg", "2.jpg", "3.jpg"),
        ("train/1.jpg", "train/2.jpg", "test/3.jpg"),
        ("images/1.jpg", "images/2.jpg", "images/3.jpg"),
        ("train/images/1.jpg", "train/images/2.jpg", "test/images/3.jpg"),
    ],
)
def test_a_table_that_names_the_images_is_not_lost(kind: Kind, name: str, names: tuple[str, ...], tmp_path: Path):
    text = NAMED.replace(b",", b"\t") if name.endswith(".tsv") else NAMED
    source = source_of(kind, tmp_path, {**images(*names), name: text})
    refuses(source, f"{name}.* names the images, with 'emotion' for each")
    if "images/" in names[0]:
        assert list_images(source.model_copy(update={"label_level": 1})).class_names == ("images",)


@pytest.mark.parametrize(
    "text",
    [
        b"x,y\n1,0\n2,4\n3,0\n",
        b"x;y\r\n1;0\r\n2;4\r\n3;0\r\n",
        b"1.jpg,cat\n2.jpg,dog\n",
        b"id_code,diagnosis\nfff,1\n",
        b"Image Index,finding,width\n7.png,none,64\n",
        "bild,gef\u00fchl\n1.jpg,fr\u00f6hlich\n2.jpg,".encode("latin-1"),
        "uri,kind\n1.jpg,cat\n".encode("utf-16"),
        NAMED + b"4.jpg,sad\n" * 20_000 + b'5.jpg,"',
    ],
)
def test_the_column_of_names_is_known_by_its_values_or_its_name(text: bytes, tmp_path: Path):
    refuses(source_of("folders", tmp_path, {**images("1.jpg", "2.jpg", "3.jpg"), "train.csv": text}), "train.csv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"file\n1.jpg\n",
        b"file,width,height\n1.jpg,64,64\n2.jpg,64,64\n",
        b"epoch,loss\n10,0.5\n20,0.25\n",
        b"file,caption\n" + b"".join(b"%d.jpg,text %d\n" % (place, place) for place in range(9)),
        picture(3) + b"\0,\0\n",
    ],
)
def test_other_tables_end_nothing(kind: Kind, text: bytes, tmp_path: Path):
    source = source_of(kind, tmp_path, {**images("1.jpg", "2.jpg", "3.jpg"), "notes.csv": text})
    assert list_images(source).num_images == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_beside_class_folders_ends_nothing(kind: Kind, tmp_path: Path):
    source = source_of(kind, tmp_path, {**images("cat/1.jpg", "dog/2.jpg"), "train.csv": NAMED})
    assert list_images(source).class_names == ("cat", "dog")


def test_one_class_folder_without_signs_is_a_class(tmp_path: Path):
    assert list_images(source_of("folders", tmp_path, images("cat/1.jpg", "cat/2.jpg"))).class_names == ("cat",)


def test_a_table_in_a_bucket_is_looked_at(tmp_path: Path, s3_bucket: str, s3_server: str):
    for name, data in {**images("pile/images/1.jpg", "pile/images/2.jpg"), "pile/train.csv": NAMED}.items():
        s3_client(s3_server).put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=name, Body=data)
    refuses(SourceConfig(uri=f"{s3_bucket}/pile"), "train.csv.* names the images")


def test_a_table_that_cannot_be_read_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    read_range = LocalStore.read_range

    def refuse(store: LocalStore, path: str, start: int, num_bytes: int) -> bytes:
        if path == "train.csv":
            raise AccessDenied("no permission")
        return read_range(store, path, start, num_bytes)

    source = source_of("folders", tmp_path, {**images("1.jpg", "2.jpg"), "train.csv": NAMED})
    monkeypatch.setattr(LocalStore, "read_range", refuse)
    assert list_images(source).num_images == 2
