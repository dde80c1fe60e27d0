"""The listing of folders: which files are images, in which split, by which patterns."""

from __future__ import annotations

import itertools
import os
import random
import tarfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, SourceConfig
from etl.listing import list_source as listing_module
from etl.listing.grouping import GroupBy, group_here
from etl.listing.list_source import list_source
from etl.listing.listing import Listing
from etl.sources.containers import Containers
from etl.sources.kinds.folders import FolderSource
from etl.sources.names import expanded, is_pattern, matches
from etl.sources.path_labels import splits_of
from etl.units.units import ListingLocation, plan_units, read_unit
from shardmill import ids
from shardmill.errors import UsageError
from shardmill.ids import add_digests, format_digest, key_hash
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.mix import mix64_array
from shardmill.storage import StoredFile
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore
from shardmill.values import RejectReason, SourceImage
from shardmill.words import printable
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.etl.building import facts, images, images_of, list_images, listed
from tests.etl.source_files import picture, write_tar
from tests.lab.datasets import write_images
from tests.services.s3 import s3_client

_SEED = random.SystemRandom().randrange(2**32)


def test_order_batches_and_segments_change_nothing(monkeypatch: pytest.MonkeyPatch):
    print(f"seed {_SEED}")
    rng = random.Random(_SEED)
    expected = facts(listed(images(1_000)))
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 300)
    shuffled = images(1_000)
    rng.shuffle(shuffled)
    found = listed(shuffled[:1], shuffled[1:620], shuffled[620:])
    assert len(found.segments) > 1 and facts(found) == expected


def test_a_unit_reads_the_segments_of_its_own_range_of_cells(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 100)
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    found = listed(*(images(2_000)[first : first + 250] for first in range(0, 2_000, 250)))
    ranges = [(segment.first_cell, segment.last_cell) for segment in found.segments]
    assert len(ranges) == 20 and all(before[1] < after[0] for before, after in itertools.pairwise(ranges))
    assert sum(segment.num_rows for segment in found.segments) == 2_000
    # What the listing was made of is gone.
    assert {file.name for file in found.folder.iterdir()} == {segment.path for segment in found.segments}

    units = plan_units(found, EtlConfig(unit_min_images=20), "config")
    assert len(units) == 64
    CALLS.clear()
    place = ListingLocation(f"{SCHEME}://{found.folder}", found.segments)
    read = [image.key for unit in units for image in read_unit(place, unit, 0)]
    assert sorted(read) == sorted(image.key for image in images(2_000))
    # Each opens one, and one more for each border between two segments inside its range.
    assert 64 <= CALLS["stat"] <= 64 + 19


def test_a_listing_in_the_order_of_its_cells_is_not_sorted_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 300)
    first = listed(*(images(1_000)[first : first + 200] for first in range(0, 1_000, 200)))
    some = images_of(first)
    in_order = sorted(some, key=lambda image: int(mix64_array(np.array([image.sample_id]), 0)[0]))

    def group(asked: GroupBy) -> Iterator[pa.Table]:
        assert asked.schema.names == ["sample_id"], "the images were sorted again"
        return group_here(asked)

    again = listed(*(in_order[first : first + 200] for first in range(0, 1_000, 200)), group=group)
    assert facts(again) == facts(first) and len(again.segments) == 3


