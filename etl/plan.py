"""What the ETL knows before a unit runs: the listing, the work units, and the version that it builds on."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from etl.config import EtlTree
from etl.list_source import list_source
from etl.listing import Listing
from etl.sources import SOURCES
from etl.units import ListingPlace, UnitTask, WorkUnit, fingerprint_config, plan_units, read_unit
from shardmill.dataset.commit import Build
from shardmill.dataset.manifest import SourceRef
from shardmill.dataset.versions import latest_version, split_version
from shardmill.errors import UsageError
from shardmill.formats.parquet import parquet_schema
from shardmill.formats.rows import RowSchema
from shardmill.images.decoder_id import DECODER_ID, normalization_fingerprint
from shardmill.jobs.config import require_uri
from shardmill.jobs.observer import Observer, SilentObserver
from shardmill.jobs.redact import redacted
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import SourceImage


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """All that is known before a unit runs."""

    build: Build
    listing: Listing
    units: tuple[WorkUnit, ...]
    task: UnitTask
    store: Store
    parent_version: int

    @property
    def num_images(self) -> int:
        """Sources that units will read; what the listing refused is not among them."""
        return self.listing.num_images

    @property
    def digest(self) -> str:
        """Equal plans (listing, config and units) have equal digests, on any machine."""
        parts = [self.build.source.listing_fingerprint, self.build.config_fingerprint, self.build.source.key_sum]
        return hashlib.sha256("\0".join([*parts, *(unit.fingerprint for unit in self.units)]).encode()).hexdigest()

    def sources_of(self, unit: WorkUnit) -> tuple[SourceImage, ...]:
        """The images of one unit, in the order in which it reads them."""
        return read_unit(self.task.listing, unit, self.task.config.seed)


def plan_build(tree: EtlTree, *, run_id: str, observer: Observer | None = None) -> BuildPlan:
    """List the source and do all planning; reads no image. The observer gets the number of inputs listed so far."""
    require_uri("source.uri", tree.source.uri)
    require_uri("dataset.uri", tree.dataset.uri)
    _check_places(tree.source.uri, tree.dataset.uri)
    config = tree.etl
    normalize = config.normalize_options()
    fingerprint = normalization_fingerprint(normalize)
    source = SOURCES[tree.source.kind](tree.source)
    observer = observer or SilentObserver()
    listing = list_source(source, seed=config.seed, max_source_bytes=config.max_source_bytes, observer=observer)
    class_names = listing.class_names
    config_fingerprint = fingerprint_config(config, class_names, fingerprint, tree.source.image_field)
    columns = parquet_schema(RowSchema(config.encoding, config.image_shape_HWC, class_names))
    store = open_store(tree.dataset.uri)
    build = Build(
        run_id=run_id,
        source=SourceRef(
            uri=source.uri,
            kind=tree.source.kind,
            listing_fingerprint=listing.fingerprint,
            key_sum=listing.key_sum,
        ),
        num_listed=listing.num_listed,
        list_rejections=listing.rejections,
        class_names=class_names,
        columns={field.name: str(field.type) for field in columns},
        formats=config.formats,
        normalize=normalize,
        normalization_fingerprint=fingerprint,
        decoder_id=DECODER_ID,
        config=redacted(config.model_dump(mode="json")),
        config_fingerprint=config_fingerprint,
    )
    task = UnitTask(
        # Absolute from here on: an executor has a working directory of its own.
        source=tree.source.model_copy(update={"uri": source.uri}),
        dataset_uri=store.uri,
        config=config,
        class_names=class_names,
        decoder_id=DECODER_ID,
        listing=ListingPlace(str(listing.folder), listing.segments),
        probes=listing.probes,
    )
    units = tuple(plan_units(listing, config, config_fingerprint))
    return BuildPlan(build, listing, units, task, store, latest_version(store))


def _check_places(source_uri: str, dataset_uri: str) -> None:
    """A dataset inside its own source would be listed by the next run."""
    if split_version(dataset_uri)[1] is not None:
        raise UsageError(
            f"dataset.uri = {dataset_uri} names one version", "expected the dataset: a build makes a version",
            f"set dataset.uri to {split_version(dataset_uri)[0]}",
        )  # fmt: skip
    source, dataset = open_store(source_uri).uri, open_store(dataset_uri).uri
    if f"{dataset}/".startswith(f"{source}/"):
        raise UsageError(
            f"dataset.uri {dataset} lies inside source.uri {source}",
            "expected them apart, or the next run would list the shards as inputs",
            "set dataset.uri, or --workdir, to a place outside the source",
        )
