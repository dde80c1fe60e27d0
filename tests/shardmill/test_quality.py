"""Images with planted faults are found and no others; a property of whole images that tells the classes is named."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.checks.data_faults import fault_warnings
from etl.config import EtlConfig
from shardmill.data_faults.looks import read_looks
from shardmill.data_faults.quality import Fault, find_faults
from shardmill.dataset.open import open_dataset
from shardmill.loader.samples import Samples
from tests.etl.incremental import build as build_version
from tests.etl.incremental import opened
from tests.lab.commands import in_process
from tests.lab.datasets import build_here

PLANTED = {
    "cat/uniform.png": {Fault.UNIFORM},
    "dog/dark.png": {Fault.DARK},
    "cat/blurred.png": {Fault.BLURRED},
    "dog/small.png": {Fault.ODD_SIZE},
    "cat/wide.png": {Fault.ODD_ASPECT},
}


def photo(seed: int, height: int = 120, width: int = 160) -> np.ndarray:
    """Blobs with a fine texture on them."""
    rng = np.random.default_rng(seed)
    blobs = cv2.resize(rng.integers(20, 236, (6, 8, 3), np.uint8), (width, height), interpolation=cv2.INTER_CUBIC)
    return np.clip(blobs + rng.normal(0, 12, blobs.shape), 0, 255).astype(np.uint8)


def write(folder: Path, name: str, image_HWC: np.ndarray) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    cv2.imwrite(str(folder / name), image_HWC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quality") / "images"
    for seed in range(60):
        write(folder, f"{('cat', 'dog')[seed % 2]}/{seed}.png", photo(seed))
    write(folder, "cat/uniform.png", np.full((120, 160, 3), 90, np.uint8))
    write(folder, "dog/dark.png", photo(100) // 12)
    write(folder, "cat/blurred.png", cv2.GaussianBlur(photo(101), (0, 0), 6))
    write(folder, "dog/small.png", photo(102, 24, 32))
    write(folder, "cat/wide.png", photo(103, 60, 240))
    return folder


def build(images: Path, into: Path, **options: object):
    build_here(str(images), str(into), EtlConfig(image_size=64, **options))
    return open_dataset(str(into))


def found(dataset) -> dict[str, set[Fault]]:
    by_source: dict[str, set[Fault]] = {}
    for each in find_faults(read_looks(dataset)).suspects:
        by_source.setdefault(each.source, set()).add(each.fault)
        sample = Samples(dataset, each.split)[each.row_in_split]
        assert sample.source == each.source, "the row in its split is that image"
    return by_source


@pytest.mark.parametrize("encoding", ["png", "jpeg"])
@pytest.mark.parametrize("mode", ["crop", "longer"])
def test_planted_faults_are_found_and_no_others(photos: Path, tmp_path: Path, encoding: str, mode: str):
    assert found(build(photos, tmp_path / "dataset", encoding=encoding, resize_mode=mode)) == PLANTED


def test_a_copied_row_keeps_its_look(tmp_path: Path):
    images = tmp_path / "images"
    for seed in range(12):
        write(images, f"cat/{seed}.png", photo(seed))
    build_version(tmp_path)
    before = _sharpness(tmp_path)
    (images / "cat/3.png").unlink()
    write(images, "cat/12.png", photo(12))
    assert build_version(tmp_path).manifest.operation == "incremental"
    after = _sharpness(tmp_path)
    assert after.keys() - before.keys() == {"cat/12.png"} and before.keys() - after.keys() == {"cat/3.png"}
    assert all(before[name] == after[name] for name in before.keys() & after.keys())


def _sharpness(folder: Path) -> dict[str, float]:
    looks = read_looks(opened(folder))
    return dict(zip(looks.sources, looks.sharpness_N.tolist(), strict=True))


@pytest.mark.parametrize(
    ("feature", "image_of_class"),
    [
        ("brightness", lambda label, seed: photo(seed) // (1 + 2 * label)),
        ("source size", lambda label, seed: photo(seed, 96 + 24 * label, 128 + 32 * label)),
        ("aspect ratio", lambda label, seed: photo(seed, 120, 120 + 60 * label)),
    ],
)
def test_a_telltale_is_named(feature: str, image_of_class: Callable[[int, int], np.ndarray], tmp_path: Path):
    for seed in range(60):
        write(tmp_path / "images", f"{('cat', 'dog')[seed % 2]}/{seed}.png", image_of_class(seed % 2, seed))
    dataset = build(tmp_path / "images", tmp_path / "dataset")
    telltales = find_faults(read_looks(dataset)).telltales
    assert feature in {each.feature for each in telltales}
    [named] = [each for each in telltales if each.feature == feature]
    assert named.accuracy > 0.9 and named.majority == 0.5
    # The build says so at its end.
    [warning] = fault_warnings(dataset.store, dataset.manifest)
    assert f"{feature} alone tells the class of" in warning
    assert warning.endswith(f"`shardmill inspect {dataset.pin.uri}@1 --quality` names them")


def test_classes_of_like_images_have_no_telltale(photos: Path, tmp_path: Path):
    dataset = build(photos, tmp_path / "dataset")
    assert find_faults(read_looks(dataset)).telltales == ()
    [warning] = fault_warnings(dataset.store, dataset.manifest)
    counts = "uniform 1, dark 1, blurred 1, odd_size 1, odd_aspect 1"
    assert warning.startswith(f"5 accepted images differ from the others as faults often do ({counts}): `shardmill")


def test_copies_are_named_with_units_and_values_with_names(photos: Path, tmp_path: Path):
    images = tmp_path / "images"
    for name, copies in (
        ("3.png", ("cat/a.png", "dog/b.png")),
        ("uniform.png", ("cat/c.png", "cat/d.png", "cat/e.png")),
    ):
        source = next(photos.glob(f"*/{name}"))
        for each in copies:
            (images / each).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, images / each)
    for seed in range(10, 30):
        shutil.copy(next(photos.glob(f"*/{seed}.png")), images / "dog")
    build(images, tmp_path / "dataset")
    asked = ("inspect", tmp_path / "dataset", "--quality")
    lines = in_process(*asked, cwd=tmp_path).stdout.splitlines()
    place = lines.index("equal bytes\t2 groups with 5 images; 0 groups in several splits, 1 of several classes")
    of_several, alike = (line.split("; ") for line in lines[place + 1 : place + 3])
    assert [re.sub(r"\(.*, (\w+)\)", r"\1", each) for each in of_several] == ["\tcat/a.png cat", "dog/b.png dog"]
    assert len(alike) == 3
    assert re.search(r"^\tcat/c.png \(\w+, cat\): contrast 0 of 255, usually [\d.]+ of 255$", "\n".join(lines), re.M)
    found = json.loads(in_process(*asked, "--json", cwd=tmp_path).stdout)
    equal = found["equal_bytes"]
    assert (equal["num_groups"], equal["num_images"], equal["conflicting_label"]) == (2, 5, 2)
    assert [len(group["images"]) for group in equal["groups"]] == [2, 3] and equal["groups"][0]["conflicting_label"]
    assert found["measures"]["odd_size"] == "root of the source's area"
    # Those that have something to compare are near duplicates as well.
    assert found["near_duplicates"] == equal["groups"][:1]
