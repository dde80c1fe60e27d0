"""The size of stored images if the config leaves it open: chosen from the sources, and kept by later versions."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
import pytest

from etl.checks.facts import inferred_facts
from etl.checks.source_check import check_source_images
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from etl.plan import BuildPlan, plan_build
from pipeline.cli_options import Common
from pipeline.commands.dry_run import dry_run
from shardmill.dataset.manifest import Manifest
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING, FieldValue, SilentObserver
from tests.lab.datasets import HERE
from tests.shardmill.images.make import png, tiff_of, with_pages

OPEN = EtlConfig(unit_min_images=10, engine=HERE)


class Warned:
    """The warnings of a build."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.sentences += [str(fields[WARNING])] if WARNING in fields else []


def write_sources(folder: Path, sides: list[int], start: int = 0) -> None:
    """One image of each side (the other one is 7 pixels longer), in two classes."""
    for number, side in enumerate(sides, start=start):
        path = folder / f"class_{number % 2}" / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.RandomState(number).randint(0, 256, (side, side + 7, 3)).astype(np.uint8)
        cv2.imwrite(str(path), pixels)


def tree_for(source: Path, dataset: Path, **etl: object) -> EtlTree:
    config = OPEN.model_copy(update=etl)
    return EtlTree(source=SourceConfig(uri=str(source)), dataset=DatasetConfig(uri=str(dataset)), etl=config)


def plan_of(tmp_path: Path, sides: list[int], **etl: object) -> BuildPlan:
    write_sources(tmp_path / "images", sides)
    return plan_build(tree_for(tmp_path / "images", tmp_path / "dataset", **etl), run_id="a")


