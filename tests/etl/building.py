"""One small ETL config, what its tests ask of a build, and listings of names without files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from etl.commit import commit_results
from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import BuildOutcome
from etl.listing.grouping import Group, group_here
from etl.listing.list_source import list_source
from etl.listing.listing import Listing, images_of_table, read_cells
from etl.plan import plan_build
from etl.sources import SOURCES
from etl.sources.listed import ListingBatch, listed_table
from etl.units.after_decoding import Annotated, move_annotations
from etl.units.results import Finished
from etl.units.units import plan_units
from etl.units.write_unit import write_unit
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.verify import verify_dataset
from shardmill.formats import SHARD_FORMATS
from shardmill.images.annotations import make_mask
from shardmill.images.process import process_image
from shardmill.jobs.config import DatasetConfig, SparkConfig
from shardmill.jobs.observer import FieldValue, SilentObserver
from shardmill.options import NormalizeOptions
from shardmill.stores import open_store
from shardmill.values import ImageSample, Rejection, SourceImage
from tests.lab.datasets import HERE

ETL = EtlConfig(
    engine=HERE, image_size=16, encoding="png", unit_min_images=20, chunk_bytes=8_000, formats=tuple(SHARD_FORMATS)
)

COLLIDING = ("a/a2d5752f072480e4.jpg", "a/bda40fdd156494ba.jpg")
"""Two keys whose SHA-256 begin with the same 8 bytes; it took 2^31 hashes to find them."""


def tree_for(
    folder: Path, dataset: str, spark: SparkConfig | None = None, etl: EtlConfig = ETL, scheme: str = ""
) -> EtlTree:
    return EtlTree(
        source=SourceConfig(uri=f"{scheme}{folder}/images"),
        dataset=DatasetConfig(uri=str(folder / dataset)),
        etl=etl,
        spark=spark or SparkConfig(),
    )


class Recorder:
    def __init__(self) -> None:
        self.events: dict[str, Mapping[str, FieldValue]] = {}

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self.events[name] = fields


def digests(outcome: BuildOutcome) -> tuple[str, str]:
    return outcome.manifest.content_digest, outcome.manifest.layout_digest


def list_images(source: SourceConfig, max_source_bytes: int = 1_000) -> Listing:
    listed = SOURCES[source.kind](source)
    return list_source(listed, seed=0, max_source_bytes=max_source_bytes, observer=SilentObserver())


def build_source(source: SourceConfig, folder: Path, **etl: object) -> Manifest:
    """The version that a source becomes in `folder`, verified; every unit is written in this process."""
    dataset = DatasetConfig(uri=str(folder))
    plan = plan_build(EtlTree(source=source, dataset=dataset, etl=ETL.model_copy(update=etl)), run_id="r")
    manifest = commit_results(plan, Finished(plan.listing, [write_unit(unit, plan.task) for unit in plan.units]))
    verify_dataset(open_dataset(dataset.uri), deep=True).raise_if_failed()
    return manifest


def annotated(image: SourceImage, data: bytes, options: NormalizeOptions, mask: bytes = b"") -> Annotated | Rejection:
    """An image with its boxes and its mask, decoded and moved in this process."""
    sample = process_image(image, data, options)
    assert isinstance(sample, ImageSample)
    found = move_annotations(image, sample, options)
    if isinstance(found, Rejection) or found.mask_task is None:
        return found
    return found.with_mask(make_mask(found.image, found.mask_task.with_file(mask), options))


def images_of(listing: Listing) -> list[SourceImage]:
    """Everything in the segments, in the order of the keys' bytes."""
    store = open_store(str(listing.folder))
    tables = [table for segment in listing.segments for table in read_cells(store, segment.path, 0, 2**64 - 1)]
    return sorted((image for table in tables for image in images_of_table(table)), key=lambda image: image.key.encode())


class Batches:
    """A source that lists what it is given."""

    uri = "nowhere"

    def __init__(self, batches: list[list[SourceImage]]) -> None:
        self._batches = batches

    def list(self) -> Iterator[ListingBatch]:
        return (ListingBatch(listed_table(batch)) for batch in self._batches)


def listed(*batches: list[SourceImage], group: Group = group_here) -> Listing:
    return list_source(Batches(list(batches)), seed=0, max_source_bytes=1_000, observer=SilentObserver(), group=group)


def images(num_images: int) -> list[SourceImage]:
    return [SourceImage(f"c{n % 7}/{n}.jpg", n % 900, mtime_ns=n, label=f"c{n % 7}") for n in range(num_images)]


def facts(listing: Listing) -> tuple[object, ...]:
    units = plan_units(listing, EtlConfig(unit_min_images=50), "config")
    return (listing.fingerprint, listing.key_sum, listing.probes, listing.class_names, listing.num_listed, units)
