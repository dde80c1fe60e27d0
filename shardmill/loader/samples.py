"""Single rows of a split in stored order, for reports, parity checks and looking at a dataset."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.chunks import ChunkFetcher
from shardmill.formats.encodings import decode_row
from shardmill.typed_columns import LABEL
from shardmill.values import Value

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset


@dataclass(frozen=True, slots=True)
class StoredSample:
    """One decoded row, for reports and parity checks."""

    image_HWC: np.ndarray
    label: int | None
    """The class number; labels of other kinds are in `extra`."""
    sample_id: int
    source: str
    extra: Mapping[str, Value] = field(default_factory=dict)


def read_samples(dataset: Dataset, split: str, limit: int) -> list[StoredSample]:
    """The first `limit` rows of a split in layout order, verified and decoded. Raises as iterating a reader does."""
    return list(itertools.islice(iterate_samples(dataset, split), limit))


def iterate_samples(dataset: Dataset, split: str) -> Iterator[StoredSample]:
    """Every row of a split in layout order, verified and decoded, one chunk in memory."""
    index, options = dataset.index(split), dataset.manifest.normalize
    fetcher = ChunkFetcher(dataset.store, index, dataset.manifest.row_schema)
    for chunk in range(len(index.chunks)):
        rows = fetcher.read_chunk(chunk)
        for place, image in enumerate(rows.images):
            label = rows.labels_N[place]
            is_class = dataset.manifest.row_schema.has_class
            extra = {name: values[place] for name, values in rows.extra.items()}
            yield StoredSample(
                decode_row(image, options),
                int(label) if is_class and label >= 0 else None,
                int(rows.sample_ids_N[place]),
                rows.sources[place],
                extra if is_class else {**extra, LABEL: label if isinstance(label, list) else label.tolist()},
            )