def test_a_segment_of_which_all_rows_are_listed_elsewhere_is_empty(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(listing_module, "SEGMENT_ROWS", 10)
    found = listed(images(10), images(10)[3:5], images(30)[10:])
    assert len(images_of(found)) == 30 and len(found.rejections) == 2
    units = plan_units(found, EtlConfig(unit_min_images=5), "config")
    place = ListingLocation(str(found.folder), found.segments)
    assert sum(len(read_unit(place, unit, 0)) for unit in units) == 30


def test_what_is_listed_twice_is_accepted_once_and_refused_under_a_key_of_its_own():
    twice = [SourceImage("a.jpg", 1, place=place, label="x") for place in (2, 0, 1)]
    found = listed([*images(50), twice[0]], [*twice[1:], SourceImage("b.jpg", 1, label="x")])
    assert [(each.key, str(each.reason)) for each in found.rejections] == [
        ("a.jpg\0" + number, "duplicate_key") for number in "23"
    ]
    assert (found.num_listed, found.num_images, sum(found.images_by_bucket)) == (54, 52, 52)
    kept = images_of(found)
    assert [(image.place, image.sample_id) for image in kept if image.key == "a.jpg"] == [
        (0, ids.sample_id_of("a.jpg"))
    ]
    # The sums are those of a listing that never had them, but for the refused keys.
    once = listed([*images(50), twice[1]], [SourceImage("b.jpg", 1, label="x")])
    assert (found.facts_by_bucket.sum(axis=0) == once.facts_by_bucket.sum(axis=0)).all()
    refused = (key_hash(each.key) for each in found.rejections)
    assert found.key_sum == format_digest(add_digests(int(once.key_sum, 16), *refused))


def test_the_segments_go_with_the_listing():
    found = listed(images(10))
    folder = found.folder
    assert folder.is_dir()
    del found
    assert not folder.exists()


MAX_BYTES = 1_000


def make_tree(root: Path, *keys: str | bytes) -> None:
    for key in keys:
        path = os.path.join(os.fsencode(root), os.fsencode(key))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(b"some bytes")


def listed_folders(root: Path, **source: object) -> Listing:
    return list_images(SourceConfig.model_validate({"uri": str(root), **source}), MAX_BYTES)


def reasons(listing: Listing) -> dict[str, str]:
    return {rejection.key: str(rejection.reason) for rejection in listing.rejections}


def test_folders_are_classes(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "cat/deep/er/2.jpg", "dog/1.png", "dog/no_suffix")
    listing = listed_folders(tmp_path)
    assert {image.key: image.label for image in images_of(listing)} == {
        "cat/1.jpg": "cat", "cat/deep/er/2.jpg": "cat", "dog/1.png": "dog", "dog/no_suffix": "dog",
    }  # fmt: skip
    assert listing.class_names == ("cat", "dog")
    assert all(image.split is None for image in images_of(listing))


@pytest.mark.parametrize("validation", ["val", "valid", "validation"])
def test_split_folders_are_splits_and_never_classes(tmp_path: Path, validation: str):
    make_tree(tmp_path, "train/cat/1.jpg", "train/dog/1.jpg", f"{validation}/cat/2.jpg", "test/dog/3.jpg")
    listing = listed_folders(tmp_path)
    assert listing.class_names == ("cat", "dog")
    assert {image.key: image.split for image in images_of(listing)} == {
        "train/cat/1.jpg": "train",
        "train/dog/1.jpg": "train",
        f"{validation}/cat/2.jpg": "validation",
        "test/dog/3.jpg": "test",
    }


def test_split_folders_may_be_written_in_capitals(tmp_path: Path):
    make_tree(tmp_path, "Train/cat/1.jpg", "TEST/dog/3.jpg", "Validation/cat/2.jpg")
    assert {image.key: image.split for image in images_of(listed_folders(tmp_path))} == {
        "Train/cat/1.jpg": "train", "TEST/dog/3.jpg": "test", "Validation/cat/2.jpg": "validation"
    }  # fmt: skip


def test_what_lies_beside_split_folders_is_rejected_and_not_a_class(tmp_path: Path):
    make_tree(tmp_path, "train/cat/1.jpg", "val/cat/2.jpg", "extra/3.jpg")
    assert listed_folders(tmp_path).class_names == ("cat",)
    assert reasons(listed_folders(tmp_path)) == {"extra/3.jpg": "bad_label"}


def test_a_train_beside_cars_is_a_vehicle(tmp_path: Path):
    make_tree(tmp_path, "train/1.jpg", "car/1.jpg")
    assert listed_folders(tmp_path).class_names == ("car", "train")


def test_a_class_called_test_beside_others_is_a_class(tmp_path: Path):
    make_tree(tmp_path, "test/1.jpg", "exam/1.jpg")
    assert listed_folders(tmp_path).class_names == ("exam", "test")


def test_a_flat_folder_has_no_labels(tmp_path: Path):
    make_tree(tmp_path, "1.jpg", "2.jpg")
    listing = listed_folders(tmp_path)
    assert listing.class_names == () and [image.label for image in images_of(listing)] == [None, None]


def test_an_image_outside_the_class_folders_is_a_bad_label(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "stray.jpg")
    assert reasons(listed_folders(tmp_path)) == {"stray.jpg": "bad_label"}


@pytest.mark.parametrize("label", ["\x1b[2Jcat", "cat\r", "a\nb", "\u202etac", "cat\u200b", " ", "\x7f"])
def test_a_class_name_that_hides_something_is_a_bad_label(tmp_path: Path, label: str):
    make_tree(tmp_path, "cat/1.jpg", f"{label}/2.jpg")
    assert reasons(listed_folders(tmp_path)) == {f"{label}/2.jpg": "bad_label"}
    assert all(printable(rejection.detail) == rejection.detail for rejection in listed_folders(tmp_path).rejections)


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
    listing = listed_folders(tmp_path)
    assert reasons(listing) == {f"cat/{name}": "not_an_image_name"} and listing.num_listed == 3


@pytest.mark.parametrize("suffix", ["nef", "DNG", "cr2", "arw", "svg", "pdf"])
def test_a_picture_that_is_not_read_is_refused_by_its_content_and_counts_as_one(tmp_path: Path, suffix: str):
    make_tree(tmp_path, "cat/1.jpg", f"cat/2.{suffix}")
    assert f"cat/2.{suffix}" in {image.key for image in images_of(listed_folders(tmp_path))}


def test_names_that_spark_would_skip_or_break_are_listed_as_they_are(tmp_path: Path):
    names = [
        *("_hidden.png", ".x.jpg", "x._COPYING_.jpg", "a b%20c#?.jpg", "{a,b}[ab]*:\"'\\.jpg", "-n.jpg"),
        *("日本語 🐈.jpg", "new\nline.jpg", "x" * 251 + ".jpg", "\u00e9.jpg", "e\u0301.jpg", "UP.JPG", "up.jpg"),
    ]
    make_tree(tmp_path, *(f"_class/{name}" for name in names))
    listing = listed_folders(tmp_path)
    assert sorted(image.key for image in images_of(listing)) == sorted(f"_class/{name}" for name in names)
    assert len({image.sample_id for image in images_of(listing)}) == len(names)


def test_a_name_that_is_not_utf8_is_rejected_and_keeps_its_bytes(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", b"cat/bad\xff.jpg")
    [rejection] = listed_folders(tmp_path).rejections
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
    listing = listed_folders(root)
    assert sorted(image.key for image in images_of(listing)) == ["cat/1.jpg", "cat/inside.jpg"]
    assert reasons(listing) == {
        "cat/dangling.jpg": "dangling_symlink", "cat/outside.jpg": "symlink_outside_root",
        "cat/loop.jpg": "symlink_loop", "alias": "symlink_directory", "cat/upwards": "symlink_loop",
        "dog_too/itself": "symlink_loop", "elsewhere": "symlink_outside_root", "cat/fifo.jpg": "not_regular_file",
    }  # fmt: skip


def test_a_subset_made_of_links_is_read_on_request_and_never_loops(tmp_path: Path):
    make_tree(tmp_path / "all", "cat/1.jpg", "cat/2.jpg", "dog/3.jpg")
    root = tmp_path / "subset"
    (root / "cat").mkdir(parents=True)
    (root / "cat" / "1.jpg").symlink_to(tmp_path / "all" / "cat" / "1.jpg")
    (root / "dog").symlink_to(tmp_path / "all" / "dog")
    (root / "cat" / "loop").symlink_to(root)
    (root / "cat" / "itself").symlink_to(root / "cat")
    (root / "gone").symlink_to(tmp_path / "nothing")
    listing = listed_folders(root, follow_symlinks=True)
    assert [(image.key, image.label) for image in images_of(listing)] == [("cat/1.jpg", "cat"), ("dog/3.jpg", "dog")]
    assert reasons(listing) == {
        "cat/loop": "symlink_loop", "cat/itself": "symlink_loop", "gone": "dangling_symlink",
    }  # fmt: skip
    with pytest.raises(UsageError, match="no images"):
        listed_folders(root)


def test_two_levels_that_may_be_classes_are_asked_about(tmp_path: Path):
    make_tree(tmp_path, "2023/cat/1.jpg", "2023/dog/2.jpg", "2024/cat/deep/3.jpg")
    with pytest.raises(UsageError, match=r"level 1 \(2023, 2024\) or level 2 \(cat, dog\).*source.label_level=N"):
        listed_folders(tmp_path)
    assert listed_folders(tmp_path, label_level=1).class_names == ("2023", "2024")
    assert listed_folders(tmp_path, label_level=2).class_names == ("cat", "dog")
    make_tree(tmp_path, "2023/4.jpg")
    assert reasons(listed_folders(tmp_path, label_level=2)) == {"2023/4.jpg": "bad_label"}


def test_levels_are_counted_below_the_splits(tmp_path: Path):
    make_tree(tmp_path, "train/a/cat/1.jpg", "train/b/dog/2.jpg", "val/a/cat/3.jpg")
    with pytest.raises(UsageError, match=r"level 1 \(a, b\) or level 2 \(cat, dog\)"):
        listed_folders(tmp_path)
    listing = listed_folders(tmp_path, label_level=2)
    assert listing.class_names == ("cat", "dog") and {image.split for image in images_of(listing)} == {
        "train",
        "validation",
    }


def test_a_file_over_the_limit_is_refused_unread(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg")
    (tmp_path / "cat" / "big.jpg").write_bytes(b"x" * (MAX_BYTES + 1))
    assert reasons(listed_folders(tmp_path)) == {"cat/big.jpg": "too_large_bytes"}


def test_no_entry_is_lost_or_doubled(tmp_path: Path):
    make_tree(tmp_path, *(f"c{n % 7}/{n}.{'jpg' if n % 5 else 'txt'}" for n in range(200)))
    listing = listed_folders(tmp_path)
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
        listed_folders(tmp_path / "source")


def test_a_listing_changes_its_fingerprint_with_any_fact(tmp_path: Path):
    make_tree(tmp_path, "cat/1.jpg", "cat/2.jpg")
    before = listed_folders(tmp_path)
    assert listed_folders(tmp_path).fingerprint == before.fingerprint
    os.utime(tmp_path / "cat" / "1.jpg", ns=(1, 1))
    assert listed_folders(tmp_path).fingerprint != before.fingerprint
    assert listed_folders(tmp_path).key_sum == before.key_sum
    make_tree(tmp_path, "cat/notes.txt")
    assert listed_folders(tmp_path).key_sum != before.key_sum


@pytest.mark.parametrize(
    ("name", "kind"), [("a.rar", "RAR"), ("A.7Z", "7-Zip"), ("a.tar.lz4", "LZ4"), ("a.h5", "HDF5")]
)
def test_an_archive_that_is_not_read_is_named(name: str, kind: str, tmp_path: Path):
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(UsageError, match=f"is a {kind} file, which is not supported; .*; unpack it"):
        listed_folders(tmp_path / name)


TRAIN, VALIDATION, TEST = "train", "validation", "test"


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["set-train-00000.tar", "set-val-00000.tar", "set-test-00000.tar"], [TRAIN, VALIDATION, TEST]),
        (["test_tube-train-0.tar", "test_tube-val-0.tar"], [TRAIN, VALIDATION]),
        (["test_tube-train-0.tar", "test_tube-val-0.tar", "test_tube-test-0.tar"], [TRAIN, VALIDATION, TEST]),
        (["test_tube-train-0.tar", "beaker-val-0.tar"], [TRAIN, VALIDATION]),
        (["train-test_tube-0.tar", "val-beaker-0.tar"], [TRAIN, VALIDATION]),
        (["train-test_tube.tar", "val-test_tube.tar"], [TRAIN, VALIDATION]),
        (["train_test_split-train.tar", "train_test_split-test.tar"], [TRAIN, TEST]),
        (["train/test_tube.tar", "val/test_tube.tar", "test/test_tube.tar"], [TRAIN, VALIDATION, TEST]),
        (["dev-kit/train/0.tar", "dev-kit/test/0.tar"], [TRAIN, TEST]),
        (["dev/train-0.tar", "dev/val-0.tar"], [TRAIN, VALIDATION]),
        (["test_tube-train-0.tar", "test_tube-train-1.tar"], [TRAIN, TRAIN]),
        (["a-train-0.tar", "a-train-1.tar"], [TRAIN, TRAIN]),
        (["x-test_tube_train.tar", "test_tube_val-0-of-1.tar"], [TRAIN, VALIDATION]),
        (["TRAIN.tar", "Valid.tar"], [TRAIN, VALIDATION]),
    ],
    ids=str,
)
def test_the_word_that_differs_is_the_split(names: list[str], splits: list[str]):
    found = splits_of(names)
    assert [found.of[name] for name in names] == splits and not found.look_alikes


