"""Settings as Python values, turned into the `--set` options of a command."""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from shardmill.errors import UsageError

_BARE = re.compile(r"[A-Za-z0-9_-]+")
# Of `shardmill.run` and its neighbours, which take what they do not know as settings.
_ARGUMENTS = (
    "workdir", "run_id", "replace_source", "fresh", "allow_change", "quiet", "rollback", "require_promotion",
    "replace_current", "out", "top", "layer", "engine", "against", "max_drift", "keep", "older_than", "delete",
    "max_bytes", "world_size", "rehearse",
)  # fmt: skip


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """`train={"epochs": 3}` and `**{"train.epochs": 3}` are both `--set train.epochs=3`.

    Raises UsageError for a setting without a section, and for a value that TOML has no form for.
    """
    for name, value in settings.items():
        if "." not in name and not isinstance(value, Mapping):
            near = difflib.get_close_matches(name, _ARGUMENTS, n=1, cutoff=0.75)
            raise UsageError(
                f"{name} = {value!r} names no section of the config",
                "expected a section with its keys, such as train={'epochs': 3}",
                f"did you mean {near[0]}={value!r}?"
                if near
                else f"write SECTION={{{name!r}: {value!r}}}; `shardmill config show` prints every key",
            )
    return [
        option for name, value in settings.items() for key, leaf in _leaves(name, value)
        for option in ("--set", f"{key}={_toml(key, leaf)}")
    ]  # fmt: skip


def _leaves(key: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The keys of a section one by one: those that are not named keep the values that they have."""
    # A name that is no bare key, of a class say, can stand in a table of values only.
    if isinstance(value, Mapping) and value and all(_BARE.fullmatch(str(name)) for name in value):
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key, value


def _quoted(text: str) -> str:
    # Of what JSON leaves as it is, TOML forbids one character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _toml(key: str, value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case str() | os.PathLike():
            return _quoted(os.fspath(value))
        case int() | float():
            # Also a NumPy float, whose `repr` names its type.
            return repr(float(value)) if isinstance(value, float) else str(int(value))
        case Mapping():
            rows = (f"{_quoted(str(name))} = {_toml(key, each)}" for name, each in value.items())
            return f"{{{', '.join(rows)}}}"
        case list() | tuple():
            return f"[{', '.join(_toml(key, each) for each in value)}]"
    if hasattr(value, "tolist"):
        return _toml(key, value.tolist())
    raise UsageError(
        f"{key} = {value!r}",
        "expected a number, a text, True or False, or a list or a dict of these",
        "leave a setting out for its default",
    )
