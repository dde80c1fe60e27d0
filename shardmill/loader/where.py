"""`where`: a condition on metadata columns, as a text in Python's syntax or as an expression of pyarrow."""

# pyarrow.compute makes its functions when it is imported.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardmill.errors import UsageError
from shardmill.loader.metadata import read_metadata

if TYPE_CHECKING:
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
