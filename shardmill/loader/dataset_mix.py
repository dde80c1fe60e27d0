"""`mix` of a loader: the rows of several datasets as one selection, so that one plan and one state hold for all.

The chunks of all datasets get one number each, those of the loader's own dataset first.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset
from shardmill.errors import UsageError
from shardmill.loader.report import DatasetRows
from shardmill.loader.sampling import MAX_REPEATS, NUMBERS, repeats_of
from shardmill.loader.selection import Selection, select_apart
from shardmill.typed_columns import ExtraColumn

if TYPE_CHECKING:
    from pyarrow.compute import Expression

    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.formats.rows import ChunkRows, RowSchema
    from shardmill.loader.sampling import Sample
    from shardmill.recycled_memory import RecycledMemory

Amount = float | tuple[str, float]
"""A share of an epoch's rows, `("repeat", times)` or `("choose", rows)`."""
Mix = Sequence[tuple[Dataset, Amount]]

DATASET = "dataset"
"""The extra column of a mix: 0 for a row of the loader's own dataset, 1 for one of the first of `mix`."""


@dataclass(frozen=True, slots=True, eq=False)
class DatasetMix:
    """Several datasets as one reader reads them."""

    split: str
    datasets: tuple[Dataset, ...]
    selection: Selection
    rows: tuple[DatasetRows, ...]
    """What each of them gives to an epoch."""

    def with_dataset_column(self, schema: RowSchema) -> RowSchema:
        """The schema of the mix's rows, given the wanted columns of the loader's own dataset."""
        return replace(schema, extra=(*schema.extra, ExtraColumn(DATASET, "int64")))

    def fetcher(
        self, schema: RowSchema, format: str, caches: Sequence[ChunkCache | None], memory: RecycledMemory
    ) -> MixFetcher:
        """Reads any of the chunks; `schema` is that of the mix."""
        names = [column.name for column in schema.extra]
        fetchers: list[ChunkFetcher] = []
        for dataset, cache in zip(self.datasets, caches, strict=True):
            own = dataset.manifest.row_schema
            known = replace(own, extra=tuple(column for column in own.extra if column.name in names))
            fetchers.append(ChunkFetcher(dataset.store, dataset.index(self.split, format), known, cache, memory))
        return MixFetcher(fetchers, names)


class MixFetcher:
    """The `ChunkFetcher`s of several datasets as one. Safe to use from several threads."""

    def __init__(self, fetchers: Sequence[ChunkFetcher], columns: Sequence[str]) -> None:
        self._fetchers = fetchers
        self._columns = columns
        self.rows_of_chunk = np.concatenate([fetcher.index.chunk_rows for fetcher in fetchers])
        self._firsts = np.cumsum([0, *(fetcher.index.num_chunks for fetcher in fetchers)])

    def read_chunk(self, chunk: int) -> ChunkRows:
        """The rows of chunk number `chunk`, with None in the columns that their dataset lacks."""
        number = int(np.searchsorted(self._firsts, chunk, side="right")) - 1
        rows = self._fetchers[number].read_chunk(chunk - int(self._firsts[number]))
        nulls = dict.fromkeys(self._columns, [None] * len(rows.images))
        return replace(rows, extra={**nulls, **rows.extra, DATASET: [number] * len(rows.images)})


def mix_datasets(
    own: Dataset, split: str, mix: Mix, *, where: str | Expression | None, sample: Sample, columns: Sequence[str] | None
) -> DatasetMix:
    """`where` and `sample` choose the rows of each dataset; `mix` then says how often those of the others are used.

    Raises UsageError for datasets whose rows do not fit into one batch, and for an amount that cannot be.
    """
    _check_pairs(mix)
    _check_columns(own, columns)
    for other, _ in mix:
        _check_alike(own, other)
    datasets = (own, *(other for other, _ in mix))
    repeats = [repeats_of(dataset, split, where, sample) for dataset in datasets]
    totals = _totals([int(each.sum()) for each in repeats], mix)
    repeats = [_scaled(each, total) for each, total in zip(repeats, totals, strict=True)]
    rows = [
        DatasetRows(
            dataset=_name(dataset),
            rows=total,
            rows_repeated=total - int((each > 0).sum()),
            rows_left_out=int((each == 0).sum()),
        )
        for dataset, each, total in zip(datasets, repeats, totals, strict=True)
    ]
    chunk_rows = np.concatenate([dataset.index(split).chunk_rows for dataset in datasets])
    selection = select_apart(np.concatenate(repeats), chunk_rows)
    # Whose rows the digest of their numbers means.
    parts = [[dataset.manifest.layout_digest, len(each)] for dataset, each in zip(datasets, repeats, strict=True)]
    digest = hashlib.sha256(json.dumps([parts, selection.digest]).encode()).hexdigest()
    return DatasetMix(split, datasets, replace(selection, digest=digest), tuple(rows))


