"""A README.md that shardmill writes beside what it stores, until a person takes it over by removing our line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial

from shardmill.printable import without_surrogates
from shardmill.storage import Store

CARD = "README.md"
_MAX_RACES = 8


def keep_card(store: Store, mark: str, latest: Callable[[], int], text_of: Callable[[int], str]) -> bool:
    """Replace the card unless it is that of the latest number; False if it is a person's own.

    Another writer may make a later number meanwhile, and may have written its card before ours: the last one to write
    looks again.
    """
    for _ in range(_MAX_RACES):
        number = latest()
        if not put_card(store, mark, number, partial(text_of, number)):
            return False
        if number == latest():
            break
    return True


def put_card(store: Store, mark: str, number: int, text: Callable[[], str]) -> bool:
    """Write the card of `number` unless there is that of a later one; False if it is a person's own.

    `mark`: how the line begins that says who wrote it; `number` ends that line.
    """
    try:
        present = store.read(CARD).decode(errors="replace")
    except FileNotFoundError:
        present = mark
    if mark not in present:
        return False
    written = re.search(f"{re.escape(mark)}([0-9]{{1,18}})\n", present)
    if written is None or int(written[1]) < number:
        store.put(CARD, text().encode())
    return True


def quoted(text: str) -> str:
    """A double-quoted YAML string. YAML takes JSON's escapes, but no pairs of surrogates and no raw control
    characters.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in without_surrogates(quoted))
