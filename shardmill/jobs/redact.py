"""Redacts secrets in everything that a run writes: by the name of a value, or by its form.

Everything that a run leaves for people (its config, events, records, lines of error) passes through here on its way
out; the stages themselves work with what they were given.
"""

from __future__ import annotations

import re
import sys
from typing import Any

HIDDEN = "(hidden)"

# Python and Java read this alike: Spark redacts its own logs, pages and event log by it, too. A short word counts only
# as a word (`sas`, not `passage`); `key` only with something before it (`account.key`, not `key` or `key_sum`).
SECRET_NAME = (
    r"(?i:passw(?:or)?d|passphrase|secret|credential|private[._-]?key|(?:api|access|account)[._-]?key"
    r"|tokens?(?![a-z])|(?<![a-z])(?:auth|sas|dsn|pwd|pass|pat|private)(?![a-z])"
    r"|(?<=[a-z0-9][._-])key(?![a-z_-]))"
    r"|(?<=[a-z0-9])(?:Auth|Sas|Dsn|Pwd|Key)(?![A-Za-z])"
)

# GitHub, Hugging Face, and JSON web tokens.
_TOKEN = r"\b(?:gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|hf_[A-Za-z0-9]{16,}|eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)"
# `user:password` of a URL, up to the last @ before the path. A password may hold a `/`; a port is no password.
_USERINFO = r"[^\s/?#@\"':]*:(?:[^\s/\"']*|(?!\d+/)[^\s\"']{0,256})@"

# Spark looks for one pattern in names and values alike.
SPARK_REDACTION = (
    rf"{SECRET_NAME}|://{_USERINFO}|https?://[^\s/@]+@|jdbc:oracle:\w+:[^\s/@]+/|[?&]sig=|{_TOKEN}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}|\b(?:Bearer|Basic) "
)

_NAME = re.compile(SECRET_NAME)
_PEM = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)
_AWS_KEY_ID = r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
_AWS_SECRET = r"(?<![A-Za-z0-9/+])[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+])"
_WHOLE = (
    _PEM,
    re.compile(_TOKEN),
    re.compile(
        rf"{_AWS_KEY_ID}(?:[^A-Za-z0-9/+]{{1,40}}{_AWS_SECRET})?|{_AWS_SECRET}[^A-Za-z0-9/+]{{1,40}}{_AWS_KEY_ID}"
    ),
)
# scheme://user:password@host, https://token@host, jdbc:oracle:thin:user/password@host, and what follows `Bearer`.
_AFTER = (
    (re.compile(rf"(?<![\w+.-])([A-Za-z][\w+.-]*://){_USERINFO}"), rf"\1{HIDDEN}@"),
    (re.compile(r"(?<![\w+.-])(https?://)[^\s/?#\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(jdbc:oracle:\w+:)[^\s/@\"']+/[^\s@\"']+@"), rf"\1{HIDDEN}@"),
    (re.compile(r"\b(Bearer|Basic) [\w.~+/=-]{8,}"), rf"\1 {HIDDEN}"),
)
# `name = value`, `name=value;` and `"name": "value"`, as config files, connection strings, URLs and JSON have them.
_QUOTED = r"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'"
# What is hidden already stays as it is, with what stands around it.
_HIDDEN = rf"{re.escape(HIDDEN)}(?=[\s;,&\"'}}\]]|\Z)"
_NESTED = r"\{(?:[^{}]|\{[^{}]*\})*\}|\[[^\[\]]*\]"
# A separator belongs to the value unless another assignment follows it, or nothing does.
_PLAIN = r"(?:[^\s;,&\"']|[;,&](?![A-Za-z][\w.-]*\s*=|[\s;,&\"']|\Z))+"
# `-` may stand before a name: --token=..., -Dspark.password=...
_ASSIGNMENT = re.compile(
    rf"(?<![\w.])([A-Za-z][\w.-]*)([\"']?\s*=\s*|[\"']\s*:\s*)({_QUOTED}|{_HIDDEN}|{_NESTED}|{_PLAIN})", re.DOTALL
)
# `name: value` and `--name value`, for secrets only: prose has colons too, and so have a path's error and `FooError: `.
_LOOSE = (
    re.compile(
        rf"(?<![\w./-])([A-Za-z][\w.-]*(?<!Error)(?<!Exception))([ \t]*:[ \t]*)(?!//)"
        rf"({_QUOTED}|{_HIDDEN}|{_NESTED}|{_PLAIN})"
    ),
    re.compile(rf"(?<![\w-])(--[A-Za-z][\w.-]*)([ \t]+)({_QUOTED}|(?!-){_PLAIN})"),
    # ["--name", "value"]
    re.compile(rf"(?<![\w-])(--[A-Za-z][\w.-]*)([\"']\s*,\s*)({_QUOTED})"),
)
_SIGNATURES = frozenset({"sig", "x-amz-signature"})
# `num_tokens = 3` and `token_timeout_seconds = 5` are counts.
_COUNT = re.compile(r"(?i:^(?:num|max|min)_|_(?:count|seconds|bytes)$)")
_MAX_NESTING = 20
_NO_SECRETS = frozenset({"true", "false", "null", "none"})


