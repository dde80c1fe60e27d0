"""Stratified splits: every class has its shares to two images, and no image of a source ever moves."""

from __future__ import annotations

import random
import shutil
import uuid
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from etl.config import EtlConfig, EtlTree, SourceConfig, SplitFractions
from etl.job import build_dataset
from etl.listing.stratify import share_out, whole_quotas
from etl.plan import plan_build
from shardmill.dataset.open import open_dataset
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import FieldValue
from tests.lab.datasets import HERE, write_images

_SETTINGS = EtlConfig(
    engine=HERE, image_size=8, encoding="png", stratified_splits=True,
    split_fractions=SplitFractions(train=0.7, validation=0.2, test=0.1),
)  # fmt: skip


def tree_of(images: str, dataset: str, etl: EtlConfig) -> EtlTree:
    return EtlTree(source=SourceConfig(uri=images), dataset=DatasetConfig(uri=dataset), etl=etl)


def build(images: str, dataset: str, etl: EtlConfig) -> None:
    build_dataset(tree_of(images, dataset, etl), run_id=uuid.uuid4().hex)


def splits_of(dataset: str) -> dict[str, tuple[str, int]]:
    """Source -> split and class."""
    opened = open_dataset(dataset)
    return {
        row["source"]: (split, row["label"])
        for split in opened.manifest.splits
        for file in opened.files(split, "parquet")
        for row in pq.read_table(file, columns=["source", "label"]).to_pylist()
    }


def grow(folder: Path, num_images: int, seed: int) -> None:
    write_images(folder / f"more{seed}", num_images=num_images, num_classes=4, seed=seed)
    for file in (folder / f"more{seed}").rglob("*.png"):
        shutil.copy(file, folder / "images" / file.parent.name / f"{seed}-{file.name}")


def check_shares(found: dict[str, tuple[str, int]]) -> None:
    counts = Counter(found.values())
    for label in range(4):
        num_images = sum(times for (_, each), times in counts.items() if each == label)
        for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
            assert abs(counts[split, label] - share * num_images) <= 2, counts
    for split, share in (("train", 0.7), ("validation", 0.2), ("test", 0.1)):
        assert abs(sum(each == split for each, _ in found.values()) / len(found) - share) <= 0.01, counts


def test_each_class_has_its_shares_and_no_image_moves(tmp_path: Path):
    write_images(tmp_path / "images", num_images=74, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    build(images, dataset, _SETTINGS)
    before = splits_of(dataset)
    check_shares(before)
    # Nothing has changed, so nothing is made.
    build(images, dataset, _SETTINGS)
    assert open_dataset(dataset).pin.version == 1
    grow(tmp_path, 53, seed=1)
    build(images, dataset, _SETTINGS)
    opened, after = open_dataset(dataset), splits_of(dataset)
    assert (opened.pin.version, opened.manifest.operation, len(after)) == (2, "incremental", 74 + 53)
    assert {source: after[source] for source in before} == before
    check_shares(after)


def test_turned_on_later_it_moves_nothing_and_evens_out_what_comes(tmp_path: Path):
    write_images(tmp_path / "images", num_images=40, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    build(images, dataset, _SETTINGS.model_copy(update={"stratified_splits": False}))
    before = splits_of(dataset)
    grow(tmp_path, 200, seed=2)
    build(images, dataset, _SETTINGS)
    after = splits_of(dataset)
    assert open_dataset(dataset).manifest.operation == "incremental"
    assert {source: after[source] for source in before} == before
    check_shares(after)


@pytest.mark.parametrize("is_stratified", [True, False])
def test_a_build_goes_behind_the_version_that_its_splits_count(tmp_path: Path, is_stratified: bool):
    write_images(tmp_path / "images", num_images=40, num_classes=4)
    images, dataset = str(tmp_path / "images"), str(tmp_path / "dataset")
    config = _SETTINGS.model_copy(update={"stratified_splits": is_stratified})
    build(images, dataset, config)
    grow(tmp_path, 20, seed=1)

    class Rival:
        """Commits version 2 once the listing has begun."""

        def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
            if name == "list.progress" and open_dataset(dataset).pin.version == 1:
                build(images, dataset, config)

    plan = plan_build(tree_of(images, dataset, config), run_id="late", observer=Rival())
    assert open_dataset(dataset).pin.version == 2
    # Without strata the listing asks for none, and the plan goes behind the newest.
    assert plan.parent_version == (1 if is_stratified else 2)


def test_quotas_add_up_and_no_new_image_is_lost():
    seed = random.SystemRandom().randrange(2**32)
    print("seed", seed)
    generator = random.Random(seed)
    for _ in range(300):
        shares = [generator.random() for _ in range(3)]
        shares = [share / sum(shares) for share in shares]
        carried, all_images, all_wanted = [0.0] * 3, 0, [0] * 3
        for _ in range(20):
            num_new, held = generator.randrange(9), [generator.randrange(4) for _ in range(3)]
            num_all = num_new + sum(held)
            ideals = [share * num_all + carry for share, carry in zip(shares, carried, strict=True)]
            wanted = whole_quotas(ideals, num_all)
            carried = [ideal - want for ideal, want in zip(ideals, wanted, strict=True)]
            assert sum(wanted) == num_all and min(wanted) >= 0
            assert all(abs(want - share * num_all) <= 2 for want, share in zip(wanted, shares, strict=True))
            remaining = share_out(wanted, held, num_new)
            assert sum(remaining) == num_new and min(remaining) >= 0
            all_images += num_all
            all_wanted = [total + want for total, want in zip(all_wanted, wanted, strict=True)]
        assert all(abs(total - share * all_images) <= 2 for total, share in zip(all_wanted, shares, strict=True))
