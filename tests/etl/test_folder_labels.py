"""Recognition of split and class folders, in folders and in archives, from all names together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from etl.checks.listing import inferred_warnings
from etl.config import EtlTree, SourceConfig
from etl.plan import plan_build
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig
from tests.etl.annotations import mask_of
from tests.etl.building import ETL, list_images
from tests.etl.labelled_sources import KINDS, Kind, found, source_of, source_with
from tests.etl.source_files import picture, reasons, write_tar
from tests.shardmill.images.make import photo, png


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrapping", ["", "photos/", "a/b c/photos/"])
@pytest.mark.parametrize("other", ["test", "Val", "validation"])
def test_wrapping_folders_above_the_splits_change_nothing(kind: Kind, wrapping: str, other: str, tmp_path: Path):
    folders = [f"{wrapping}{split}/{label}" for split in ("train", other) for label in ("cat", "dog")]
    listing = list_images(source_of(kind, tmp_path, *(f"{folder}/{n}.png" for folder in folders for n in (1, 2))))
    split = "test" if other == "test" else "validation"
    assert found(listing) == {("train", "cat"): 2, ("train", "dog"): 2, (split, "cat"): 2, (split, "dog"): 2}
    assert not listing.warnings and not listing.rejections


@pytest.mark.parametrize("kind", KINDS)
def test_an_old_label_level_still_names_the_same_folder(kind: Kind, tmp_path: Path):
    names = ["photos/train/cat/1.png", "photos/train/dog/2.png", "photos/test/cat/3.png"]
    third = list_images(source_of(kind, tmp_path, *names, label_level=3))
    assert found(third) == {("train", "cat"): 1, ("train", "dog"): 1, ("test", "cat"): 1}
    second = list_images(source_of(kind, tmp_path, *names, label_level=2))
    assert found(second) == {(None, "train"): 2, (None, "test"): 1}
    with pytest.raises(UsageError, match="source.label_level = 4, but no image is more than 3 folders deep"):
        list_images(source_of(kind, tmp_path, *names, label_level=4))


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_or_collection_may_have_splits_of_its_own(kind: Kind, tmp_path: Path):
    names = ["cat/train/1.png", "cat/test/2.png", "dog/train/3.png"]
    expected = {("train", "cat"): 1, ("test", "cat"): 1, ("train", "dog"): 1}
    assert found(list_images(source_of(kind, tmp_path, *names))) == expected
    assert not list_images(source_of(kind, tmp_path, *names)).warnings


def test_several_collections_with_splits_and_classes(tmp_path: Path):
    names = ["art/train/cat/1.png", "art/test/dog/2.png", "photo/train/dog/3.png", "photo/test/cat/4.png"]
    expected = {("train", "cat"): 1, ("test", "dog"): 1, ("train", "dog"): 1, ("test", "cat"): 1}
    assert found(list_images(source_of("zip", tmp_path, *names))) == expected
    with pytest.raises(UsageError, match=r"level 1 \(art, photo\) or level 3 \(cat, dog\)"):
        list_images(source_of("folders", tmp_path, *names))
    assert found(list_images(source_of("folders", tmp_path, *names, label_level=3))) == expected


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_beside_the_splits_is_rejected(kind: Kind, tmp_path: Path):
    names = ["photos/train/cat/1.png", "photos/val/cat/2.png", "photos/sheet.png", "photos/extra/cat/3.png"]
    listing = list_images(source_of(kind, tmp_path, *names))
    assert found(listing) == {("train", "cat"): 1, ("validation", "cat"): 1} and reasons(listing) == {"bad_label": 2}


@pytest.mark.parametrize("kind", KINDS)
def test_a_train_beside_cars_stays_a_vehicle(kind: Kind, tmp_path: Path):
    listing = list_images(source_of(kind, tmp_path, "train/1.png", "car/2.png"))
    assert found(listing) == {(None, "train"): 1, (None, "car"): 1} and not listing.warnings


def test_an_archive_of_one_split_keeps_it(tmp_path: Path):
    assert found(list_images(source_of("zip", tmp_path, "test/cat/1.png", "test/dog/2.png"))) == {
        ("test", "cat"): 1, ("test", "dog"): 1,
    }  # fmt: skip


def test_folders_say_more_than_the_names_of_archives(tmp_path: Path):
    write_tar(tmp_path / "train-0.tar", {"x/train/cat/1.png": picture(1), "x/val/cat/2.png": picture(2)})
    assert found(list_images(SourceConfig(uri=str(tmp_path), kind="webdataset"))) == {
        ("train", "cat"): 1, ("validation", "cat"): 1,
    }  # fmt: skip


def test_an_archive_whose_first_thousand_images_lie_flat_loses_no_class(tmp_path: Path):
    members = {f"{number}.png": b"x" for number in range(1_001)} | {"cat/1.png": picture(1), "dog/2.png": picture(2)}
    listing = list_images(write_tar(tmp_path / "a.tar", members))
    assert found(listing) == {(None, "cat"): 1, (None, "dog"): 1} and reasons(listing) == {"bad_label": 1_001}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [
    ("seg_train", "seg_test"), ("train_set", "test_set"), ("training_set", "test_set"), ("train2017", "val2017"),
    ("TrainData", "TestData"), ("imagenet-train", "imagenet-val"),
])  # fmt: skip
def test_folders_that_look_like_splits_are_named(kind: Kind, names: tuple[str, str], tmp_path: Path):
    paths = [f"{name}/{name}/{label}/1.png" for name in names for label in ("sea", "forest")]
    listing = list_images(source_of(kind, tmp_path, *paths, label_level=3))
    [warning] = listing.warnings
    assert warning.startswith(f"the folders {', '.join(sorted(names))} look like splits") and listing.num_images == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("contest", "constrain"), ("train_a", "train_b"), ("cat_train", "dog_test")])
def test_other_words_do_not_look_like_splits(kind: Kind, names: tuple[str, ...], tmp_path: Path):
    assert not list_images(source_of(kind, tmp_path, *(f"{name}/1.png" for name in names))).warnings


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hidden", [".ipynb_checkpoints", ".thumbnails", "__MACOSX", "@eaDir", ".git", "$RECYCLE.BIN"])
@pytest.mark.parametrize("where", ["{}/1.png", "cat/{}/1.png", "{}/cat/1.png"])
def test_hidden_folders_are_no_classes(kind: Kind, hidden: str, where: str, tmp_path: Path):
    listing = list_images(source_of(kind, tmp_path, "cat/1.png", "dog/2.png", where.format(hidden)))
    assert found(listing) == {(None, "cat"): 1, (None, "dog"): 1}
    assert reasons(listing) == {"not_an_image_name": 1} and not listing.warnings


@pytest.mark.parametrize(("first", "second", "named"), [
    ("Cat", "cat", "'Cat' and 'cat'"),
    ("caf\u00e9", "cafe\u0301", "'cafe\\u0301' and 'caf\\xe9'"),
    ("cat", "cat ", "'cat' and 'cat '"),
    ("big cat", "big  CAT", "'big  CAT' and 'big cat'"),
    ("stra\u00dfe", "STRASSE", "'STRASSE' and 'stra\\xdfe'"),
])  # fmt: skip
def test_classes_that_look_alike_are_named(first: str, second: str, named: str, tmp_path: Path):
    source = source_of("zip", tmp_path, f"{first}/1.png", f"{second}/2.png", "dog/3.png")
    plan = plan_build(EtlTree(source=source, dataset=DatasetConfig(uri=str(tmp_path / "d")), etl=ETL), run_id="r")
    warnings = [each for each in inferred_warnings(plan) if "in how Unicode writes them" in each]
    assert len(warnings) == 1 and f": {named};" in warnings[0]


def planned(source: SourceConfig, folder: Path) -> tuple[str, ...]:
    """The classes of a build."""
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / "dataset")), etl=ETL)
    return plan_build(tree, run_id="r").listing.class_names


MASK, DRAWING = mask_of(40, 60, [5, 5, 30, 20]), png(np.full((40, 60, 3), 200, np.uint8))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("picture_name", "mask_name"),
    [
        ("images/training/{}.png", "annotations/training/{}.png"),
        ("JPEGImages/{}.png", "SegmentationClass/{}.png"),
        ("images/{}.png", "masks/{}_mask.png"),
        ("leftImg8bit/train/{}_leftImg8bit.png", "gtFine/train/{}_gtFine_labelIds.png"),
        ("photos/{}.png", "colours/{}.png"),
    ],
)
def test_masks_of_pictures_are_no_class_beside_them(kind: Kind, picture_name: str, mask_name: str, tmp_path: Path):
    pictures = {picture_name.format(number): png(photo(40, 60 + number)) for number in range(8)}
    drawn = DRAWING if "colours" in mask_name else MASK
    # As in Pascal VOC, only some of the pictures may have one.
    source = source_with(kind, tmp_path, pictures | {mask_name.format(number): drawn for number in range(5)})
    classes = [name.partition("/")[0] for name in (picture_name, mask_name)]
    with pytest.raises(UsageError, match=f"folders {classes[0]} and {classes[1]} .* source.mask_field"):
        planned(source, tmp_path)
    # Their author knows what they are.
    assert planned(source.model_copy(update={"label_level": 1}), tmp_path) == tuple(sorted(classes))


@pytest.mark.parametrize("kind", KINDS)
def test_classes_with_equal_names_of_files_are_classes(kind: Kind, tmp_path: Path):
    for number, (first, second, names) in enumerate(
        [
            (png(photo(40, 60 + 1)), png(photo(40, 60 + 2)), range(8)),
            (MASK, DRAWING, range(8)),
            (png(photo(40, 60 + 1)), MASK, range(8, 16)),
        ]
    ):
        (folder := tmp_path / str(number)).mkdir()
        members = {f"cat/{n}.png": first for n in range(8)} | {f"dog/{n}.png": second for n in names}
        assert planned(source_with(kind, folder, members), folder) == ("cat", "dog")
