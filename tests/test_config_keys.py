"""The list of config keys is frozen: people script against keys, so a new, renamed or removed one is a decision.

`python -m tests.test_config_keys --update` rewrites the list.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pipeline.choices import config_keys
from pipeline.tree import PipelineTree

FROZEN = Path(__file__).resolve().parent / "config_keys.txt"


def keys_now() -> list[str]:
    return sorted(key for key, _ in config_keys(PipelineTree))


def test_no_config_key_appears_or_vanishes_by_chance():
    frozen, now = FROZEN.read_text(encoding="utf-8").splitlines(), keys_now()
    added, removed = sorted(set(now) - set(frozen)), sorted(set(frozen) - set(now))
    assert now == frozen, (
        f"config keys added: {added}, removed: {removed}. A new key is a decision: would a better default do "
        "without it? A key that is removed must be refused with its new name. If it stays so, run "
        "`python -m tests.test_config_keys --update` in the same commit"
    )


if __name__ == "__main__":
    text = "".join(f"{key}\n" for key in keys_now())
    if "--update" in sys.argv:
        FROZEN.write_text(text, encoding="utf-8")
    sys.stdout.write(text)
