"""`where`, `sample` and `mix` of a loader: how often each row of a split, or of those of several datasets, is used in
an epoch, as entries of an epoch plan; integers in, integers out.

An entry is one use of a row. The entries of a chunk take the place of its rows in the plan, so that every property of
plans holds for them: each entry exactly once an epoch, at any world size, resumed at any step. `where` is a condition
on metadata columns, as a text in Python's syntax or as an expression of pyarrow. With `mix` the chunks of all datasets
get one number each, those of the loader's own dataset first, so that one plan and one state hold for all.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.dataset.chunks import ChunkFetcher
from shardmill.dataset.dataset import Dataset
from shardmill.epoch_plan import StepRows
from shardmill.errors import UsageError
from shardmill.loader.metadata import metadata_columns, read_metadata
from shardmill.typed_columns import LABEL, ExtraColumn
from shardmill.words import name_some

if TYPE_CHECKING:
    from pyarrow.compute import Expression

    from shardmill.dataset.chunk_cache import ChunkCache
    from shardmill.formats.rows import ChunkRows, RowSchema
    from shardmill.memory import RecycledMemory


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The entries of a split, in stored order. The plan numbers the chunks that have any."""

    chunks: np.ndarray
    """The split's number of each of these chunks; the same one several times if `select_apart` has made it."""
    starts: np.ndarray
    """The first entry of each of them, and the number of entries at the end."""
    entry_rows: np.ndarray
    """The row of each entry within its chunk."""
    entry_occurrences: np.ndarray
    """0 for the first use of a row, 1 for the second."""
    num_distinct: int
    digest: str

    @property
    def num_rows(self) -> int:
        """Rows that an epoch has, a repeated one as often as it is used."""
        return int(self.starts[-1])

    @property
    def chunk_rows(self) -> np.ndarray:
        """What the plan takes as the rows of each chunk."""
        return np.diff(self.starts)

    def rows_of(self, planned: StepRows) -> StepRows:
        """The rows of the split that a step of the plan means."""
        entries_N = self.starts[planned.chunks_N] + planned.rows_N
        return StepRows(self.chunks[planned.chunks_N], self.entry_rows[entries_N], planned.weights_N)

    def occurrences_of(self, planned: StepRows) -> np.ndarray:
        """Which use of its row each row of a step is."""
        return self.entry_occurrences[self.starts[planned.chunks_N] + planned.rows_N]

    def chunks_of(self, planned: set[int]) -> set[int]:
        """The split's numbers of chunks of the plan."""
        return {int(self.chunks[chunk]) for chunk in planned}


def select(repeats_N: np.ndarray, chunk_rows: np.ndarray) -> Selection | None:
    """The selection that uses row n of the split `repeats_N[n]` times; None if that is once each."""
    if (repeats_N == 1).all():
        return None
    stops = np.cumsum(chunk_rows)
    before = np.concatenate([[0], np.cumsum(repeats_N, dtype=np.int64)])
    entries_of_chunk = before[stops] - before[stops - chunk_rows]
    chunks = np.flatnonzero(entries_of_chunk)
    rows = np.repeat(np.arange(len(repeats_N)), repeats_N)
    chunk_starts = np.repeat(stops - chunk_rows, entries_of_chunk)
    return Selection(
        chunks=chunks,
        starts=np.concatenate([[0], np.cumsum(entries_of_chunk[chunks], dtype=np.int64)]),
        entry_rows=(rows - chunk_starts).astype(np.int32),
        entry_occurrences=(np.arange(len(rows)) - before[rows]).astype(np.int32),
        num_distinct=int((repeats_N > 0).sum()),
        digest=_digest(repeats_N),
    )


def select_apart(repeats_N: np.ndarray, chunk_rows: np.ndarray) -> Selection:
    """As `select`, but a chunk has one place in the plan for each use of its rows, so that the uses of a row are spread
    over the epoch as different chunks are.
    """
    rows = np.repeat(np.arange(len(repeats_N)), repeats_N)
    before = np.concatenate([[0], np.cumsum(repeats_N, dtype=np.int64)])
    occurrences = np.arange(len(rows)) - before[rows]
    # First uses in stored order, then second ones.
    order = np.argsort(occurrences, kind="stable")
    rows, occurrences = rows[order], occurrences[order]
    chunk_of_entry = np.repeat(np.arange(len(chunk_rows)), chunk_rows)[rows]
    begins = np.flatnonzero((np.diff(chunk_of_entry, prepend=-1) != 0) | (np.diff(occurrences, prepend=-1) != 0))
    return Selection(
        chunks=chunk_of_entry[begins],
        starts=np.append(begins, len(rows)),
        entry_rows=(rows - (np.cumsum(chunk_rows) - chunk_rows)[chunk_of_entry]).astype(np.int32),
        entry_occurrences=occurrences.astype(np.int32),
        num_distinct=int((repeats_N > 0).sum()),
        digest=_digest(repeats_N),
    )


def _digest(repeats_N: np.ndarray) -> str:
    return hashlib.sha256(repeats_N.astype("<i4").tobytes()).hexdigest()


_ROW = "__row_number__"