@pytest.mark.parametrize(
    "names", [["test_tube-train-0.tar", "test_tube-0.tar"], ["train-0.tar", "more-0.tar"]], ids=str
)
def test_files_without_a_split_beside_others_are_refused(names: list[str]):
    with pytest.raises(UsageError, match="names a split, but .* does not"):
        splits_of(names)


def test_names_that_tell_nothing_apart_are_refused():
    with pytest.raises(UsageError, match=r"train_test-a\.tar names the splits test and train"):
        splits_of(["train_test-a.tar", "test_train-b.tar"])


@pytest.mark.parametrize(
    ("names", "alike"),
    [
        (["val-0.tar", "test-0.tar"], ("test", "val")),
        (["train2017.tar", "val2017.tar"], ("train2017", "val2017")),
        (["x-trainset-0.tar", "x-testset-0.tar"], ("testset", "trainset")),
        (["images-0.tar", "images-1.tar", "latest.tar", "training2.tar"], ()),
    ],
    ids=str,
)
def test_names_that_only_look_like_splits_are_reported(names: list[str], alike: tuple[str, ...], tmp_path: Path):
    assert splits_of(names).look_alikes == alike
    for number, name in enumerate(names):
        write_tar(tmp_path / name, {f"{number}.png": picture(number), f"{number}.cls": b"1"})
    warnings = list_images(SourceConfig(uri=str(tmp_path), kind="webdataset")).warnings
    assert [f"not recognized ({', '.join(alike)})" in each for each in warnings] == ([True] if alike else [])


