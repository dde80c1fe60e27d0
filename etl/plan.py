"""What the ETL knows before a unit runs: the listing, the work units, and the version that it builds on."""

from __future__ import annotations

from dataclasses import dataclass

from etl.config import EtlTree
from etl.sources import SOURCES
from etl.units import UnitTask, WorkUnit, fingerprint_config, plan_units
from shardmill.dataset.commit import Build
from shardmill.dataset.manifest import SourceRef
from shardmill.dataset.versions import latest_version, split_version
from shardmill.errors import UsageError
from shardmill.formats.parquet import parquet_schema
from shardmill.formats.rows import RowSchema
from shardmill.images.decoder_id import DECODER_ID, normalization_fingerprint
from shardmill.jobs.config import require_uri
from shardmill.jobs.redact import redacted
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import SourceImage

_NUM_PROBES = 8


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """All that is known before a unit runs."""

    build: Build
    units: tuple[WorkUnit, ...]
    task: UnitTask
    store: Store
    parent_version: int

    @property
    def num_images(self) -> int:
        """Sources that units will read; what the listing refused is not among them."""
        return sum(len(unit.sources) for unit in self.units)


def plan_build(tree: EtlTree, *, run_id: str) -> BuildPlan:
    """List the source and do all planning; reads no image."""
    for name, uri in (("source.uri", tree.source.uri), ("dataset.uri", tree.dataset.uri)):
        require_uri(name, uri)
    if split_version(tree.dataset.uri)[1] is not None:
        raise UsageError(
            f"dataset.uri = {tree.dataset.uri} names one version", "expected the dataset: a build makes a version",
            f"set dataset.uri to {split_version(tree.dataset.uri)[0]}",
        )  # fmt: skip
    _check_apart(tree.source.uri, tree.dataset.uri)
    config = tree.etl
    normalize = config.normalize_options()
    fingerprint = normalization_fingerprint(normalize)
    listing = SOURCES[tree.source.kind](tree.source, config.max_source_bytes)
    class_names = listing.class_names
    config_fingerprint = fingerprint_config(config, class_names, fingerprint)
    columns = parquet_schema(RowSchema(config.encoding, config.image_shape_HWC, class_names))
    # Absolute from here on: an executor has a working directory of its own.
    source_uri, store = open_store(tree.source.uri).uri, open_store(tree.dataset.uri)
    build = Build(
        run_id=run_id,
        source=SourceRef(
            uri=source_uri,
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
    return BuildPlan(
        build=build,
        units=tuple(plan_units(listing, config, config_fingerprint)),
        task=UnitTask(source_uri, store.uri, config, class_names, DECODER_ID, probes=choose_probes(listing.images)),
        store=store,
        parent_version=latest_version(store),
    )


def choose_probes(images: tuple[SourceImage, ...]) -> tuple[str, ...]:
    """Keys of a few images, spread over the listing; if none of them is left later, the source itself is absent."""
    num_probes = min(_NUM_PROBES, len(images))
    return tuple(images[place * len(images) // num_probes].key for place in range(num_probes))


def _check_apart(source_uri: str, dataset_uri: str) -> None:
    """A dataset inside its own source would be listed by the next run."""
    source, dataset = open_store(source_uri).uri, open_store(dataset_uri).uri
    if f"{dataset}/".startswith(f"{source}/"):
        raise UsageError(
            f"dataset.uri {dataset} lies inside source.uri {source}",
            "expected them apart, or the next run would list the shards as inputs",
            "set dataset.uri, or --workdir, to a place outside the source",
        )