@pytest.mark.parametrize(
    ("sides", "size"),
    [
        ([32] * 20, 32),
        ([28] * 20, 32),
        ([8] * 20, 32),
        ([50] * 20, 48),
        ([63] * 20, 48),
        ([64] * 20, 64),
        ([200] * 20, 64),
        ([32] * 13 + [400] * 7, 32),
        ([32] * 7 + [400] * 13, 64),
    ],
)
def test_the_size_is_no_larger_than_most_sources(tmp_path: Path, sides: list[int], size: int) -> None:
    plan = plan_of(tmp_path, sides)
    assert plan.build.normalize.image_size == plan.task.config.image_size == size
    assert plan.row_schema.one_shape_HWC == (size, size, 3)
    said = str(inferred_facts(plan)["image"])
    median = sorted(sides)[len(sides) // 2]
    if median > 64:
        more = f"--set etl.image_size={min(median, 224)} keeps more, as fine-tuning needs)"
        assert f"(the default; images are larger, their median short side is {median}: {more}" in said
    else:
        assert f"{size} x {size} x 3 (the median short side of the sources is {median})" in said


def test_a_size_that_is_given_stays_and_a_warning_says_that_it_enlarges(tmp_path: Path) -> None:
    warned = Warned()
    write_sources(tmp_path / "images", [32] * 12)
    given = build_dataset(tree_for(tmp_path / "images", tmp_path / "d", image_size=64), run_id="a", observer=warned)
    assert given.manifest.normalize.image_size == 64
    expected = "12 of 12 images have a longer side of less than 64 pixels, and were enlarged to etl.image_size = 64"
    assert any(expected in each for each in warned.sentences)
    for number, etl in enumerate(({"image_size": 32}, {"image_size": 64, "upscale": "never"}, {})):
        silent = Warned()
        build_dataset(tree_for(tmp_path / "images", tmp_path / f"d{number}", **etl), run_id="a", observer=silent)
        assert not any("enlarged" in each for each in silent.sentences)


def test_broken_sources_do_not_decide_and_without_any_other_the_default_does(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 5)
    for number in range(20):
        (tmp_path / "images" / "class_0" / f"broken{number}.png").write_bytes(b"<html>")
    tree = tree_for(tmp_path / "images", tmp_path / "dataset")
    assert plan_build(tree, run_id="a").task.config.image_size == 32
    for path in (tmp_path / "images").rglob("[0-9]*.png"):
        path.unlink()
    plan = plan_build(tree, run_id="a")
    assert (plan.task.config.image_size, plan.size.reason) == (64, "the default")


def test_sources_of_any_kind_are_looked_at(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 12)
    archive = shutil.make_archive(str(tmp_path / "archive"), "zip", tmp_path / "images")
    table = tmp_path / "table.csv"
    paths = sorted((tmp_path / "images").rglob("*.png"))
    table.write_text("path,label\n" + "".join(f"{path},{path.parent.name}\n" for path in paths))
    for kind, uri in (("folders", str(tmp_path / "images")), ("zip", archive), ("table", str(table))):
        tree = EtlTree(
            source=SourceConfig(uri=uri, kind=kind), dataset=DatasetConfig(uri=str(tmp_path / "d")), etl=OPEN
        )
        assert plan_build(tree, run_id="a").task.config.image_size == 32


def built(tmp_path: Path, dataset: str, **etl: object) -> Manifest:
    return build_dataset(tree_for(tmp_path / "images", tmp_path / dataset, **etl), run_id=dataset).manifest


def test_a_dataset_that_is_continued_keeps_its_size_and_its_digest_is_that_of_a_full_build(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [32] * 12)
    assert built(tmp_path, "dataset").normalize.image_size == 32
    # By now most sources are large: a new dataset would get 64.
    write_sources(tmp_path / "images", [300] * 40, start=12)
    grown = built(tmp_path, "dataset")
    assert (grown.version, grown.operation, grown.normalize.image_size) == (2, "incremental", 32)
    full = built(tmp_path, "other", image_size=32)
    assert grown.content_digest == full.content_digest
    assert grown.normalization_fingerprint == full.normalization_fingerprint
    assert built(tmp_path, "new").normalize.image_size == 64
    # What was built with a size that the config gave goes on without it as well.
    assert built(tmp_path, "given", image_size=40).version == 1
    assert built(tmp_path, "given").version == 1


@pytest.mark.starts("program")
def test_all_that_plans_chooses_the_same_size(tmp_path: Path) -> None:
    write_sources(tmp_path / "images", [50] * 12)
    tree = tree_for(tmp_path / "images", tmp_path / "work" / "dataset")
    plans = [plan_build(tree, run_id=run_id) for run_id in "ab"]
    assert plans[0].digest == plans[1].digest
    assert check_source_images(tree, run_id="c", observer=SilentObserver()).num_accepted == 12
    dry = dry_run(
        str(tmp_path / "images"),
        Common((), str(tmp_path / "work"), "r", is_run_named=False, json=False, debug=False),
    )
    assert dry.stored_as.startswith("48 x 48 x 3 (the median short side of the sources is 50)")
    manifest = build_dataset(tree, run_id="d").manifest
    assert manifest.normalize.image_size == manifest.config["image_size"] == 48


def test_a_build_ends_with_what_decoding_has_lost(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / "images" / f"class_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        twelve_bits = np.random.RandomState(number).randint(0, 4096, (32, 32)).astype(np.uint16)
        (folder / f"dark{number}.png").write_bytes(png(twelve_bits))
        (folder / f"bright{number}.png").write_bytes(png(twelve_bits * 16))
        bands = np.random.RandomState(number).randint(0, 256, (32, 32, 5)).astype(np.uint8)
        (folder / f"bands{number}.tif").write_bytes(tiff_of(bands, {338: [0, 0]}))
        (folder / f"preview{number}.tif").write_bytes(tiff_of(bands[:, :, :3], {254: [1]}))
        pages = [tiff_of(np.full((8, 8, 3), 9 + number, np.uint8)), tiff_of(bands[:, :, :3])]
        (folder / f"pages{number}.tif").write_bytes(with_pages(pages))
    warned = Warned()
    tree = tree_for(tmp_path / "images", tmp_path / "dataset")
    counts = build_dataset(tree, run_id="a", observer=warned).manifest.counts
    expected = {"low_range_16_bit": 4, "scaled_16_bit": 8, "extra_bands_dropped": 4, "preview_only": 4}
    expected |= {"first_frame_of_2": 4, "larger_page_behind": 4, "constant": 4}
    assert counts.by_note == dict(sorted(expected.items()))
    said = "\n".join(warned.sentences)
    assert "4 of 8 accepted 16-bit images use at most 14 of their bits, and are dark" in said
    assert "etl.significant_bits" in said
    assert "4 accepted TIFF images have bands in addition to their colours" in said
    assert "4 accepted TIFF images are marked as previews" in said
    assert "4 accepted TIFF images have a larger page of the same shape after the page that was used" in said


def test_images_that_keep_their_own_size_are_not_looked_at(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, [32] * 4, resize_mode="none")
    assert (plan.task.config.image_size, plan.size.reason) == (64, "the default")
