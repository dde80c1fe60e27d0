"""CIFAR's batches: pixels and names arrive as they are, nothing in a pickle is run, and damage is a rejection."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from etl.sources.kinds.raw_pixels import as_png, read_pickle
from etl.sources.recognise import recognise
from shardmill.errors import IntegrityError, UsageError
from tests.cifar_files import FILES, NAMES, python2_batch, records, write_cifar10
from tests.etl.building import build_source, images_of, list_images
from tests.lab.datasets import write_images

PIXELS = np.random.default_rng(0).integers(0, 255, (4, 3072), np.uint8)
LABELS = np.array([3, 1, 9, 0])


def cifar(uri: object) -> SourceConfig:
    return SourceConfig(uri=str(uri), kind="cifar")


class Runs:
    """Unpickled, it would end the test."""

    def __reduce__(self) -> tuple[object, ...]:
        return _run, ("a pickle was run",)


def _run(what: str) -> None:
    raise AssertionError(what)


@pytest.mark.parametrize("form", ["python", "binary"])
def test_batches_are_splits_with_names(form: str, tmp_path: Path):
    pixels = write_cifar10(tmp_path / "in", 30, form=form)
    assert recognise(str(tmp_path / "in")) == "cifar"
    source = cifar(tmp_path / "in")
    listing = list_images(source)
    images = images_of(listing)
    assert Counter(image.split for image in images) == {"train": 150, "test": 30}
    assert [(each.key, each.reason) for each in listing.rejections] == [("readme.html", "not_an_image_name")]
    reader = SOURCES["cifar"](source).open(10_000)
    for image in images[::7]:
        assert image.label == NAMES[image.place % 10]
        assert reader.read(image) == as_png(pixels[image.container][image.place])
    manifest = build_source(source, tmp_path / "dataset")
    assert manifest.counts.by_split == {"test": 30, "train": 150} and manifest.class_names == NAMES


def test_both_versions_become_one_dataset(tmp_path: Path):
    def rows(form: str) -> list[tuple[str | None, str | None, object]]:
        write_cifar10(tmp_path / form, 10, form=form)
        reader = SOURCES["cifar"](cifar(tmp_path / form)).open(10_000)
        return [(each.label, each.split, reader.read(each)) for each in images_of(list_images(cifar(tmp_path / form)))]

    assert rows("python") == rows("binary")


def test_cifar_100_has_its_fine_labels(tmp_path: Path):
    coarse, names = np.zeros(4, int), [f"fine {number}" for number in range(10)]
    for name, form in (("python", ""), ("binary", ".bin")):
        for split in ("train", "test"):
            values = {"data": PIXELS, "fine_labels": LABELS.tolist(), "coarse_labels": coarse.tolist()}
            data = records(PIXELS, coarse, LABELS) if form else pickle.dumps(values)
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / f"{split}{form}").write_bytes(data)
        listing = list_images(cifar(tmp_path / name))
        assert recognise(str(tmp_path / name)) == "cifar"
        assert [each.label for each in images_of(listing)] == ["3", "1", "9", "0"] * 2
        assert Counter(each.split for each in images_of(listing)) == {"train": 4, "test": 4}
    (tmp_path / "python" / "meta").write_bytes(pickle.dumps({"fine_label_names": names, "coarse_label_names": ["x"]}))
    named = images_of(list_images(cifar(tmp_path / "python")))
    assert [each.label for each in named[:4]] == ["fine 3", "fine 1", "fine 9", "fine 0"]


def test_folders_with_such_names_stay_folders(tmp_path: Path):
    for split in ("train", "test"):
        write_images(tmp_path / split, num_images=4)
    assert recognise(str(tmp_path)) == "folders"
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "train").write_text("a list of names\n")
    assert recognise(str(tmp_path / "files")) == "folders"
    with pytest.raises(UsageError, match=r"contains no data_batch_1 or data_batch_1\.bin or"):
        list_images(cifar(tmp_path / "train"))


def test_python_reads_what_the_stand_in_of_python_2_is():
    values = pickle.loads(python2_batch(PIXELS, LABELS), encoding="bytes")  # noqa: S301
    assert np.array_equal(values[b"data"], PIXELS) and values[b"labels"] == LABELS.tolist()


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_of_every_protocol_are_read(protocol: int, order: str):
    array = np.array(PIXELS, order="F" if order == "F" else "C")
    values = read_pickle(pickle.dumps({"data": array, "again": array, "n": [1, 2.5, None, True]}, protocol))
    for name in ("data", "again"):
        assert np.array_equal(values[name].rows(), PIXELS)
    assert values["n"] == [1, 2.5, None, True]
    for other in (PIXELS.astype(np.int64), PIXELS.astype(np.int8), PIXELS[:, 1:]):
        assert read_pickle(pickle.dumps(other, protocol)).rows() is None


def test_nothing_in_a_pickle_is_run(tmp_path: Path):
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({"data": Runs(), "labels": [1]}))
    (tmp_path / "test_batch").write_bytes(python2_batch(PIXELS, LABELS))
    [rejection] = list_images(cifar(tmp_path)).rejections
    assert rejection.reason == "damaged_container" and "test_sources_cifar._run in it" in rejection.detail


@pytest.mark.parametrize("data", [
    b"", b"\x80\x02", b"\x80\x04.", b"}(U\x01xe.", b"ha.", b"(e.", b"h\x05.", b"\x80\x02\x81.",
    b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f", b"]a.", b"I9" + b"9" * 10_000 + b"\n.",
    # Bytes, and a place in the memo, that would be allocated; tuples in tuples, whose hash would end the process.
    b"\x80\x05\x96\0\0\0\0\xff\0\0\0.", b"]r\xff\xff\xff\x7f.", b"}" + b")" + b"\x85" * 10**6 + b"Ns.",
    b"cos\nsystem\n(S'true'\ntR.", b"cnumpy\nndarray\n(I9\ntR.", b"\x80\2\x82\1.", b"Pid\n.",
])  # fmt: skip
def test_what_is_no_pickle_is_said(data: bytes):
    with pytest.raises(IntegrityError, match="no pickle of plain values"):
        read_pickle(data)


@pytest.mark.parametrize("length", [0, 3, 40, 3_000, 9_000, -1])
def test_cut_batches_list_what_is_whole(length: int, tmp_path: Path):
    """Of a pickle nothing is whole before its end."""
    for form, suffix, num_whole in (("python", "", 0), ("binary", ".bin", max(0, length % (3073 * 4)) // 3073)):
        write_cifar10(tmp_path / form, 4, form=form)
        file = tmp_path / form / f"data_batch_1{suffix}"
        file.write_bytes(file.read_bytes()[:length])
        listing = list_images(cifar(tmp_path / form))
        assert Counter(each.container for each in images_of(listing))[file.name] == num_whole
        reasons = [str(each.reason) for each in listing.rejections if each.key == file.name]
        assert reasons == ["damaged_container"]


def test_labels_and_names_that_do_not_fit_are_rejected(tmp_path: Path):
    write_cifar10(tmp_path, 10)
    file = tmp_path / FILES[0]
    for values, problem in (
        ({"data": PIXELS, "labels": [1, 2]}, "it has 4 images and 2 labels"),
        ({"data": PIXELS, "labels": ["a"] * 4}, "no list of class numbers"),
        ({"data": PIXELS}, "no list of class numbers"),
        ({"data": PIXELS[:, :100], "labels": [1] * 4}, "3072 values for each image"),
        ([PIXELS], "3072 values for each image"),
    ):
        file.write_bytes(pickle.dumps(values))
        [rejection] = [each for each in list_images(cifar(tmp_path)).rejections if each.key == file.name]
        assert rejection.reason == "damaged_container" and problem in rejection.detail
    file.write_bytes(python2_batch(PIXELS, np.array([3, 10, 9, 0])))
    listing = list_images(cifar(tmp_path))
    [rejection] = [each for each in listing.rejections if each.key.startswith(f"{file.name}\0")]
    assert rejection.reason == "bad_row" and "the file of names has 10" in rejection.detail
    assert Counter(each.container for each in images_of(listing))[file.name] == 3