def test_folders_or_a_column_that_say_the_splits_end_the_doubt(tmp_path: Path):
    write_tar(tmp_path / "val.tar", {f"{split}/c/{split}.png": picture(1) for split in ("train", "test")})
    assert not list_images(SourceConfig(uri=str(tmp_path), kind="webdataset")).warnings
    pq.write_table(pa.table({"image": [picture(1)], "split": ["train"]}), tmp_path / "test.parquet")
    assert not list_images(SourceConfig(uri=str(tmp_path), kind="parquet")).warnings
    pq.write_table(pa.table({"image": [picture(1)]}), tmp_path / "test.parquet")
    [warning] = list_images(SourceConfig(uri=str(tmp_path), kind="parquet")).warnings
    assert "(test)" in warning


def test_tables_for_splits_without_a_column_are_reported(tmp_path: Path):
    for name in ("train", "test"):
        (tmp_path / f"{name}.csv").write_text(f"uri,label\n{name}.jpg,x\n")
    source = SourceConfig(uri=str(tmp_path), kind="table")
    [warning] = list_images(source).warnings
    assert "(test, train)" in warning and all(image.split is None for image in images_of(list_images(source)))
    assert not list_images(source.model_copy(update={"uri": str(tmp_path / "train.csv")})).warnings


def test_braces_name_the_files_that_they_match():
    pattern = "{train,{val,dev}}-{08..11}/{a,b}.tar"
    names = [
        f"{split}-{n:02d}/{x}.tar" for split, n, x in itertools.product(("train", "val", "dev"), range(8, 12), "ab")
    ]
    assert sorted(expanded(pattern)) == sorted(names)
    assert is_pattern(pattern) and all(matches(name, pattern) for name in names)
    for other in ("test-08/a.tar", "train-07/a.tar", "train-8/a.tar", "train-08/c.tar", "train-08/x/a.tar"):
        assert not matches(other, pattern)
    # One word in braces is a name.
    assert not is_pattern("{train}.tar") and list(expanded("{train}.tar")) == ["{train}.tar"]
    assert matches("val-3.tar", "{train,val}-*.tar")


