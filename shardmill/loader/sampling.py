"""`where` and `sample` of a loader -> how often it uses each row of a split.

`where` is a condition on metadata columns, as a text in Python's syntax or as an expression of pyarrow.
"""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import difflib
import operator
import warnings
from collections.abc import Callable, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.errors import UsageError
from shardmill.loader.metadata import metadata_columns, read_metadata
from shardmill.loader.selection import Selection, select
from shardmill.typed_columns import LABEL
from shardmill.words import name_some

if TYPE_CHECKING:
    from pyarrow.compute import Expression

    from shardmill.dataset.dataset import Dataset


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
