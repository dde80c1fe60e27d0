"""Trackers as users write them, wrong in one way each."""

# pyright: reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false
from __future__ import annotations

from train.reporting.trackers.sent import SentTracker


class Recording:
    """One that is right; `told` has all calls of all its objects."""

    told: list[str] = []  # noqa: RUF012  a test clears it

    def __init__(self, run):
        self.told.append("made")

    def step(self, step):
        self.told.append("step")

    def event(self, name, fields):
        self.told.append(f"event {name}")

    def finish(self):
        self.told.append("finish")

    def close(self):
        self.told.append("close")


class Remembering(Recording):
    """`settings` has those of all its objects."""

    settings: list[dict] = []  # noqa: RUF012  a test clears it

    def __init__(self, run):
        self.settings.append(run.settings)


class Failing(Recording):
    """Raises in the method that `at` names."""

    at = ""

    def __getattribute__(self, name):
        if name == type(self).at:
            raise ZeroDivisionError(f"at {name}")
        return super().__getattribute__(name)


class FailingAtOnce(Recording):
    def __init__(self, run):
        raise ZeroDivisionError("at once")


class Leaving(Recording):
    def finish(self):
        raise SystemExit(3)


class WithoutClose:
    def __init__(self, run): ...
    def step(self, step): ...
    def event(self, name, fields): ...
    def finish(self): ...


class WithoutEnd(SentTracker):
    def begin(self): ...
    def send(self, scalars): ...


class WithAnotherEnd(WithoutEnd):
    def end(self): ...


class WithAnotherEvent(Recording):
    def event(self, name): ...


class WithoutArgument(Recording):
    def __init__(self): ...


def function(run):
    return Recording(run)
