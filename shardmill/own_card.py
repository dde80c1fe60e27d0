"""A README.md that shardmill writes beside what it stores, until a person takes it over by removing our line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from shardmill.printable import without_surrogates
from shardmill.storage import Store

CARD = "README.md"


def put_card(store: Store, mark: str, number: int, text: Callable[[], str]) -> bool:
    """Replace the card unless it is that of `number` or of a later one; False if it is a person's own.

    `mark`: how the line begins that says who wrote it; `number` ends that line.
    """
    try:
        present = store.read(CARD).decode(errors="replace")
    except FileNotFoundError:
        present = mark
    if mark not in present:
        return False
    written = re.search(f"{re.escape(mark)}([0-9]{{1,18}})\n", present)
    # A writer that is late must not put back what another one has replaced.
    if written is None or int(written[1]) < number:
        store.put(CARD, text().encode())
    return True


def quoted(text: str) -> str:
    """A double-quoted YAML string. YAML takes JSON's escapes, but no pairs of surrogates and no raw control
    characters.
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(each if each.isprintable() else f"\\U{ord(each):08x}" for each in without_surrogates(quoted))
