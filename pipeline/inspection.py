"""The output of `shardmill inspect` for a dataset version, as plain values for the table and for --json."""

from __future__ import annotations

import shlex
from typing import Any

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.ledger import REJECTS, read_ledger, read_rejections
from shardmill.dataset.open import open_dataset
from shardmill.dataset.versions import latest_version, split_version
from shardmill.errors import UsageError
from shardmill.storage import join_uri
from shardmill.stores import open_store
from shardmill.values import Rejection


def describe(dataset: Dataset) -> dict[str, Any]:
    """The manifest in short."""
    manifest = dataset.manifest
    return {
        "uri": dataset.pin.uri,
        "version": dataset.pin.version,
        "created_at": manifest.created_at,
        "operation": manifest.operation,
        "parent_version": manifest.parent_version,
        "content_digest": manifest.content_digest,
        "layout_digest": manifest.layout_digest,
        "formats": list(manifest.formats),
        "image": {
            "shape_HWC": list(manifest.normalize.image_shape_HWC),
            "encoding": manifest.normalize.encoding,
            "channel_mean": list(manifest.channel_mean),
            "channel_std": list(manifest.channel_std),
        },
        "class_names": list(manifest.class_names),
        "counts": manifest.counts.model_dump(mode="json"),
        "splits": {
            name: {"num_rows": split.num_rows, "num_shards": split.num_shards, "class_counts": list(split.class_counts)}
            for name, split in manifest.splits.items()
        },
        "source": manifest.source.uri,
    }


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
            f"what the last one rejected: `shardmill inspect --rejects {shlex.quote(newest)}`",
        )
    dataset = open_dataset(uri)
    return read_rejections(dataset.store, dataset.manifest)


def list_rejections(uri: str) -> list[dict[str, Any]]:
    """The rejects ledger of a dataset version, or one ledger file.

    Raises UsageError naming the newest ledger if no build of the dataset succeeded.
    """
    return [
        {
            # Names that are not UTF-8 travel as surrogates, which JSON can hold only escaped.
            "source": rejection.key,
            "reason": str(rejection.reason),
            "detail": rejection.detail,
            "size_bytes": rejection.size_bytes,
            "source_sha256": rejection.source_sha256,
            "stage": rejection.stage,
        }
        for rejection in _read_rejections(uri)
    ]