def is_secret_name(name: str) -> bool:
    """Whether what goes under this name is a secret."""
    return _NAME.search(name) is not None


def redacted(value: Any, name: str = "") -> Any:
    """A JSON-like value without secrets: text under a secret's name is hidden, all other text goes by its look."""
    match value:
        case str():
            return HIDDEN if value and is_secret_name(name) else redacted_text(value)
        case dict():
            return {key: redacted(item, str(key) if not is_secret_name(name) else name) for key, item in value.items()}
        case list() | tuple():
            # After `--password`, an argument by itself is the option's value.
            names = [name, *(item if _is_option(item) else name for item in value)]
            return type(value)(redacted(item, owner) for owner, item in zip(names, value, strict=False))
        case bool():
            return value
        case int() | float():
            return HIDDEN if is_secret_name(name) and _COUNT.search(name) is None else value
    return value


def _is_option(item: Any) -> bool:
    return isinstance(item, str) and item.startswith("--") and "=" not in item and is_secret_name(item)


def redacted_text(text: str) -> str:
    """Running text without the values that look like secrets, and those that are assigned to a secret's name."""
    for whole in _WHOLE:
        text = whole.sub(HIDDEN, text)
    for pattern, kept in _AFTER:
        text = pattern.sub(kept, text)
    for loose in _LOOSE:
        text = loose.sub(_without_value_if_secret, text)
    return _without_values(text, _MAX_NESTING)


def _without_values(text: str, levels_left: int) -> str:
    return _ASSIGNMENT.sub(lambda found: _without_value(found, levels_left), text)


def _without_value_if_secret(found: re.Match[str]) -> str:
    return _without_value(found, _MAX_NESTING) if is_secret_name(found[1]) else found[0]


def _without_value(found: re.Match[str], levels_left: int) -> str:
    name, equals, value = found.groups()
    quote = value[0] if value[0] in "\"'" else ""
    if is_secret_name(name) or name.lower() in _SIGNATURES:
        if value.lower() in _NO_SECRETS or (value.isdecimal() and _COUNT.search(name)):
            return found[0]
        return f"{name}{equals}{quote}{HIDDEN}{quote}"
    # A connection string is a value with assignments of its own. Nobody nests them this deep, except to break us.
    inner = value[1:-1] if quote else value
    inner = _without_values(inner, levels_left - 1) if levels_left else HIDDEN
    return f"{name}{equals}{quote}{inner}{quote}"


def warn_on_stderr(sentence: str) -> None:
    """Write a warning to stderr, for code that has no observer."""
    sys.stderr.write(f"WARNING: {redacted_text(sentence)}\n")
