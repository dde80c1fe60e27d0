"""Messages of ranks: what one that says nothing means, and an error that has come over the wire."""

from __future__ import annotations

from dataclasses import fields
from typing import get_args

import pytest

from shardmill.errors import ERROR_BY_EXIT_CODE, ShardmillError
from train.contracts.activities import Activity
from train.contracts.values import from_json, to_json
from train.launching import messages
from train.launching.messages import Event, Exchange, Exchanged, Failure, Heartbeat, Stop, Timed


@pytest.mark.parametrize(
    ("message", "same"),
    [
        (Timed("a step"), Timed("a step", 0, 0.0)),
        (Heartbeat(), Heartbeat(0, Activity("its own work"), ())),
        (Event("resumed"), Event("resumed", {})),
        (Exchange("00"), Exchange("00", "main")),
        (Exchanged(("00",)), Exchanged(("00",), "main")),
        (Stop(), Stop("")),
    ],
)
def test_what_a_message_does_not_say_is_nothing(message, same):
    assert message == same and from_json(type(message), to_json(message)) == message


def test_every_message_has_a_kind_of_its_own():
    kinds = [
        next(field.default for field in fields(each) if field.name == "kind") for each in get_args(messages.Message)
    ]
    assert len(set(kinds)) == len(kinds) == 21


def failure(error_type: str, exit_code: int, place: str = "") -> Failure:
    return Failure(error_type, "what", "expected", "fix", exit_code, False, "", place)


@pytest.mark.parametrize(("exit_code", "kind"), ERROR_BY_EXIT_CODE.items())
def test_an_error_of_ours_is_raised_once_more(exit_code: int, kind: type[ShardmillError]):
    received = failure(kind.__name__, exit_code)
    assert received.is_ours
    raised = received.as_raised(" (rank 1)")
    assert type(raised) is kind and (raised.what, raised.expected, raised.fix) == ("what (rank 1)", "expected", "fix")
    assert received.as_raised().what == "what"


def test_an_error_of_somebody_else_is_told_with_its_place():
    assert not failure("ValueError", 5).is_ours
    assert str(failure("ValueError", 5)) == "ValueError: what"
    assert str(failure("ValueError", 5, "model.py:3")) == "ValueError: what (model.py:3)"
