"""The output of `shardmill inspect` for a dataset version, as plain values for the table and for --json."""

from __future__ import annotations

from typing import Any

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.ledger import LEDGER_SCHEMA, read_rejections, rejections_of_table
from shardmill.dataset.open import open_dataset
from shardmill.dataset.segment import read_segment
from shardmill.errors import IntegrityError, UsageError
from shardmill.sealed import seal_file
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


def read_ledger(uri: str) -> list[Rejection]:
    """One ledger file below `DATASET/rejects/`: the inputs that a build which ended with exit 4 or 7 rejected.

    No manifest names it, so it is verified against its own name, which holds its digest.
    """
    folder, _, name = uri.rpartition("/")
    store = open_store(folder or ".")
    try:
        data = store.read(name)
    except FileNotFoundError:
        raise UsageError(f"no ledger {uri}", "expected the path that the failed run's error names") from None
    file = seal_file(name, data)
    if name != f"{file.sha256[:32]}.parquet":
        expected = f"expected a file named {file.sha256[:32]}.parquet"
        raise IntegrityError(f"{uri} was altered, or is no ledger", expected)
    # No manifest counted its rows; a row takes at least a byte.
    return rejections_of_table(read_segment(store, file, LEDGER_SCHEMA, max_rows=len(data)))


def _rejections_of(dataset: Dataset) -> list[Rejection]:
    return read_rejections(dataset.store, dataset.manifest)


def list_rejections(uri: str) -> list[dict[str, Any]]:
    """The rejects ledger of a dataset version, or one ledger file."""
    rejections = read_ledger(uri) if uri.endswith(".parquet") else _rejections_of(open_dataset(uri))
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
        for rejection in rejections
    ]
