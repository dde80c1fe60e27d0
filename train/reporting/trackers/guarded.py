"""Guards a training against faulty trackers: checks a tracker's class before the start, and disables it with one
warning if it raises later.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardmill.errors import UsageError
from shardmill.jobs.observer import FieldValue
from shardmill.registry import with_line_of_user
from train.reporting.observer import GlobalStep

if TYPE_CHECKING:
    from train.reporting.trackers.tracker import TrackedRun, Tracker

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
