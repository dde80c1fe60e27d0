"""Registries: entries load when they are asked for, and every choice is explained."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import pytest
from pydantic import BaseModel, ValidationError

from shardmill.errors import UsageError
from shardmill.registry import Entry, OneOf, Registry

LETTERS: Registry[Any] = Registry(
    "letters.case",
    {
        "upper": Entry("string:ascii_uppercase", "capital letters"),
        "lower": Entry("string:ascii_lowercase", "small letters"),
        "greek": Entry("no_such_alphabet:GREEK", "Greek letters", extra="greek", packages=("no_such_alphabet",)),
        "lazy": Entry("this:d", "the only test that imports `this`"),
    },
    takes_own=True,
)


class Settings(BaseModel):
    letters: Annotated[str, OneOf("tests.shardmill.test_registry:LETTERS", also=("auto",))] = "auto"


def test_an_entry_is_loaded_when_it_is_asked_for_and_not_before(capsys: pytest.CaptureFixture[str]):
    assert list(LETTERS) == ["upper", "lower", "greek", "lazy"] and "this" not in sys.modules
    assert LETTERS["upper"] == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    assert len(LETTERS["lazy"]) == 52 and "this" in sys.modules


def test_a_users_own_object_is_named_by_its_module():
    assert LETTERS["string:digits"] == "0123456789"
    with pytest.raises(UsageError, match=r"'string:no_such'.*expected package.module:object"):
        LETTERS["string:no_such"]


def test_an_unknown_name_is_answered_with_the_nearest_one():
    with pytest.raises(UsageError, match=r"letters.case = 'uper'; expected one of upper, .*did you mean 'upper'\?"):
        LETTERS["uper"]


def test_a_missing_package_is_answered_with_the_extra_that_brings_it():
    with pytest.raises(UsageError, match=r"needs no_such_alphabet.*pip install '\.\[greek\]'"):
        LETTERS["greek"]


def test_settings_that_no_section_would_hold_are_refused():
    entry = Entry("string:octdigits", "0 to 7", options="tests.shardmill.test_registry:Settings")
    with pytest.raises(UsageError, match=r"'octal' of letters.case declares options; expected none.*; add .*"):
        Registry[Any]("letters.case", {"octal": entry})
    assert Registry[Any]("letters.case", {"octal": entry}, options_prefix="case_").options_prefix == "case_"


def test_config_fields_take_their_choices_from_the_registry(monkeypatch: pytest.MonkeyPatch):
    assert Settings(letters="string:digits").letters == "string:digits"
    with pytest.raises(ValidationError, match=r"one of auto, upper, .*did you mean 'lower'"):
        Settings(letters="lowr")
    monkeypatch.setitem(LETTERS.entries, "octal", Entry("string:octdigits", "0 to 7"))
    assert Settings(letters="octal").letters == "octal" and LETTERS["octal"] == "01234567"
