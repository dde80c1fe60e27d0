"""What `shardmill inspect` shows of a dataset: a version in short, its files, all versions, what differs between two of
them, and what was rejected.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.diff import ChangeKind, RowLocation, count_changes, diff_versions
from shardmill.dataset.ledger import REJECTS, read_ledger, read_rejections
from shardmill.dataset.statistics import ASPECT_NAMES, SIDE_NAMES, SizeCounts
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.result import Result, Rows
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.typed_columns import BOXES, MASK
from shardmill.values import PredictedBy, Rejection
from shardmill.words import counted, first_of, reasons

_NUM_ROWS_SHOWN = 20
_NUM_CLASSES_SHOWN = 10


def describe(dataset: Dataset) -> dict[str, Any]:
    """The manifest in short."""
    manifest = dataset.manifest
    return {
        "uri": dataset.pin.uri,
        "version": dataset.pin.version,
        "created_at": manifest.created_at,
        "operation": manifest.operation,
        "parent_version": manifest.parent_version,
        "restored_version": manifest.restored_version,
        "size_bytes": sum(shard.size_bytes + shard.rows_bytes for shard in dataset.shards),
        "formats": list(manifest.formats),
        "predicted_by": _model(manifest.predicted_by),
        "image": None
        if manifest.predicted_by is not None
        else {
            "shape_HWC": list(manifest.normalize.one_shape_HWC or ()) or None,
            "encoding": manifest.normalize.encoding,
            "channel_mean": list(manifest.channel_mean),
            "channel_std": list(manifest.channel_std),
        },
        "sizes": {"source": size_document(manifest.sizes.source), "stored": size_document(manifest.sizes.stored)},
        "class_names": list(manifest.class_names),
        "empty_classes": list(manifest.empty_classes),
        "label_type": manifest.row_schema.label_type,
        "extra_columns": {column.name: column.type for column in manifest.row_schema.extra},
        "counts": manifest.counts.model_dump(mode="json"),
        "splits": {
            name: {"num_rows": split.num_rows, "num_shards": split.num_shards, "class_counts": list(split.class_counts)}
            for name, split in manifest.splits.items()
        },
        "source": manifest.source.uri,
        "other_sources": [each.uri for each in manifest.other_sources],
        "content_digest": manifest.content_digest,
        "layout_digest": manifest.layout_digest,
    }


def _model(made_by: PredictedBy | None) -> dict[str, Any] | None:
    """The model whose answers a version holds; None for a dataset of images."""
    if made_by is None:
        return None
    pins = {"trained_on": made_by.trained_on, "predicted": made_by.predicted}
    return {
        "model": str(made_by),
        "weights_sha256": made_by.weights_sha256,
        "columns": list(made_by.columns),
        "layer": made_by.layer,
        **{name: None if pin is None else f"{pin.uri}@{pin.version}" for name, pin in pins.items()},
    }


def headline_rows(facts: dict[str, Any]) -> Rows:
    """The most important facts of a version: how many images, which classes or model, how large."""
    counts, names = facts["counts"], facts["class_names"]
    num_shards = sum(split["num_shards"] for split in facts["splits"].values())
    shown = first_of(names, _NUM_CLASSES_SHOWN)
    return [
        ("images", f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"),
        *(
            (f"in {name}", f"{facts['splits'][name]['num_rows']:,}")
            for name in ("train", "validation", "test")
            if name in facts["splits"]
        ),
        ("classes", f"{len(names):,}: {shown}") if names else ("labels", facts["label_type"]),
        (
            "size",
            f"{facts['size_bytes'] / 1e6:,.1f} MB in {counted(num_shards, 'shard')} ({', '.join(facts['formats'])})",
        ),
        *_content_rows(facts),
    ]


def class_rows(facts: dict[str, Any]) -> Rows:
    """How many images each class has in each split, the first classes; and where the rest of the facts is."""
    names, splits = facts["class_names"], facts["splits"]
    rows = [
        (f"class {name}", ", ".join(f"{splits[split]['class_counts'][number]:,} {split}" for split in splits))
        for number, name in enumerate(names[:_NUM_ROWS_SHOWN])
    ]
    left = len(names) - len(rows)
    return [
        *rows,
        *([("", f"and {left:,} more")] if left else []),
        ("more", "--all shows every fact, --files the shards, --rejects what was refused"),
    ]


def _content_rows(facts: dict[str, Any]) -> Rows:
    """What is stored of each image."""
    image, model = facts["image"], facts["predicted_by"]
    if model is not None:
        embedding = [f"the output of {model['layer']}"] if model["layer"] else []
        return [("stored", ", ".join((*model["columns"], *embedding))), ("model", model["model"])]
    shape = " x ".join(map(str, image["shape_HWC"])) if image["shape_HWC"] else "of several sizes"
    beside = [word for name, word in ((BOXES, "boxes"), (MASK, "a mask")) if name in facts["extra_columns"]]
    return [("stored", f"{image['encoding']}, {shape}{', with ' if beside else ''}{' and '.join(beside)}")]


def size_document(counts: SizeCounts) -> dict[str, Any]:
    """Images in each bucket that has any, and bytes."""
    sides = zip(SIDE_NAMES, counts.by_longer_side, strict=True)
    aspects = zip(ASPECT_NAMES, counts.by_aspect_ratio, strict=True)
    return {
        "longer_side": {name: times for name, times in sides if times},
        "aspect_ratio": {name: times for name, times in aspects if times},
        "num_bytes": counts.num_bytes,
    }


@dataclass(frozen=True, slots=True)
class VersionFacts:
    """One version of a dataset."""

    version: int
    operation: str
    parent_version: int | None
    restored_version: int | None
    is_expired: bool
    created_at: str
    run_id: str
    num_accepted: int
    num_rejected: int
    num_shards: int
    image_bytes: int
    content_digest: str

    @property
    def row(self) -> tuple[str, ...]:
        """What made it, and what it holds."""
        made_by = f"{self.operation} after {self.parent_version}" if self.parent_version else "full"
        return (
            str(self.version),
            f"rollback to {self.restored_version}" if self.operation == "rollback" else made_by,
            f"{counted(self.num_accepted, 'image')}, {self.num_rejected:,} rejected",
            f"{counted(self.num_shards, 'shard')}, {self.image_bytes / 1e6:.1f} MB",
            self.created_at,
            "expired" if self.is_expired else "",
        )


@dataclass(frozen=True, slots=True, repr=False)
class Versions(Result):
    """All versions of a dataset, the newest first (`shardmill.inspect` with `versions`)."""

    versions: tuple[VersionFacts, ...]
    in_document = "versions"

    def table(self) -> Rows:
        return [each.row for each in self.versions]


def list_versions(uri: str) -> Versions:
    """Every version of a dataset, the newest first, from the manifests alone; those that have expired as well.

    Raises UsageError if there is no dataset, IntegrityError for a manifest that is missing or altered.
    """
    store = open_store(uri)
    latest = read_manifest(store, latest_version(store) or 1)
    manifests = (read_manifest(store, version) for version in range(latest.version, 0, -1))
    return Versions(
        tuple(
            VersionFacts(
                version=manifest.version,
                operation=manifest.operation,
                parent_version=manifest.parent_version,
                restored_version=manifest.restored_version,
                is_expired=latest.has_expired(manifest.version),
                created_at=manifest.created_at,
                run_id=manifest.run_id,
                num_accepted=manifest.counts.accepted,
                num_rejected=manifest.counts.rejected,
                num_shards=sum(split.num_shards for split in manifest.splits.values()),
                image_bytes=sum(split.image_bytes for split in manifest.splits.values()),
                content_digest=manifest.content_digest,
            )
            for manifest in manifests
        )
    )


@dataclass(frozen=True, slots=True)
class CountedChange:
    """How many rows of a class and split were added, removed or changed."""

    change: ChangeKind
    split: str
    class_name: str | None
    num_rows: int


@dataclass(frozen=True, slots=True)
class ChangedRow:
    """A source image that two versions do not hold alike."""

    change: ChangeKind
    source: str
    before: RowLocation | None
    after: RowLocation | None


@dataclass(frozen=True, slots=True, repr=False)
class Difference(Result):
    """What a version has changed of an older one (`shardmill.inspect` with `diff`)."""

    uri: str
    older_version: int
    newer_version: int
    counts: tuple[CountedChange, ...]
    rows: tuple[ChangedRow, ...]

    def table(self) -> Rows:
        """Counts by split and class, then the first changed sources."""
        if not self.rows:
            return [("equal", "no row was added, removed or changed")]
        counts = [
            (each.change, f"{each.split}, {each.class_name or 'no class'}", f"{each.num_rows:,}")
            for each in self.counts
        ]
        rows = [(each.change, each.source, "") for each in self.rows[:_NUM_ROWS_SHOWN]]
        left = len(self.rows) - len(rows)
        return [*counts, *rows, *([("", f"and {left:,} more: --json lists all", "")] if left else [])]


def difference(newer: Dataset, older_version: int) -> Difference:
    """Between a version of the same dataset and `newer`: counts by split and class, and every row."""
    changes = diff_versions(open_dataset(f"{newer.pin.uri}@{older_version}"), newer)
    return Difference(
        newer.pin.uri,
        older_version,
        newer.pin.version,
        tuple(
            CountedChange(kind, place.split, place.class_name, num_rows)
            for (kind, place), num_rows in sorted(count_changes(changes).items(), key=str)
        ),
        tuple(ChangedRow(each.kind, each.source, each.before, each.after) for each in changes),
    )


@dataclass(frozen=True, slots=True)
class DatasetFile:
    """A shard that other tools may read."""

    split: str
    format: str
    uri: str


@dataclass(frozen=True, slots=True, repr=False)
class DatasetFiles(Result):
    """Every shard of a version, in every format."""

    files: tuple[DatasetFile, ...]
    in_document = "files"

    def table(self) -> Rows:
        return [(each.uri,) for each in self.files]


def list_files(dataset: Dataset) -> DatasetFiles:
    names = ((split, name) for split in dataset.manifest.splits for name in dataset.manifest.formats)
    return DatasetFiles(tuple(DatasetFile(*each, uri) for each in names for uri in dataset.files(*each)))


@dataclass(frozen=True, slots=True)
class RejectedInput:
    """An input that is no row."""

    source: str
    reason: str
    """One of docs/rejects.md."""
    detail: str
    size_bytes: int
    source_sha256: str
    stage: str
    """`list`, `read` or `decode`."""


def rejected_inputs(rejections: Iterable[Rejection]) -> tuple[RejectedInput, ...]:
    return tuple(
        RejectedInput(each.key, str(each.reason), each.detail, each.size_bytes, each.source_sha256, each.stage)
        for each in rejections
    )


@dataclass(frozen=True, slots=True, repr=False)
class Rejections(Result):
    """The rejects of a version (`shardmill.inspect` with `rejects`)."""

    rejections: tuple[RejectedInput, ...]
    in_document = "rejections"

    def table(self) -> Rows:
        return rejection_rows(self.rejections)


@dataclass(frozen=True, slots=True, repr=False)
class SourceFindings(Result):
    """What a build of a source would reject (`shardmill.check_source`)."""

    num_listed: int
    num_accepted: int
    num_rejected: int
    by_class: Mapping[str, int]
    by_split: Mapping[str, int]
    source_sizes: Mapping[str, Any]
    """Accepted images in each bucket of longer sides and of aspect ratios, and their bytes."""
    by_reason: Mapping[str, int]
    by_note: Mapping[str, int]
    warnings: tuple[str, ...]
    broken_limit: str | None
    """The setting that would end the build, such as `etl.max_reject_fraction`."""
    rejections: tuple[RejectedInput, ...]

    @property
    def ok(self) -> bool:
        """Whether a build would publish a version."""
        return self.broken_limit is None


def rejection_rows(found: Iterable[RejectedInput]) -> Rows:
    """Rows with the number of rejections per reason, the most frequent first; then every rejected input in
    that order.
    """
    found = tuple(found)
    counts = Counter(each.reason for each in found)
    places = {reason: place for place, (reason, _) in enumerate(counts.most_common())}
    inputs = sorted(found, key=lambda each: places[each.reason])
    return [
        ("rejected", reasons(dict(counts.most_common())) or "none", ""),
        *((each.source, each.reason, each.detail) for each in inputs),
    ]


def list_rejections(uri: str) -> Rejections:
    """The rejects ledger of a dataset version, one ledger file, or the newest one if no build has succeeded."""
    if ledger := uri if uri.endswith(".parquet") else failed_ledger(uri):
        return Rejections(rejected_inputs(read_ledger(ledger)))
    dataset = open_dataset(uri)
    return Rejections(rejected_inputs(read_rejections(dataset.store, dataset.manifest)))


def failed_ledger(uri: str) -> str:
    """URI of what the last build has rejected, of a dataset without a version; empty if there is none."""
    store = open_store(split_version(uri)[0])
    ledgers = [] if latest_version(store) else list(store.list(REJECTS))
    return join_uri(store.uri, max(ledgers, key=lambda file: (file.mtime_ns, file.path)).path) if ledgers else ""
