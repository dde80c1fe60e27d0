"""Whatever a name holds, printing it moves no cursor, hides nothing and turns no line around."""

from __future__ import annotations

import pytest

from shardmill.printable import printable, without_surrogates


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
        ("caf\udce9", r"caf\xe9"),
        ("rows.csv\x004", r"rows.csv\04"),
        ("\ud800", r"\ud800"),
    ],
)
def test_control_and_invisible_characters_are_escaped(name: str, shown: str):
    assert printable(name) == shown


def test_text_with_bytes_that_are_not_utf8_can_be_encoded_and_is_otherwise_kept():
    assert without_surrogates("<b>\ngröße\udcff\udc80.jpg\x1b") == "<b>\ngröße\\xff\\x80.jpg\x1b"