def _divide(one: Any, other: Any) -> Any:
    """As Python divides: Arrow's quotient of two integers is rounded."""
    return (one.cast(pa.float64(), safe=False) if isinstance(one, pc.Expression) else one) / other


_COMPARE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_COMPUTE: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: _divide,
}  # fmt: skip


def rows_where(dataset: Dataset, split: str, where: str | pc.Expression) -> np.ndarray:
    """Numbers of the rows for which the condition is true; neither false nor null. Raises UsageError."""
    names: set[str] | None = None
    condition = where
    if isinstance(where, str):
        names = set()
        condition = _parse(where, names)
    if not isinstance(condition, pc.Expression) or names == set():
        raise _refusal(where, "it is no condition on columns")
    table = read_metadata(dataset, split, names)
    numbered = table.append_column(_ROW, pa.array(np.arange(table.num_rows)))
    try:
        return numbered.filter(condition).column(_ROW).to_numpy()
    except (pa.ArrowException, TypeError) as error:
        types = ", ".join(f"{field.name}: {field.type}" for field in table.schema)
        raise _refusal(where, f"{str(error).splitlines()[0]} ({types})") from None


def _parse(text: str, names: set[str]) -> Any:
    """The expression that a text means; the columns that it names are added to `names`."""
    try:
        return _expression(ast.parse(text.strip(), mode="eval").body, names)
    except SyntaxError as error:
        # Not its text, which names a file and a line.
        raise _refusal(text, error.msg) from None
    except (ValueError, TypeError, ArithmeticError, pa.ArrowException) as error:
        raise _refusal(text, str(error).splitlines()[0]) from None


def _refusal(where: object, why: str) -> UsageError:
    return UsageError(
        f"where = {str(where)!r}: {why}",
        "expected a condition on metadata columns in Python's syntax (==, !=, in, and, or, not)",
        'write, for example, "label in (1, 2) and caption is not None", or pass a pyarrow expression',
    )


def _expression(node: ast.expr, names: set[str]) -> Any:
    match node:
        case ast.BoolOp(op, values):
            parts = [_expression(value, names) for value in values]
            return reduce(operator.and_ if isinstance(op, ast.And) else operator.or_, parts)
        case ast.UnaryOp(ast.Not(), operand):
            return ~_expression(operand, names)
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as value)):
            return -value
        case ast.BinOp(left, op, right) if type(op) in _COMPUTE:
            one, other = _expression(left, names), _expression(right, names)
            # Arrow's expressions compute only from the left.
            is_first = isinstance(other, pc.Expression) and not isinstance(one, pc.Expression)
            return _COMPUTE[type(op)](pc.scalar(one) if is_first else one, other)
        case ast.Compare(left, ops, others):
            sides = [left, *others]
            pairs = zip(sides, ops, sides[1:], strict=False)
            return reduce(operator.and_, [_comparison(one, op, other, names) for one, op, other in pairs])
        case ast.Constant(str() | int() | float() | bool() as value):
            return value
        case ast.List(items) | ast.Tuple(items):
            return [_expression(item, names) for item in items]
        case ast.Name() | ast.Attribute():
            # A column's name may have dots.
            name = ast.unparse(node)
            names.add(name)
            return pc.field(name)
    raise ValueError(f"{ast.unparse(node)} is not understood")


def _comparison(left: ast.expr, op: ast.cmpop, right: ast.expr, names: set[str]) -> Any:
    one = _expression(left, names)
    if isinstance(op, ast.Is | ast.IsNot | ast.In | ast.NotIn) and not isinstance(one, pc.Expression):
        raise ValueError(f"{ast.unparse(left)} is no column")
    is_null = isinstance(right, ast.Constant) and right.value is None
    if is_null and isinstance(op, ast.Eq | ast.NotEq):
        raise ValueError(f"write `{ast.unparse(left)} is {'None' if isinstance(op, ast.Eq) else 'not None'}`")
    if isinstance(op, ast.Is | ast.IsNot):
        if not is_null:
            raise ValueError("`is` is for None alone")
        return one.is_null() if isinstance(op, ast.Is) else one.is_valid()
    other = _expression(right, names)
    if isinstance(op, ast.In | ast.NotIn):
        if not isinstance(other, list):
            raise ValueError(f"{ast.unparse(right)} is no list of values")
        # Comparisons with one value of each type: null for null and refused for another type, as `==` is.
        found = reduce(
            operator.or_, (one == each for each in {type(each): each for each in other}.values()), one.isin(other)
        )
        return found if isinstance(op, ast.In) else ~found
    return _COMPARE[type(op)](one, other)


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


Amount = float | tuple[str, float]
"""A share of an epoch's rows, `("repeat", times)` or `("choose", rows)`."""
Mix = Sequence[tuple[Dataset, Amount]]

DATASET = "dataset"
"""The extra column of a mix: 0 for a row of the loader's own dataset, 1 for one of the first of `mix`."""


@dataclass(frozen=True, slots=True)
class DatasetRows:
    """What one dataset of a mix gives to an epoch of all ranks."""

    dataset: str
    """`URI@N`."""
    rows: int
    rows_repeated: int
    """Of `rows`: uses of a row after its first one."""
    rows_left_out: int
    """Rows of its split that an epoch does not use."""


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
