"""Labels that a container or a folder plainly has and does not take end the build, and say which setting takes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import SourceConfig
from shardmill.formats.tf_example import FeatureValue
from tests.etl.building import images_of, list_images
from tests.etl.labelled_sources import KINDS, Kind, found, refuses, source_of
from tests.etl.source_files import idx, labels, picture, reasons, write_pair, write_records, write_tar


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
