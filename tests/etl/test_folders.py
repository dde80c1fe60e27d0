"""Listing: every name that a folder can hold is an image or a rejection, and folders mean what they say."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from etl.config import SourceConfig
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.sources.folders import FolderSource
from shardmill.errors import UsageError
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.printable import printable
from shardmill.values import RejectReason
from tests.etl.building import images_of, list_images
from tests.services.s3 import s3_client

MAX_BYTES = 1_000


def make_tree(root: Path, *keys: str | bytes) -> None:
    for key in keys:
        path = os.path.join(os.fsencode(root), os.fsencode(key))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"some bytes")


def listed(root: Path, **source: object) -> Listing:
    return list_images(SourceConfig.model_validate({"uri": str(root), **source}), MAX_BYTES)


def reasons(listing: Listing) -> dict[str, str]:
    return {rejection.key: str(rejection.reason) for rejection in listing.rejections}


def test_folders_are_classes(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "cat/deep/er/2.jpg", "dog/1.png", "dog/no_suffix")
    listing = listed(tmp_path)
    assert {image.key: image.label for image in images_of(listing)} == {
        "cat/1.jpg": "cat", "cat/deep/er/2.jpg": "cat", "dog/1.png": "dog", "dog/no_suffix": "dog",
    }  # fmt: skip
    assert listing.class_names == ("cat", "dog")
    assert all(image.split is None for image in images_of(listing))


@pytest.mark.parametrize("validation", ["val", "valid", "validation"])
def test_split_folders_are_splits_and_never_classes(tmp_path: Path, validation: str):
    make_tree(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", f"{validation}/cat/2.jpg", "test/dog/3.jpg")
    listing = listed(tmp_path)
    assert listing.class_names == ("cat", "dog")
    assert {image.key: image.split for image in images_of(listing)} == {
        "train/cat/1.jpg": "train",
        "train/dog/1.jpg": "train",
        f"{validation}/cat/2.jpg": "validation",
        "test/dog/3.jpg": "test",
    }


def test_split_folders_may_be_written_in_capitals(tmp_path: Path):
    make_tree(tmp_path, "Train/cat/1.jpg", "TEST/dog/3.jpg", "Validation/cat/2.jpg")
    assert {image.key: image.split for image in images_of(listed(tmp_path))} == {
        "Train/cat/1.jpg": "train", "TEST/dog/3.jpg": "test", "Validation/cat/2.jpg": "validation"
    }  # fmt: skip


def test_what_lies_beside_split_folders_is_rejected_and_not_a_class(tmp_path: Path):
    make_tree(tmp_path, "train/cat/1.jpg", "val/cat/2.jpg", "extra/3.jpg")
    assert listed(tmp_path).class_names == ("cat",)
    assert reasons(listed(tmp_path)) == {"extra/3.jpg": "bad_label"}


def test_a_train_beside_cars_is_a_vehicle(tmp_path: Path):
    make_tree(tmp_path, "train/1.jpg", "car/1.jpg")
    assert listed(tmp_path).class_names == ("car", "train")


def test_a_class_called_test_beside_others_is_a_class(tmp_path: Path):
    make_tree(tmp_path, "test/1.jpg", "exam/1.jpg")
    assert listed(tmp_path).class_names == ("exam", "test")


def test_a_flat_folder_has_no_labels(tmp_path: Path):
    make_tree(tmp_path, "1.jpg", "2.jpg")
    listing = listed(tmp_path)
    assert listing.class_names == () and [image.label for image in images_of(listing)] == [None, None]


def test_an_image_outside_the_class_folders_is_a_bad_label(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "stray.jpg")
    assert reasons(listed(tmp_path)) == {"stray.jpg": "bad_label"}


@pytest.mark.parametrize("label", ["\x1b[2Jcat", "cat\r", "a\nb", "\u202etac", "cat\u200b", " ", "\x7f"])
def test_a_class_name_that_hides_something_is_a_bad_label(tmp_path: Path, label: str):
    make_tree(tmp_path, "cat/1.jpg", f"{label}/2.jpg")
    assert reasons(listed(tmp_path)) == {f"{label}/2.jpg": "bad_label"}
    assert all(printable(rejection.detail) == rejection.detail for rejection in listed(tmp_path).rejections)


@pytest.mark.parametrize("label", ["", ".", ".."])
def test_an_object_store_can_hold_names_that_are_no_class(label: str, s3_server: str, s3_bucket: str):
    for key in ("cat/1.jpg", f"{label}/2.jpg"):
        s3_client(s3_server).put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=f"prefix/{key}", Body=b"x")
    listing = list_images(SourceConfig(uri=f"{s3_bucket}/prefix"), MAX_BYTES)
    assert reasons(listing) == {f"{label}/2.jpg": "bad_label"}


@pytest.mark.parametrize(
    "name", [".DS_Store", "Thumbs.db", "._1.jpg", "desktop.ini", "notes.txt", "movie.mp4", "labels.csv", "x.json"]
)
def test_litter_is_counted_as_what_it_is(tmp_path: Path, name: str):
    make_tree(tmp_path, "cat/1.jpg", "dog/2.jpg", f"cat/{name}")
    listing = listed(tmp_path)
    assert reasons(listing) == {f"cat/{name}": "not_an_image_name"} and listing.num_listed == 3


def test_names_that_spark_would_skip_or_break_are_listed_as_they_are(tmp_path: Path):
    names = [
        *("_hidden.png", ".x.jpg", "x._COPYING_.jpg", "a b%20c#?.jpg", "{a,b}[ab]*:\"'\\.jpg", "-n.jpg"),
        *("日本語 🐈.jpg", "new\nline.jpg", "x" * 251 + ".jpg", "\u00e9.jpg", "e\u0301.jpg", "UP.JPG", "up.jpg"),
    ]
    make_tree(tmp_path, *(f"_class/{name}" for name in names))
    listing = listed(tmp_path)
    assert sorted(image.key for image in images_of(listing)) == sorted(f"_class/{name}" for name in names)
    assert len({image.sample_id for image in images_of(listing)}) == len(names)


def test_a_name_that_is_not_utf8_is_rejected_and_keeps_its_bytes(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", b"cat/bad\xff.jpg")
    [rejection] = listed(tmp_path).rejections
    assert rejection.reason == RejectReason.PATH_NOT_UTF8
    assert os.fsencode(rejection.key) == b"cat/bad\xff.jpg"


def test_links_and_special_files(tmp_path: Path):
    outside = tmp_path / "outside"
    root = tmp_path / "root"
    make_tree(outside, "secret.jpg")
    make_tree(root, "cat/1.jpg")
    (root / "cat" / "inside.jpg").symlink_to(root / "cat" / "1.jpg")
    (root / "cat" / "dangling.jpg").symlink_to(root / "gone.jpg")
    (root / "cat" / "outside.jpg").symlink_to(outside / "secret.jpg")
    (root / "cat" / "loop.jpg").symlink_to(root / "cat" / "loop.jpg")
    (root / "alias").symlink_to(root / "cat")
    (root / "elsewhere").symlink_to(outside)
    (root / "cat" / "upwards").symlink_to(root)
    (root / "dog_too").mkdir()
    (root / "dog_too" / "itself").symlink_to(root / "dog_too")
    os.mkfifo(root / "cat" / "fifo.jpg")
    listing = listed(root)
    assert sorted(image.key for image in images_of(listing)) == ["cat/1.jpg", "cat/inside.jpg"]
    assert reasons(listing) == {
        "cat/dangling.jpg": "dangling_symlink",
        "cat/outside.jpg": "symlink_outside_root",
        "cat/loop.jpg": "symlink_loop",
        "alias": "symlink_directory",
        "cat/upwards": "symlink_loop",
        "dog_too/itself": "symlink_loop",
        "elsewhere": "symlink_outside_root",
        "cat/fifo.jpg": "not_regular_file",
    }


def test_a_subset_made_of_links_is_read_if_told_so_and_loops_never(tmp_path: Path):
    make_tree(tmp_path / "all", "cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    root = tmp_path / "subset"
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "1.jpg").symlink_to(tmp_path / "all" / "cat" / "1.jpg")
    (root / "dog").symlink_to(tmp_path / "all" / "dog")
    (root / "cat" / "loop").symlink_to(root)
    (root / "cat" / "itself").symlink_to(root / "cat")
    (root / "gone").symlink_to(tmp_path / "nothing")
    listing = listed(root, follow_symlinks=True)
    assert [(image.key, image.label) for image in images_of(listing)] == [("cat/1.jpg", "cat"), ("dog/3.jpg", "dog")]
    assert reasons(listing) == {
        "cat/loop": "symlink_loop", "cat/itself": "symlink_loop", "gone": "dangling_symlink",
    }  # fmt: skip
    with pytest.raises(UsageError, match="no images"):
        listed(root)


def test_two_levels_that_may_be_classes_are_asked_about(tmp_path: Path):
    make_tree(tmp_path, "2023/cat/1.jpg", "2023/dog/2.jpg", "2024/cat/deep/3.jpg")
    with pytest.raises(UsageError, match=r"level 1 \(2023, 2024\) or level 2 \(cat, dog\).*source.label_level=N"):
        listed(tmp_path)
    assert listed(tmp_path, label_level=1).class_names == ("2023", "2024")
    assert listed(tmp_path, label_level=2).class_names == ("cat", "dog")
    make_tree(tmp_path, "2023/4.jpg")
    assert reasons(listed(tmp_path, label_level=2)) == {"2023/4.jpg": "bad_label"}


def test_levels_are_counted_below_the_splits(tmp_path: Path):
    make_tree(tmp_path, "train/a/cat/1.jpg", "train/b/dog/2.jpg", "val/a/cat/3.jpg")
    with pytest.raises(UsageError, match=r"level 1 \(a, b\) or level 2 \(cat, dog\)"):
        listed(tmp_path)
    listing = listed(tmp_path, label_level=2)
    assert listing.class_names == ("cat", "dog") and {image.split for image in images_of(listing)} == {
        "train",
        "validation",
    }


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg")
    (tmp_path / "cat" / "big.jpg").write_bytes(b"x" * (MAX_BYTES + 1))
    assert reasons(listed(tmp_path)) == {"cat/big.jpg": "too_large_bytes"}


def test_no_entry_is_lost_or_doubled(tmp_path: Path):
    make_tree(tmp_path, *(f"c{n % 7}/{n}.{'jpg' if n % 5 else 'txt'}" for n in range(200)))
    listing = listed(tmp_path)
    keys = Counter([image.key for image in images_of(listing)] + [rejection.key for rejection in listing.rejections])
    on_disk = Counter(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert keys == on_disk
    assert [image.key for image in images_of(listing)] == sorted(image.key for image in images_of(listing))


def test_a_long_walk_is_counted_as_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Counts(SilentObserver):
        def __init__(self) -> None:
            self.found: list[int] = []

        def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
            if name == "list.progress":
                self.found.append(int(fields["num_listed"]))

    monkeypatch.setattr("etl.sources.listed.BATCH_ROWS", 50)
    make_tree(tmp_path, *(f"c{n % 7}/{n}.{'jpg' if n % 5 else 'txt'}" for n in range(150)))
    source, counts = FolderSource(SourceConfig.model_validate({"uri": str(tmp_path)})), Counts()
    listing = list_source(source, seed=0, max_source_bytes=MAX_BYTES, observer=counts)
    assert counts.found[:3] == [50, 100, 150] and set(counts.found[3:]) == {150} == {listing.num_listed}


@pytest.mark.parametrize(("make", "message"), [
    (lambda root: None, "does not exist"),
    (lambda root: root.write_bytes(b""), "is not a folder"),
    (lambda root: root.mkdir(), r"no images below .* \(0 other files\)"),
    (lambda root: make_tree(root, "a/readme.txt"), r"no images below .* \(1 other files\)"),
])  # fmt: skip
def test_a_missing_or_empty_source_is_a_usage_error(tmp_path: Path, make, message: str):
    make(tmp_path / "source")
    with pytest.raises(UsageError, match=message):
        listed(tmp_path / "source")


def test_a_listing_changes_its_fingerprint_with_any_fact(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "cat/2.jpg")
    before = listed(tmp_path)
    assert listed(tmp_path).fingerprint == before.fingerprint
    os.utime(tmp_path / "cat" / "1.jpg", ns=(1, 1))
    assert listed(tmp_path).fingerprint != before.fingerprint
    assert listed(tmp_path).key_sum == before.key_sum
    make_tree(tmp_path, "cat/notes.txt")
    assert listed(tmp_path).key_sum != before.key_sum


@pytest.mark.parametrize(
    ("name", "kind"), [("a.rar", "RAR"), ("A.7Z", "7-Zip"), ("a.tar.lz4", "LZ4"), ("a.h5", "HDF5")]
)
def test_an_archive_that_is_not_read_is_named(name: str, kind: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=f"is a {kind} file, which is not supported; .*; unpack it"):
        listed(tmp_path / name)
