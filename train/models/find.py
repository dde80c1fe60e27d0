"""Checks that `train.model` names a model, without importing TensorFlow or a user's module."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from typing import Any

from shardmill.errors import UsageError
from train.models import MODELS


def find_model(name: str) -> str:
    """The file that defines a user's own model; "built in" for ours, a library's name for its own.

    Raises UsageError if there is no such model.
    """
    if not MODELS.is_own(name):
        if problem := MODELS.problem_with(name):
            raise UsageError(f"train.model = {name!r}", problem)
        return name.partition(":")[0] if MODELS.is_of_library(name) else "built in"
    module_name, _, function = name.partition(":")
    spec = MODELS.find_own(name).spec
    origin = spec.origin
    if origin is None or not origin.endswith(".py"):
        # A compiled module, or a namespace: what it defines is known only after importing it.
        return origin or module_name
    try:
        # A module may lie in a zip archive.
        loader: Any = spec.loader
        tree = ast.parse(loader.get_data(origin))
    except SyntaxError as error:
        raise UsageError(f"train.model = {name!r}: {origin}:{error.lineno}: {error.msg}") from None
    bound = set(_bound_names(tree))
    if function not in bound and "*" not in bound and "__getattr__" not in bound:
        near = difflib.get_close_matches(function, bound, n=1)
        raise UsageError(
            f"train.model = {name!r}: {origin} has no function {function!r}",
            "expected package.module:function",
            f"did you mean {module_name}:{near[0]}?" if near else "",
        )
    return origin


def _bound_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