@pytest.fixture
def archives(tmp_path: Path) -> Path:
    """`set [1]/{t,u,v}.tar`, each with six images."""
    write_images(tmp_path / "images", num_images=6)
    folder = tmp_path / "set [1]"
    folder.mkdir()
    for name in "tuv":
        with tarfile.open(folder / f"{name}.tar", "w") as archive:
            archive.add(tmp_path / "images", ".")
    return folder


@pytest.mark.parametrize("name, num_archives", [("", 3), ("t.tar", 1), ("{t,u}.tar", 2), ("[uv].tar", 2), ("*.tar", 3)])
def test_a_local_path_that_is_there_is_no_pattern(name: str, num_archives: int, archives: Path):
    listing = list_images(SourceConfig(uri=f"{archives}/{name}", kind="webdataset"), max_source_bytes=10_000)
    assert listing.num_images == 6 * num_archives


def test_every_file_of_a_list_has_to_be_there(archives: Path):
    with pytest.raises(UsageError, match=r"1 of the files that it names do not exist, such as w.tar"):
        list_images(SourceConfig(uri=f"{archives}/{{t,w}}.tar", kind="webdataset"))


def test_a_file_that_was_seen_is_asked_for_again_and_not_searched_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An image of a table that is not there asks for the tables; that must not list a bucket each time."""
    for name in ("a.csv", "b.csv"):
        (tmp_path / name).write_text("uri\n")
    tables = Containers(str(tmp_path), (".csv",))
    listings: list[str] = []
    store_list = LocalStore.list

    def counted(store: LocalStore, prefix: str) -> Iterator[StoredFile]:
        listings.append(prefix)
        return store_list(store, prefix)

    monkeypatch.setattr(LocalStore, "list", counted)
    assert [tables.are_there() for _ in range(3)] == [True] * 3
    assert len(listings) == 1
    # Nothing is believed for longer than it is true.
    for name in ("a.csv", "b.csv"):
        assert tables.are_there()
        (tmp_path / name).unlink()
    assert not tables.are_there()


@pytest.mark.parametrize("kind", ["parquet", "tfrecord", "webdataset", "table", "zip"])
def test_a_container_whose_name_is_no_text_is_named(kind: str, tmp_path: Path):
    suffix = {"webdataset": "tar", "table": "csv"}.get(kind, kind)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / os.fsdecode(b"\xff." + suffix.encode())).write_bytes(b"uri\n1.jpg\n")
    with pytest.raises(UsageError, match=r"holds folder/\\xff\..*, whose path is not UTF-8"):
        list_images(SourceConfig(uri=str(tmp_path), kind=kind))
