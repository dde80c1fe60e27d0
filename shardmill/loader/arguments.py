"""Checks the keyword arguments of a loader by themselves, before anything is looked up for them."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from shardmill.errors import UsageError
from shardmill.loader.whole_number import whole_number
from shardmill.registry import install_hint

_LEAST = {"global_batch_size": 1, "num_threads": 1, "num_streams": 1, "world_size": 1, "cache_limit_bytes": 1}
_WHOLE = ("global_batch_size", "num_threads", "seed", "num_streams", "rank", "world_size", "cache_limit_bytes")


def require_framework(loader: str, framework: str, package: str) -> None:
    """Raises UsageError if `package` cannot be imported: before the first batch, which a thread reads."""
    try:
        importlib.import_module(package)
    except ImportError as error:
        raise UsageError(f"{loader} needs {framework}: {error}", "not installed here", install_hint(package)) from None


def _check_known(given: Collection[str], known: Collection[str]) -> None:
    """Raises UsageError, with the nearest name, for an argument that no loader has."""
    if unknown := sorted(set(given).difference(known)):
        if unknown == ["epoch"]:
            raise UsageError("a loader with epoch", "expected it of `batches` alone", "call loader.seek(epoch)")
        near = [each for name in unknown for each in difflib.get_close_matches(name, known, n=1)]
        raise UsageError(
            f"a loader with {', '.join(unknown)}",
            f"expected some of {', '.join(known)}",
            f"did you mean {' and '.join(near)}?" if near else "correct the name of the argument",
        )


def checked(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Raises UsageError for an argument that no loader has, for what is no whole number, for a batch or threads below
    1, and for a choice but True and False."""
    _check_known(given, known)
    if given.get("global_batch_size") is None:
        raise UsageError(
            "a loader without global_batch_size", "expected the rows of a step, over all ranks", "pass, for example, 64"
        )
    whole = dict(given)
    for name in _WHOLE:
        if whole.get(name) is not None:
            whole[name] = whole_number(name, whole[name], least=_LEAST.get(name))
    for name in ("shuffle", "per_sample"):
        # "no" would count as True.
        if not isinstance(whole.get(name, True), bool | np.bool_):
            raise UsageError(f"{name} = {whole[name]!r}", "expected True or False", f"leave {name} out, for example")
    return whole
