"""Patterns of file names: `*`, `?`, `[ab]`, ranges of numbers `{000..146}` and lists `{train,test}`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import fnmatchcase

_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
# The innermost ones, so that lists may be nested.
_LIST = re.compile(r"\{([^{}/]*,[^{}/]*)\}")
_WILDCARDS = "*?["


def is_pattern(text: str) -> bool:
    """Whether a URI or a part of it stands for several files."""
    return names_any(text) or any(braces.search(text) for braces in (_RANGE, _LIST))


def names_any(text: str) -> bool:
    """Whether it takes whatever files there are; one that consists of braces alone names each of its files."""
    return any(character in text for character in _WILDCARDS)


def matches(path: str, pattern: str) -> bool:
    """Whether `path` fits a pattern of the same depth; `{000..146}` stands for numbers of that many digits."""
    parts = path.split("/")
    return any(_all_match(parts, each.split("/")) for each in _without_lists(pattern))


def expanded(pattern: str) -> Iterator[str]:
    """The paths that a pattern with no other signs than braces names."""
    for each in _without_lists(pattern):
        yield from _without_ranges(each)


def _without_lists(pattern: str) -> list[str]:
    """Each choice once, though a list within another one gives the outer one's other choices several times."""
    return list(dict.fromkeys(_choices(pattern)))


def _choices(pattern: str) -> Iterator[str]:
    found = _LIST.search(pattern)
    if found is None:
        yield pattern
        return
    for choice in found[1].split(","):
        yield from _choices(pattern[: found.start()] + choice + pattern[found.end() :])


def _without_ranges(pattern: str) -> Iterator[str]:
    found = _RANGE.search(pattern)
    if found is None:
        yield pattern
        return
    for number in range(int(found[1]), int(found[2]) + 1):
        for rest in _without_ranges(pattern[found.end() :]):
            yield f"{pattern[: found.start()]}{number:0{len(found[1])}}{rest}"


def _all_match(parts: list[str], patterns: list[str]) -> bool:
    return len(parts) == len(patterns) and all(map(_part_matches, parts, patterns))


def _part_matches(part: str, pattern: str) -> bool:
    braces = _RANGE.search(pattern)
    if braces is None:
        return fnmatchcase(part, pattern)
    head, tail = pattern[: braces.start()], pattern[braces.end() :]
    low, high = braces[1], braces[2]
    for found in re.finditer(rf"\d{{{len(low)},{len(high)}}}", part):
        is_inside = int(low) <= int(found[0]) <= int(high)
        if is_inside and fnmatchcase(part[: found.start()], head) and _part_matches(part[found.end() :], tail):
            return True
    return False
