"""`where` and `sample` of a loader -> how often it uses each row of a split."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from shardmill.errors import UsageError
from shardmill.loader.metadata import metadata_columns, read_metadata
from shardmill.loader.selection import Selection, select
from shardmill.loader.where import rows_where
from shardmill.typed_columns import LABEL
from shardmill.words import name_some

if TYPE_CHECKING:
    from pyarrow.compute import Expression

    from shardmill.dataset.dataset import Dataset

Sample = str | Mapping[str, float]
ONCE, BALANCED = "once", "balanced"
MAX_REPEATS = 10_000
NUMBERS = int | float | np.integer | np.floating
"""What an amount or a weight may be: one of NumPy, too, as those that are computed are."""


def select_rows(dataset: Dataset, split: str, where: str | Expression | None, sample: Sample) -> Selection | None:
    """None for every row once. Raises UsageError for what the dataset does not have, and if no row is left."""
    if where is None and sample == ONCE:
        return None
    return select(repeats_of(dataset, split, where, sample), dataset.index(split).chunk_rows)


def repeats_of(dataset: Dataset, split: str, where: str | Expression | None, sample: Sample) -> np.ndarray:
    """How often each row of the split is used. Raises as `select_rows` does."""
    if not isinstance(sample, str | Mapping):
        raise UsageError(f"sample = {sample!r}", f"expected {ONCE!r}, {BALANCED!r}, a dict of classes or a column")
    repeats_N = np.zeros(int(dataset.index(split).chunk_rows.sum()), np.int64)
    chosen = np.arange(len(repeats_N)) if where is None else rows_where(dataset, split, where)
    if len(chosen):
        repeats_N[chosen] = _repeats(dataset, split, chosen, sample)
    if not repeats_N.any():
        raise UsageError(
            f"where = {str(where)!r}, sample = {sample!r} leave none of the {len(repeats_N)} rows of split {split!r} "
            f"of {dataset.pin.uri}@{dataset.pin.version}",
            "expected at least one",
            "`dataset.metadata(split)` shows the values of the columns",
        )
    return repeats_N


def _repeats(dataset: Dataset, split: str, chosen: np.ndarray, sample: Sample) -> np.ndarray:
    if sample == ONCE:
        return np.ones(len(chosen), np.int64)
    if isinstance(sample, str) and sample != BALANCED:
        return _by_column(dataset, split, chosen, sample)
    names = dataset.manifest.class_names
    if not names or not dataset.manifest.row_schema.has_class:
        raise UsageError(
            f"sample = {sample!r} for a dataset without one class an image",
            "expected class names",
            "use a column of weights",
        )
    labels_N = read_metadata(dataset, split, [LABEL]).column(LABEL).to_numpy()[chosen]
    counts = np.bincount(labels_N, minlength=len(names))
    if isinstance(sample, str):
        return _shared(labels_N, np.where(counts, counts.max(), 0))
    weights = _weights(sample, names)
    totals = np.rint(counts * weights).astype(np.int64)
    if lost := [name for name, *of in zip(names, counts, weights, totals, strict=True) if all(of[:2]) and not of[2]]:
        warnings.warn(
            f"sample leaves no row of {name_some(lost)}: the weight times the number of rows is less than a half; a "
            "larger weight keeps some, and 0 says that none is meant",
            stacklevel=2,
        )
    return _shared(labels_N, totals)


def _weights(sample: Mapping[str, float], names: tuple[str, ...]) -> np.ndarray:
    """Of each class; 1 for those that are not named."""
    for name, weight in sample.items():
        if name not in names:
            near = difflib.get_close_matches(str(name), names, n=1)
            raise UsageError(
                f"sample names the class {name!r}",
                f"expected some of {', '.join(names[:6])}" + (f"; did you mean {near[0]!r}?" if near else ""),
            )
        if not isinstance(weight, NUMBERS) or not 0 <= weight <= MAX_REPEATS:
            raise UsageError(f"sample = {{{name!r}: {weight}}}", f"expected a weight from 0 to {MAX_REPEATS}")
    return np.array([sample.get(name, 1) for name in names], np.float64)


def _shared(labels_N: np.ndarray, totals: np.ndarray) -> np.ndarray:
    """Repeats of each row that add up to exactly `totals[c]` over the rows of class c, and differ by at most one."""
    repeats_N = np.zeros(len(labels_N), np.int64)
    for label, total in enumerate(totals.tolist()):
        rows = np.flatnonzero(labels_N == label)
        if len(rows):
            repeats_N[rows] = np.diff(np.arange(len(rows) + 1) * total // len(rows))
    return repeats_N


def _by_column(dataset: Dataset, split: str, chosen: np.ndarray, name: str) -> np.ndarray:
    """Weights of rows as repeats: their sums from the first row on are those of the weights, rounded down."""
    known = metadata_columns(dataset.manifest.row_schema)
    if name not in known:
        near = difflib.get_close_matches(name, (ONCE, BALANCED, *known), n=1)
        raise UsageError(
            f"sample = {name!r}",
            f"expected {ONCE!r}, {BALANCED!r}, a dict of classes, or a metadata column of numbers among "
            f"{', '.join(known)}" + (f"; did you mean {near[0]!r}?" if near else ""),
        )
    column = read_metadata(dataset, split, [name]).column(name)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise UsageError(f"sample = {name!r}, a column of {column.type}", f"expected numbers, {ONCE!r} or {BALANCED!r}")
    weights_N = column.to_numpy()[chosen].astype(np.float64)
    # NaN, which stands for null, is in no range.
    num_wrong = int((~((weights_N >= 0) & (weights_N <= MAX_REPEATS))).sum())
    if num_wrong:
        raise UsageError(
            f"sample = {name!r}: {num_wrong} rows have a weight that is null, negative or above {MAX_REPEATS}",
            "expected a number for each row",
            f"leave them out: where = {name + ' >= 0'!r}",
        )
    # What binary fractions lose must not lose a row.
    sums = np.floor(np.concatenate([[0], np.cumsum(weights_N)]) + 1e-6).astype(np.int64)
    return np.diff(sums)
