"""How a dataset version shows itself in a notebook: what its manifest says, and some of its images."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError
from shardmill.html import picture, table, text
from shardmill.words import first_of, rejected

if TYPE_CHECKING:
    from PIL.Image import Image

    from shardmill.dataset.dataset import Dataset

_THUMBNAILS, _NAMES = 12, 10


def dataset_html(dataset: Dataset, show: Callable[[int], Image]) -> str:
    """A table, one row for each split below it, and what `show` draws, for which some shards are read."""
    manifest = dataset.manifest
    splits = table(
        ((name, f"{split.num_rows:,}", f"{split.num_shards:,}", f"{split.image_bytes / 1e6:,.1f} MB")
         for name, split in manifest.splits.items()),
        head=("split", "rows", "shards", "images"),
    )  # fmt: skip
    name = f"<b>{text(dataset.pin.uri)}@{manifest.version}</b>"
    return f"<div>{name}{table(_facts(dataset))}{splits}{thumbnails(dataset, show)}</div>"


def thumbnails(dataset: Dataset, show: Callable[[int], Image], num_samples: int = _THUMBNAILS) -> str:
    """Images from all over a split, or why there are none: to show a value must not fail."""
    if dataset.manifest.predicted_by is not None:
        return ""
    try:
        return picture(show(num_samples), f"{num_samples} images of the dataset")
    except (ShardmillError, OSError) as error:
        return f"<p>no images are shown: {text(error)}</p>"


def _facts(dataset: Dataset) -> Iterator[tuple[str, str]]:
    manifest, schema = dataset.manifest, dataset.manifest.row_schema
    counts = manifest.counts
    yield "version", f"{manifest.version} ({manifest.operation}), {manifest.created_at}"
    if manifest.predicted_by is None:
        shape = schema.one_shape_HWC
        size = "x".join(map(str, shape)) if shape is not None else "several sizes"
        yield "images", f"{size} {manifest.normalize.encoding} in {', '.join(manifest.formats)}"
    else:
        yield "model", str(manifest.predicted_by)
    if manifest.class_names:
        yield "classes", f"{len(manifest.class_names):,}: {first_of(manifest.class_names, _NAMES)}"
    if schema.extra:
        yield "columns", first_of([column.name for column in schema.extra], _NAMES)
    num_rejected = rejected(counts.rejected, counts.by_reason)
    yield "inputs", f"{counts.listed:,} listed, {counts.accepted:,} accepted, {num_rejected}"
    yield "content digest", manifest.content_digest[:12]
