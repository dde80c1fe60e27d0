"""Whatever a name holds, printing it moves no cursor, hides nothing and turns no line around."""

from __future__ import annotations

import pytest

from shardmill.printable import printable


@pytest.mark.parametrize("name", ["cat", "größe 3", "猫", "👩‍🔬", "می‌خواهم", "a\\b", ""])
def test_real_names_are_shown_as_they_are(name: str):
    assert printable(name) == name


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nb\t\r", r"a\nb\t\r"),
        ("\x9b31m", r"\x9b31m"),
        ("gpj.\u202eexe", r"gpj.\u202eexe"),
        ("cat\u200b", r"cat\u200b"),
        ("\u2028", r"\u2028"),
        ("caf\udce9", r"caf\udce9"),
    ],
)
def test_what_acts_or_hides_is_escaped(name: str, shown: str):
    assert printable(name) == shown
