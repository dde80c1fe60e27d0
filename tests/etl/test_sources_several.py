"""Several sources in one dataset: apart by their names, one label map, and each held to its place."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from pydantic import ValidationError

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.dataset.ledger import read_rejections
from shardmill.dataset.open import open_dataset
from shardmill.errors import UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import read_samples
from tests.etl.building import build_source
from tests.lab.datasets import HERE, write_images

_SETTINGS = EtlConfig(engine=HERE, image_size=8, encoding="png", max_reject_fraction=1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two trees with equal paths and different images, and a third class in the second."""
    write_images(tmp_path / "a", num_images=12, num_classes=2, seed=1)
    write_images(tmp_path / "b", num_images=12, num_classes=3, seed=2)
    (tmp_path / "b" / "class_0" / "broken.png").write_bytes(b"\x89PNG")
    return tmp_path


def build(folder: Path, **parts: str):
    source = SourceConfig(
        kind="several", parts={name: SourceConfig(uri=str(folder / path)) for name, path in parts.items()}
    )
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=str(folder / "dataset")), etl=_SETTINGS)
    return build_dataset(tree, run_id="r").manifest


def test_equal_paths_in_two_sources_are_two_images(folder: Path):
    manifest = build(folder, a="a", b="b")
    assert (manifest.counts.accepted, manifest.counts.rejected) == (24, 1)
    assert manifest.class_names == ("class_0", "class_1", "class_2")
    assert manifest.source.parts == {"a": str(folder / "a"), "b": str(folder / "b")}
    dataset = open_dataset(str(folder / "dataset"))
    keys = {each.source for split in manifest.splits for each in read_samples(dataset, split, 100)}
    assert len(keys) == 24 and {key.partition("\0")[0] for key in keys} == {"a", "b"}
    [refused] = read_rejections(dataset.store, manifest)
    assert refused.key == "b\0class_0/broken.png"


def test_a_source_that_is_added_makes_an_incremental_version(folder: Path):
    build(folder, a="a")
    grown = build(folder, a="a", b="b")
    assert (grown.version, grown.operation, grown.counts.accepted) == (2, "incremental", 24)
    shutil.rmtree(folder / "dataset")
    assert build(folder, a="a", b="b").content_digest == grown.content_digest


def test_a_name_refers_to_one_place(folder: Path):
    build(folder, a="a", b="b")
    with pytest.raises(UsageError, match="was built from a .*, b .*, not from a"):
        build(folder, a="b")


def test_classes_in_some_sources_alone_are_refused(folder: Path):
    (folder / "flat").mkdir()
    for number, file in enumerate(sorted((folder / "a").rglob("*.png"))):
        shutil.copy(file, folder / "flat" / f"{number}.png")
    with pytest.raises(UsageError, match=r"source.parts.a has classes and source.parts.flat has none"):
        build(folder, a="a", flat="flat")


def test_wrong_parts_are_refused_by_the_config():
    with pytest.raises(ValidationError, match="parts only with kind"):
        SourceConfig(parts={"a": SourceConfig(uri="a")})
    with pytest.raises(ValidationError, match="the part b has parts itself"):
        SourceConfig(kind="several", parts={"b": SourceConfig(kind="several", parts={})})
    with pytest.raises(UsageError, match="source.parts is empty"):
        build_source(SourceConfig(kind="several"), Path("nowhere"))
