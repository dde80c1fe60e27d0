"""Small datasets of several versions, and what a killed build leaves, for the tests of garbage collection."""

from __future__ import annotations

from pathlib import Path

from etl.config import EtlConfig
from etl.plan import plan_build
from etl.units.write_unit import write_unit
from shardmill.dataset.dataset import Dataset
from shardmill.dataset.maintenance.gc import GcReport, Retention, collect_garbage
from shardmill.dataset.shard import read_stored_rows
from shardmill.ids import add_digests, format_digest
from shardmill.stores import open_store
from tests.etl.building import tree_for
from tests.lab.datasets import HERE, build_here, write_images


def config_of(image_size: int) -> EtlConfig:
    return EtlConfig(image_size=image_size, encoding="png", unit_min_images=6, formats=("parquet",), engine=HERE)


def build(folder: Path, image_size: int) -> str:
    """A version whose images have that size: each differs from all others."""
    return build_here(str(folder / "images"), str(folder / "dataset"), config_of(image_size))


def leave_orphans(folder: Path, image_size: int) -> None:
    """What a build that was killed before its commit leaves, and its pending records."""
    plan = plan_build(tree_for(folder, "dataset", etl=config_of(image_size)), run_id="killed")
    for unit in plan.units[:2]:
        write_unit(unit, plan.task)


def read_all(dataset: Dataset) -> None:
    """Every row of a version, against the sums of its manifest."""
    for split, info in dataset.manifest.splits.items():
        schema = dataset.manifest.row_schema
        rows = [row for shard in dataset.shards_of(split) for row in read_stored_rows(dataset.store, shard, schema)]
        total = format_digest(add_digests(*(int.from_bytes(row.digest, "big") for row in rows)))
        assert total == info.row_digest_sum


def gc_now(root: str, keep: int | None) -> GcReport:
    # Older than two seconds from now: S3 tells times in seconds.
    return collect_garbage(open_store(root), Retention(keep, older_than_seconds=-2.0), "gc")


def files_of(root: str) -> set[str]:
    return {str(path.relative_to(root)) for path in Path(root).rglob("*") if path.is_file()}


def with_images(folder: Path) -> Path:
    """`folder` itself, with images to build of."""
    write_images(folder / "images", num_images=24)
    return folder
