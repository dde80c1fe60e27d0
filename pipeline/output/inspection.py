"""The output of `shardmill inspect` for a dataset and its versions, as plain values for the table and for --json."""

from __future__ import annotations

import shlex
from collections import Counter
from typing import Any

from etl.sources.listed import SPLITS
from pipeline.output.printing import Rows, plain
from shardmill.dataset.dataset import Dataset, open_dataset
from shardmill.dataset.diff import count_changes, diff_versions
from shardmill.dataset.ledger import REJECTS, read_ledger, read_rejections
from shardmill.dataset.statistics import ASPECT_NAMES, SIDE_NAMES, ImageSizes, SizeCounts
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.errors import UsageError
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
        "sizes": _described_sizes(manifest.sizes),
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
        *((f"in {name}", f"{facts['splits'][name]['num_rows']:,}") for name in SPLITS if name in facts["splits"]),
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


def _described_sizes(sizes: ImageSizes) -> dict[str, Any]:
    """Before and after: images in each bucket that has any, and bytes."""
    return {when: size_document(counts) for when, counts in (("source", sizes.source), ("stored", sizes.stored))}


def size_document(counts: SizeCounts) -> dict[str, Any]:
    """Images in each bucket that has any, and bytes."""
    sides = zip(SIDE_NAMES, counts.by_longer_side, strict=True)
    aspects = zip(ASPECT_NAMES, counts.by_aspect_ratio, strict=True)
    return {
        "longer_side": {name: times for name, times in sides if times},
        "aspect_ratio": {name: times for name, times in aspects if times},
        "num_bytes": counts.num_bytes,
    }


def list_versions(uri: str) -> list[dict[str, Any]]:
    """Every version of a dataset, the newest first, from the manifests alone; those that have expired as well.

    Raises UsageError if there is no dataset, IntegrityError for a manifest that is missing or altered.
    """
    store = open_store(uri)
    latest = read_manifest(store, latest_version(store) or 1)
    found = []
    for version in range(latest.version, 0, -1):
        manifest = read_manifest(store, version)
        found.append(
            {
                "version": version,
                "operation": manifest.operation,
                "parent_version": manifest.parent_version,
                "restored_version": manifest.restored_version,
                "is_expired": latest.has_expired(version),
                "created_at": manifest.created_at,
                "run_id": manifest.run_id,
                "num_accepted": manifest.counts.accepted,
                "num_rejected": manifest.counts.rejected,
                "num_shards": sum(split.num_shards for split in manifest.splits.values()),
                "image_bytes": sum(split.image_bytes for split in manifest.splits.values()),
                "content_digest": manifest.content_digest,
            }
        )
    return found


def version_rows(versions: list[dict[str, Any]]) -> Rows:
    """One row for each version: what made it, and what it holds."""
    return [
        (
            str(each["version"]),
            _operation(each),
            f"{each['num_accepted']:,} images, {each['num_rejected']:,} rejected",
            f"{counted(each['num_shards'], 'shard')}, {each['image_bytes'] / 1e6:.1f} MB",
            each["created_at"],
            "expired" if each["is_expired"] else "",
        )
        for each in versions
    ]


def _operation(version: dict[str, Any]) -> str:
    if version["operation"] == "rollback":
        return f"rollback to {version['restored_version']}"
    return f"{version['operation']} after {version['parent_version']}" if version["parent_version"] else "full"


def describe_difference(newer: Dataset, older_version: int) -> dict[str, Any]:
    """Describe the difference between a version of the same dataset and `newer`: counts by split and class, and every
    row.
    """
    older = open_dataset(f"{newer.pin.uri}@{older_version}")
    changes = diff_versions(older, newer)
    return {
        "uri": newer.pin.uri,
        "older_version": older_version,
        "newer_version": newer.pin.version,
        "counts": [
            {"change": str(kind), "split": place.split, "class_name": place.class_name, "num_rows": num_rows}
            for (kind, place), num_rows in sorted(count_changes(changes).items(), key=str)
        ],
        "rows": [
            {"change": str(each.kind), "source": each.source, "before": plain(each.before), "after": plain(each.after)}
            for each in changes
        ],
    }


def difference_rows(difference: dict[str, Any]) -> Rows:
    """Counts by split and class, then the first changed sources."""
    if not difference["rows"]:
        return [("equal", "no row was added, removed or changed")]
    counts = [
        (each["change"], f"{each['split']}, {each['class_name'] or 'no class'}", f"{each['num_rows']:,}")
        for each in difference["counts"]
    ]
    rows = [(each["change"], each["source"], "") for each in difference["rows"][:_NUM_ROWS_SHOWN]]
    left = len(difference["rows"]) - len(rows)
    return [*counts, *rows, *([("", f"and {left:,} more: --json lists all", "")] if left else [])]


def list_files(dataset: Dataset) -> list[dict[str, Any]]:
    """Every shard, in every format: the files that other tools may read."""
    return [
        {
            "split": split,
            "format": name,
            "uri": uri,
        }
        for split in dataset.manifest.splits
        for name in dataset.manifest.formats
        for uri in dataset.files(split, name)
    ]


def _read_rejections(uri: str) -> list[Rejection]:
    if uri.endswith(".parquet"):
        return read_ledger(uri)
    store = open_store(split_version(uri)[0])
    ledgers = [] if latest_version(store) else list(store.list(REJECTS))
    if ledgers:
        newest = join_uri(store.uri, max(ledgers, key=lambda file: (file.mtime_ns, file.path)).path)
        raise UsageError(
            f"{store.uri} has no version: its builds failed",
            "expected a committed dataset, or a ledger",
            f"to see what the last build rejected: `shardmill inspect --rejects {shlex.quote(newest)}`",
        )
    dataset = open_dataset(uri)
    return list(read_rejections(dataset.store, dataset.manifest))


def list_rejections(uri: str) -> list[dict[str, Any]]:
    """The rejects ledger of a dataset version, or one ledger file.

    Raises UsageError naming the newest ledger if no build of the dataset succeeded.
    """
    return [rejection_document(rejection) for rejection in _read_rejections(uri)]


def rejection_rows(found: list[dict[str, Any]]) -> Rows:
    """Rows with the number of rejections per reason, the most frequent first; then every rejected input in
    that order.
    """
    counts = Counter(each["reason"] for each in found)
    places = {reason: place for place, (reason, _) in enumerate(counts.most_common())}
    inputs = sorted(found, key=lambda each: places[each["reason"]])
    return [
        ("rejected", reasons(dict(counts.most_common())) or "none", ""),
        *((each["source"], each["reason"], each["detail"]) for each in inputs),
    ]


def rejection_document(rejection: Rejection) -> dict[str, Any]:
    """One rejected input, for --json."""
    return {
        # Names that are not UTF-8 travel as surrogates, which JSON can hold only escaped.
        "source": rejection.key,
        "reason": str(rejection.reason),
        "detail": rejection.detail,
        "size_bytes": rejection.size_bytes,
        "source_sha256": rejection.source_sha256,
        "stage": rejection.stage,
    }
