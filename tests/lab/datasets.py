"""Tiny real datasets for tests: real PNG files through the ETL's own functions, without Spark's start-up."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.engines import Engine, EngineSettings
from etl.listing.grouping import group_here
from etl.plan import plan_build
from etl.units.copy_rows import copy_rows
from etl.units.results import Finished
from etl.units.units import CopyUnit, UnitTask, WorkUnit
from etl.units.write_unit import write_unit
from shardmill.dataset.build import UnitResult
from shardmill.dataset.dataset import open_dataset
from shardmill.formats import SHARD_FORMATS
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.reader import read_batches
from shardmill.loader.row_source import ReaderOptions
from shardmill.stores import open_store

HERE = f"{__name__}:IN_PROCESS"
"""`etl.engine`, so that `build_dataset` starts nothing."""


def _run_here(units: Sequence[WorkUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    return (write_unit(unit, task) for unit in units)


def _copy_here(units: Sequence[CopyUnit], task: UnitTask, settings: EngineSettings) -> Iterator[UnitResult]:
    return (copy_rows(unit, task) for unit in units)


IN_PROCESS = Engine(_run_here, group_here, _copy_here)


def write_images(
    folder: Path, *, num_images: int = 120, num_classes: int = 3, image_size: int = 16, seed: int = 0
) -> None:
    """PNG files in class folders `class_0`...; each class is a bright bar at its own place, under noise."""
    rng = np.random.default_rng(seed)
    for number in range(num_images):
        label = number % num_classes
        image = rng.integers(0, 60, (image_size, image_size, 3), dtype=np.uint8)
        width = max(1, image_size // num_classes)
        image[:, label * width : (label + 1) * width, label % 3] += 150
        target = folder / f"class_{label}" / f"{number:05d}.png"
        target.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(target), image)


def upload(folder: Path, uri: str) -> str:
    """Every file below a local folder goes to the store at `uri`, under the name that it has there; returns `uri`."""
    store, files = open_store(uri), [path for path in folder.rglob("*") if path.is_file()]
    # HDFS takes half a second for each: it asks whether a file is complete, and asks again that much later.
    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(store.put_file, str(file.relative_to(folder)), file) for file in files]:
            done.result()
    return uri


def make_dataset(
    folder: Path,
    *,
    num_images: int = 120,
    num_classes: int = 3,
    formats: tuple[str, ...] = tuple(SHARD_FORMATS),
    image_size: int = 16,
    encoding: str = "png",
    chunk_bytes: int = 8_000,
    **etl: object,
) -> str:
    """A committed dataset of generated images below `folder`; returns its URI. Chunks are small, so there are many."""
    images, dataset = folder / "images", folder / "dataset"
    write_images(images, num_images=num_images, num_classes=num_classes, image_size=image_size)
    config = EtlConfig(
        image_size=image_size, formats=formats, encoding=encoding, chunk_bytes=chunk_bytes, unit_min_images=40, **etl
    )  # fmt: skip
    return build_here(str(images), str(dataset), config)


class SharedDatasets:
    """`make_dataset`, once for equal arguments: its datasets are only read. The fixture is `shared_dataset`."""

    def __init__(self, new_folder: Callable[[str], Path]) -> None:
        self._new_folder, self._made = new_folder, dict[str, str]()

    def __call__(self, **arguments: object) -> str:
        key = repr(sorted(arguments.items()))
        if key not in self._made:
            self._made[key] = make_dataset(self._new_folder("shared"), **arguments)  # pyright: ignore[reportArgumentType]
        return self._made[key]


def build_here(source: str | SourceConfig, dataset_uri: str, config: EtlConfig) -> str:
    """List, write every unit in this process, commit: the ETL without an engine. `source`: class folders, or any."""
    source = SourceConfig(uri=source) if isinstance(source, str) else source
    tree = EtlTree(source=source, dataset=DatasetConfig(uri=dataset_uri), etl=config)
    plan = plan_build(tree, run_id=f"test-{uuid.uuid4().hex[:8]}")
    commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
    return dataset_uri


def read_all(root: Path | str, format_name: str) -> int:
    """An epoch of every split; the number of its rows."""
    dataset = open_dataset(str(root))
    num_rows = 0
    for split in dataset.manifest.splits:
        spec = dataset.plan_spec(split, seed=0, global_batch_size=8, num_streams=2)
        with read_batches(dataset, dataset.plan_epoch(spec, 0), options=ReaderOptions(format=format_name)) as batches:
            num_rows += sum(int(batch.weights_N.sum()) for batch in batches)
    return num_rows
