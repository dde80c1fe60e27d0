"""What `shardmill.predict` committed, as a value: the version, its rows as a table, and its embeddings.

Shape legend: N rows of all splits, D numbers of an embedding.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardmill.errors import ShardmillError, UsageError
from shardmill.formats.rows import VECTOR
from shardmill.html import table, text
from shardmill.result import Result, Rows
from shardmill.words import printable

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import pyarrow as pa

    from shardmill.loader.dataset import LoadableDataset

_ROWS_SHOWN = 8


@dataclass(frozen=True, slots=True, repr=False)
class Predictions(Result):
    """A version of predictions. It shows itself as a table in a notebook, with its first rows."""

    run_id: str
    dataset: LoadableDataset
    """The version; it has no images, and no loaders."""
    num_predicted: int
    """Inputs that this run read: those that are new, or have changed; rejected ones are among them."""
    images_per_second: float
    is_new: bool
    """Whether this run made the version; False if nothing was new, and the latest one stays."""

    def to_arrow(self, columns: Collection[str] | None = None) -> pa.Table:
        """A row for each predicted image, of all splits; all columns but the embedding.

        Raises UsageError for a column that there is not.
        """
        import pyarrow as pa

        dataset = self.dataset
        if columns is not None and VECTOR in columns:
            raise UsageError(f"the column {VECTOR!r}", "expected others", "`embeddings()` gives it as one array")
        return pa.concat_tables([dataset.metadata(split, columns) for split in dataset.manifest.splits])

    def to_pandas(self, columns: Collection[str] | None = None) -> pd.DataFrame:
        """`to_arrow` as a DataFrame."""
        from shardmill.loader.metadata import require_pandas

        require_pandas("predictions.to_arrow")
        return self.to_arrow(columns).to_pandas()

    def embeddings(self) -> np.ndarray:
        """The outputs of the named layer, float32 of shape (N, D), in the order of `to_arrow`.

        Raises UsageError if no layer was named, IntegrityError for an altered shard.
        """
        import numpy as np

        from shardmill.dataset.chunks import read_embeddings

        manifest, size = self.dataset.manifest, self.dataset.manifest.row_schema.vector_size
        if not size:
            raise UsageError(f"{self!r} has no embeddings", "expected those of a layer", "predict with layer='NAME'")
        embeddings_ND, num_read = np.empty((manifest.counts.accepted, size), np.float32), 0
        for chunk in read_embeddings(self.dataset):
            stop = num_read + len(chunk.embeddings_ND)
            embeddings_ND[num_read:stop], num_read = chunk.embeddings_ND, stop
        return embeddings_ND

    def _first_rows(self, columns: Collection[str]) -> pa.Table:
        """Of the first shards: a version may have millions of rows."""
        from shardmill.loader.metadata import read_metadata

        return read_metadata(self.dataset, next(iter(self.dataset.manifest.splits)), columns, _ROWS_SHOWN)

    def shown_rows(self) -> Rows:
        counts, pin = self.dataset.manifest.counts, self.dataset.pin
        return [
            ("predictions", f"{pin.uri}@{pin.version}"),
            ("model", str(self.dataset.manifest.predicted_by)),
            ("images", f"{counts.accepted:,} predicted, {counts.rejected:,} rejected of {counts.listed:,} listed"),
            ("by this run", f"{self.num_predicted:,} read, {self.images_per_second:.1f} a second"),
        ]

    def __repr__(self) -> str:
        pin, manifest = self.dataset.pin, self.dataset.manifest
        made = f"{manifest.counts.accepted:,} images by {manifest.predicted_by}"
        return printable(f"<predictions {pin.uri}@{pin.version}: {made}>")

    def _repr_html_(self) -> str:
        try:
            made = self.dataset.manifest.predicted_by
            assert made is not None
            rows = self._first_rows(["source", *made.columns])
            first = table([[*row.values()] for row in rows.to_pylist()], rows.column_names)
        except (ShardmillError, OSError) as error:
            first = f"<p>no rows are shown: {text(error)}</p>"
        return f"<div>{table(self.shown_rows())}{first}</div>"