def _totals(selected: list[int], mix: Mix) -> list[int]:
    """Rows of an epoch of each dataset, given how many each has: the loader's own has all of its rows."""
    totals = [selected[0], *([0] * len(mix))]
    shares = {number: amount for number, (_, amount) in enumerate(mix, 1) if not isinstance(amount, tuple)}
    for number, (_, amount) in enumerate(mix, 1):
        if isinstance(amount, tuple):
            kind, value = amount
            totals[number] = round(value * selected[number]) if kind == "repeat" else int(value)
    fixed, rest = sum(totals), 1 - sum(shares.values())
    for number, share in shares.items():
        totals[number] = round(fixed * share / rest)
    for total, rows, (dataset, amount) in zip(totals[1:], selected[1:], mix, strict=True):
        if not 1 <= total <= rows * MAX_REPEATS:
            raise UsageError(
                f"mix: {amount!r} of {_name(dataset)} is {total} rows",
                f"expected 1 to {rows * MAX_REPEATS}, at most {MAX_REPEATS} times its {rows} rows",
                "change its amount",
            )
    return totals


def _scaled(repeats_N: np.ndarray, total: int) -> np.ndarray:
    """Repeats that add up to exactly `total`, in the proportions of those given."""
    sums = np.concatenate([[0], np.cumsum(repeats_N, dtype=np.int64)])
    # Whole numbers: 10^9 rows repeated as often fit into 64 bits.
    return np.diff(sums * total // sums[-1])


def _check_pairs(mix: Mix) -> None:
    wanted = 'expected [(dataset, amount), ...], an amount being a share (0.3), ("repeat", times) or ("choose", rows)'
    if not isinstance(mix, Sequence) or isinstance(mix, str) or not mix:
        raise UsageError(f"mix = {mix!r}", wanted)
    shares = 0.0
    for pair in mix:
        if not isinstance(pair, Sequence) or len(pair) != 2 or not isinstance(pair[0], Dataset):
            raise UsageError(f"mix has {pair!r}", wanted, "open each dataset with shardmill.open_dataset")
        amount = pair[1]
        if not _is_amount(amount):
            raise UsageError(f"mix has {amount!r} of {_name(pair[0])}", wanted)
        shares += 0 if isinstance(amount, tuple) else amount
    if shares >= 1:
        raise UsageError(
            f"the shares of mix add up to {shares:.6g}",
            "expected less than 1, because the loader's own dataset has the rest of an epoch",
            "name only the other datasets in mix",
        )


def _is_amount(amount: object) -> bool:
    if isinstance(amount, tuple):
        kind, value = amount if len(amount) == 2 else (None, None)
        if kind == "repeat":
            return isinstance(value, NUMBERS) and bool(0 < value <= MAX_REPEATS)
        return kind == "choose" and isinstance(value, int | np.integer) and bool(value >= 1)
    return isinstance(amount, NUMBERS) and bool(amount > 0)


def _check_columns(own: Dataset, columns: Sequence[str] | None) -> None:
    names = [column.name for column in own.manifest.row_schema.extra]
    if DATASET in (names if columns is None else columns):
        raise UsageError(
            f"{_name(own)} has a column {DATASET!r}",
            "expected none of this name, because the batches of a mix name the dataset of each row in it",
            "leave it out of columns",
        )


def _check_alike(own: Dataset, other: Dataset) -> None:
    """What the rows of one batch share."""
    mine, its = own.manifest, other.manifest
    properties = {
        "images of shape": (mine.normalize.image_shape_HWC, its.normalize.image_shape_HWC),
        "images stored as": (mine.normalize.encoding, its.normalize.encoding),
        "labels of type": (mine.row_schema.label_type, its.row_schema.label_type),
    }
    types = {column.name: column.type for column in its.row_schema.extra}
    for column in mine.row_schema.extra:
        properties[f"a column {column.name} of"] = (column.type, types.get(column.name, column.type))
    for what, (expected, found) in properties.items():
        if expected != found:
            raise UsageError(
                f"mix: {_name(other)} has {what} {found}",
                f"expected {expected}, as in {_name(own)}",
                "build one of them again with the other's settings",
            )
    if mine.class_names != its.class_names:
        only = sorted({*mine.class_names} ^ {*its.class_names})
        raise UsageError(
            f"mix: {_name(other)} has {len(its.class_names)} classes, not those of {_name(own)}",
            f"expected the same names in the same order; only one of them has {', '.join(only[:6])}"
            if only
            else "expected the same order of the names",
            "build one of them again with the same classes",
        )


def _name(dataset: Dataset) -> str:
    return f"{dataset.pin.uri}@{dataset.pin.version}"
