"""The interface of a tracker: a class that receives every step and event of a run in the driver.

Its methods are called in the training's thread, which waits for them. One that raises is warned of once and called no
more (train/reporting/trackers/tracker.py). One that talks to a server derives from `SentTracker`
(train/reporting/trackers/sent.py), which needs three methods.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from shardmill.errors import UsageError
from shardmill.jobs.line_log import Warn
from shardmill.jobs.observer import FieldValue
from shardmill.registry import with_line_of_user
from shardmill.storage import Store
from train.reporting.observer import GlobalStep
from train.reporting.run_log import Sink


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The only argument of a tracker's constructor."""

    run_id: str
    settings: Mapping[str, Any]
    """Settings of the section `train` and those below it, by key, as plain values."""
    store: Store
    folder: str
    """Folder of the run in `store`, below which a tracker may write its own files. Later attempts at the run have the
    same folder.
    """
    warn: Warn
    """Call it with one sentence, in the training's thread."""


class Tracker(Sink, Protocol):
    """A sink of `RunLog` that learns whether the training ended well."""

    run_id: str
    """Id of the run at the tracker's server; empty if there is none."""

    def finish(self) -> None:
        """The training has ended well; `close` follows."""
        ...


# What a class must define, and what each method is called with; a name with `=` is passed by that name.
TRACKER_METHODS = {"step": ("step",), "event": ("name", "fields"), "finish": (), "close": ()}
_FIX = "docs/training/speed.md shows one"


def check_tracker(name: str, kind: Any) -> None:
    """Raises UsageError unless `kind` is a class that is made with one argument and has a tracker's methods."""
    where = f"train.log.trackers = {name!r}"
    if not isinstance(kind, type):
        raise UsageError(f"{where} is a {type(kind).__name__}", "expected a class", _FIX)
    # A base may leave other methods to its subclasses: `SentTracker`.
    methods: Mapping[str, tuple[str, ...]] = getattr(kind, "methods_to_define", TRACKER_METHODS)
    missing = [each for each in methods if not callable(getattr(kind, each, None))]
    missing += sorted(getattr(kind, "__abstractmethods__", frozenset()) - {*missing})
    if missing:
        raise UsageError(f"{where} has no {', '.join(missing)}", f"expected a class with {', '.join(methods)}", _FIX)
    _check_call(where, kind.__name__, kind, ("run",))
    for method, arguments in methods.items():
        if inspect.isfunction(inspect.getattr_static(kind, method)):
            _check_call(where, method, getattr(kind, method), arguments, is_method=True)


def _check_call(where: str, name: str, called: Any, arguments: tuple[str, ...], *, is_method: bool = False) -> None:
    """Raises UsageError if it does not take these arguments."""
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        # Compiled code need not say.
        return
    given = [None] * (is_method + sum(not each.endswith("=") for each in arguments))
    try:
        signature.bind(*given, **{each[:-1]: None for each in arguments if each.endswith("=")})
    except TypeError as error:
        shown = ", ".join(f"{each}..." if each.endswith("=") else each for each in arguments)
        raise UsageError(f"{where}: {name}{signature}: {error}", f"it is called as {name}({shown})", _FIX) from None


class GuardedTracker:
    """A `Tracker` that calls another one until that raises."""

    def __init__(self, make: Callable[[TrackedRun], Tracker], run: TrackedRun) -> None:
        self._warn = run.warn
        self._run_id = ""
        self._tracker: Tracker | None = None
        try:
            self._tracker = make(run)
        except (Exception, SystemExit) as error:
            self._leave_out("it cannot be made", error)

    @property
    def run_id(self) -> str:
        """The value of the tracker; for a disabled one, its last value."""
        if self._tracker is not None:
            self._run_id = getattr(self._tracker, "run_id", "")
        return self._run_id

    def step(self, step: GlobalStep) -> None:
        self._call("step", step)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        self._call("event", name, fields)

    def finish(self) -> None:
        self._call("finish")

    def close(self) -> None:
        self._call("close")

    def _call(self, method: str, *arguments: Any) -> None:
        if self._tracker is None:
            return
        try:
            getattr(self._tracker, method)(*arguments)
        except (Exception, SystemExit) as error:
            # A user's code may raise anything, and none of it is worth a training.
            self._leave_out(f"its `{method}` failed", error)

    def _leave_out(self, what: str, error: BaseException) -> None:
        self._run_id, self._tracker = self.run_id, None
        self._warn(f"{what}: {with_line_of_user(error)}; the tracker is disabled, and the training continues")
