"""Labels that a container or a folder plainly has and does not take end the build, and say which setting takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import SourceConfig
from shardmill.errors import AccessDenied
from shardmill.formats.tf_example import FeatureValue
from shardmill.stores.local import LocalStore
from tests.etl.building import images_of, list_images
from tests.etl.labelled_sources import KINDS, Kind, found, refuses, source_of, source_with
from tests.etl.source_files import idx, labels, picture, reasons, write_pair, write_records, write_tar
from tests.services.s3 import s3_client


def test_a_class_member_behind_the_first_thousand_or_in_another_archive_is_not_lost(tmp_path: Path):
    write_tar(tmp_path / "a.tar", {"1.png": picture(1)})
    write_tar(tmp_path / "b.tar", {"2.png": picture(2), "2.cls": b"0"})
    refuses(SourceConfig(uri=str(tmp_path), kind="webdataset"), "b.tar has '2.cls'")


@pytest.mark.parametrize("name", ["label", "class_id", "category", "Labels"])
def test_a_field_of_json_that_is_named_as_labels_are_is_not_lost(name: str, tmp_path: Path):
    members = {"1.png": picture(1), "1.json": b'{"width": 16, "%s": 3}' % name.encode()}
    source = write_tar(tmp_path / "a.tar", members)
    refuses(source, f"'{name}'")
    assert labels(list_images(source.model_copy(update={"label_field": f"json.{name}"}))) == {"1.png": "3"}


def test_labels_that_are_no_classes_are_taken(tmp_path: Path):
    members = {"1.png": picture(1), "1.json": b'{"labels": ["a", "b"]}', "1.cls": b"0"}
    source = write_tar(tmp_path / "a.tar", members)
    listing = list_images(source.model_copy(update={"label_kind": "multi_label", "label_field": "json.labels"}))
    assert listing.num_images == 1 and listing.class_names == ("a", "b")


def test_the_first_sound_archive_shows_where_labels_are(tmp_path: Path):
    write_tar(tmp_path / "a.tar", {"1.png": picture(1), "1.cls": b"0"})
    (tmp_path / "a.tar").write_bytes((tmp_path / "a.tar").read_bytes()[:100])
    write_tar(tmp_path / "b.tar", {"2.png": picture(2), "2.cls": b"7"})
    listing = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))
    assert listing.class_names == ("7",) and reasons(listing) == {"damaged_container": 1}


def test_metadata_that_is_no_label_ends_nothing(tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", {"1.png": picture(1), "1.json": b'{"width": 16}', "1.txt": b"a dog"})
    assert labels(list_images(source)) == {"1.png": None}
    assert labels(list_images(write_tar(tmp_path / "b.tar", {"1.png": picture(1), "1.json": b"[1"}))) == {"1.png": None}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["labels.csv", "train_labels.csv", "annotations.json", "Labels.txt", "class_id.tsv"])
def test_a_list_of_labels_beside_flat_images_is_not_lost(kind: Kind, name: str, tmp_path: Path):
    refuses(source_of(kind, tmp_path, "1.png", "2.png", name), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["labels/1.txt", "Annotations/1.xml", "labels/train/1.json"])
def test_a_folder_of_labels_beside_a_folder_of_images_is_not_lost(kind: Kind, name: str, tmp_path: Path):
    refuses(source_of(kind, tmp_path, "images/1.png", "images/2.png", name), name)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["readme.txt", "sizes.csv", "log.json"])
def test_other_files_beside_flat_images_end_nothing(kind: Kind, name: str, tmp_path: Path):
    assert found(list_images(source_of(kind, tmp_path, "1.png", "2.png", name))) == {(None, None): 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_list_of_labels_beside_class_folders_ends_nothing(kind: Kind, tmp_path: Path):
    listing = list_images(source_of(kind, tmp_path, "cat/1.png", "dog/2.png", "labels.csv"))
    assert found(listing) == {(None, "cat"): 1, (None, "dog"): 1}


@pytest.mark.parametrize("name", ["my_label", "target", "image/object/class"])
def test_a_feature_that_is_named_as_labels_are_is_not_lost(name: str, tmp_path: Path):
    record: dict[str, FeatureValue] = {"image": picture(0), name: 1}
    source = write_records(tmp_path / "a.tfrecord", [record])
    refuses(source, f"'{name}'")
    assert list_images(source.model_copy(update={"label_field": name})).class_names == ("1",)


def test_a_file_of_labels_that_belongs_to_no_file_of_images_is_not_lost(tmp_path: Path):
    write_pair(tmp_path, "train", 30)
    (tmp_path / "train-labels-idx1-ubyte").rename(tmp_path / "training-labels-idx1-ubyte")
    refuses(idx(tmp_path), "'training-labels-idx1-ubyte'")


@pytest.mark.parametrize("wrapping", ["", "set/"])
def test_splits_of_samples_with_class_members_are_their_folders(wrapping: str, tmp_path: Path):
    members = {}
    for split in ("train", "test"):
        members |= {f"{wrapping}{split}/1.png": picture(1), f"{wrapping}{split}/1.cls": b"7"}
    listing = list_images(write_tar(tmp_path / "a.tar", members))
    assert found(listing) == {("train", "7"): 1, ("test", "7"): 1}


@pytest.mark.parametrize("kind", KINDS)
def test_a_dataset_without_labels_keeps_its_splits(kind: Kind, tmp_path: Path):
    source = source_of(kind, tmp_path, "a/train/cat/1.png", "a/test/dog/2.png", label_kind="none")
    assert found(list_images(source)) == {("train", None): 1, ("test", None): 1}


def test_a_level_that_is_given_is_one_of_folders(tmp_path: Path):
    members = {"cat/1.png": picture(1), "cat/1.cls": b"0", "dog/2.png": picture(2), "dog/2.cls": b"1"}
    source = write_tar(tmp_path / "a.tar", members)
    assert {image.label for image in images_of(list_images(source))} == {"0", "1"}
    by_folder = list_images(source.model_copy(update={"label_level": 1}))
    assert by_folder.class_names == ("cat", "dog")


LICENSED = ("flower_photos/LICENSE.txt", "flower_photos/daisy/1.jpg", "flower_photos/roses/2.jpg")


@pytest.mark.parametrize("names", [LICENSED, ("daisy/1.png", "roses/2.png", "metadata.json"), ("x.txt", *LICENSED[1:])])
def test_a_text_that_belongs_to_no_image_leaves_folders_classes(names: tuple[str, ...], tmp_path: Path):
    source = write_tar(tmp_path / "a.tar", {name: picture(place) for place, name in enumerate(names)})
    assert list_images(source).class_names == ("daisy", "roses")


def sidecars(*folders: str) -> dict[str, bytes]:
    images = {f"{folder}/{place}.png": picture(place) for place, folder in enumerate(folders)}
    return dict(sorted((images | {f"{name[:-4]}.json": b'{"width": 3}' for name in images}).items()))


@pytest.mark.parametrize(
    ("folders", "level"),
    [(("cat", "dog"), 1), (("a/train/cat", "a/test/dog"), 3), (("train/cat", "test/dog"), 1), (("a/cat", "dog"), "N")],
)
def test_named_folders_of_samples_with_texts_end_the_build_with_the_level_to_set(
    folders: tuple[str, str], level: int | str, tmp_path: Path
):
    source = write_tar(tmp_path / "a.tar", sidecars(*folders))
    refuses(source, f"the folders cat, dog, with text files beside them .*set source.label_level = {level}.;")
    if level != "N":
        assert list_images(source.model_copy(update={"label_level": level})).class_names == ("cat", "dog")


def test_named_folders_behind_the_first_thousand_members_are_not_lost(tmp_path: Path):
    members = {f"cat/{place}.{suffix}": b"x" for place in range(600) for suffix in ("png", "txt")}
    refuses(write_tar(tmp_path / "a.tar", members | sidecars("dog")), "the folders cat, dog")


@pytest.mark.parametrize("names", [("00", "01"), ("part-0", "part-1"), ("train", "test"), ("3f", "a7"), ("photos",)])
def test_folders_of_shards_and_splits_with_texts_are_no_classes(names: tuple[str, ...], tmp_path: Path):
    assert list_images(write_tar(tmp_path / "a.tar", sidecars(*names))).class_names == ()
    one_each = {f"{name}/{own}": picture(0) for name in names for own in ("image.png", "caption.txt")}
    assert list_images(write_tar(tmp_path / "a.tar", one_each)).class_names == ()


NAMED = b"file,emotion\n1.jpg,glad\n2.jpg,sad\n3.jpg,sad\n"


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
    source = source_with(kind, tmp_path, {**images(*names), name: text})
    refuses(source, f"{name}.* names the images, with 'emotion' for each")
    if "images/" in names[0]:
        assert list_images(source.model_copy(update={"label_level": 1})).class_names == ("images",)


@pytest.mark.parametrize(
    "text",
    [
        b"x,y\n1,0\n2,4\n3,0\n", b"x;y\r\n1;0\r\n2;4\r\n3;0\r\n", b"1.jpg,cat\n2.jpg,dog\n",
        b"id_code,diagnosis\n2,1\n", b"Image Index,finding,width\n7.png,none,64\n",
        "uri,kind\n1.jpg,cat\n".encode("utf-16"), NAMED + b"4.jpg,sad\n" * 20_000 + b"5.jpg",
    ],
)  # fmt: skip
def test_the_column_of_names_is_known_by_its_values(text: bytes, tmp_path: Path):
    refuses(source_with("folders", tmp_path, {**images("1.jpg", "2.jpg", "3.jpg"), "train.csv": text}), "train.csv")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text",
    [
        b"", b"file\n1.jpg\n", b"file,width,height\n1.jpg,64,64\n2.jpg,64,64\n", b"epoch,loss\n10,0.5\n20,0.25\n",
        b"file,caption\n" + b"".join(b"%d.jpg,text %d\n" % (place, place) for place in range(9)),
        picture(3) + b"\0,\0\n",
    ],
)  # fmt: skip
def test_other_tables_end_nothing(kind: Kind, text: bytes, tmp_path: Path):
    source = source_with(kind, tmp_path, {**images("1.jpg", "2.jpg", "3.jpg"), "notes.csv": text})
    assert list_images(source).num_images == 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_beside_class_folders_ends_nothing(kind: Kind, tmp_path: Path):
    source = source_with(kind, tmp_path, {**images("cat/1.jpg", "dog/2.jpg"), "train.csv": NAMED})
    assert list_images(source).class_names == ("cat", "dog")


def test_one_class_folder_without_signs_is_a_class(tmp_path: Path):
    assert list_images(source_with("folders", tmp_path, images("cat/1.jpg", "cat/2.jpg"))).class_names == ("cat",)


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

    source = source_with("folders", tmp_path, {**images("1.jpg", "2.jpg"), "train.csv": NAMED})
    monkeypatch.setattr(LocalStore, "read_range", refuse)
    assert list_images(source).num_images == 2
