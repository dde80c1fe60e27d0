"""The errors that end a command: one exception class per exit code of the command line."""

from __future__ import annotations

from typing import Any


class ShardmillError(Exception):
    """An error that the user can act on: what was found and where, what was expected, what to do next.

    The command line prints it as ``ERROR <exit_code>: <what>; <expected>; <fix>`` and exits with ``exit_code``.
    """

    exit_code = 1
    is_worth_retrying = True
    """Whether a later try may succeed, which schedulers ask: not if it meets the same config, bytes and figures."""

    def __init__(self, what: str, expected: str = "", fix: str = "", *, detail: dict[str, Any] | None = None) -> None:
        self.what = what
        self.expected = expected
        self.fix = fix
        # For the record of the stage that it ends: figures and paths beside the one line, as JSON takes them.
        self.detail = detail or {}
        super().__init__("; ".join(part for part in (what, expected, fix) if part))

    def __reduce__(self):
        # The default reduction passes the joined message as `what`; errors cross process borders (Spark, ranks) whole.
        return (type(self), (self.what, self.expected, self.fix), {"detail": self.detail})


class UsageError(ShardmillError):
    """The command line, the config or a user's own factory is wrong."""

    exit_code = 2
    is_worth_retrying = False


class NoDataset(UsageError):
    """A location contains no dataset: it is another's, or has yet to be made."""


class IntegrityError(ShardmillError):
    """Stored data is not what was committed, or was never committed."""

    exit_code = 3
    is_worth_retrying = False


class StorageError(ShardmillError):
    """A file system or object store refused, vanished or is full, or a machine could not start a decoding process."""

    exit_code = 4


class AccessDenied(StorageError):
    """One file may not be read; others of its store may."""


class NoSuchRoot(StorageError):
    """The bucket itself is not there."""


class CannotList(StorageError):
    """This kind of storage gives files by their names and lists none."""


class TrainingError(ShardmillError):
    """A rank failed, died or went silent."""

    exit_code = 5


class CommitConflict(ShardmillError):
    """Another writer published first, and something else."""

    exit_code = 6


class RejectLimitExceeded(ShardmillError):
    """More inputs were refused than `etl.max_reject_fraction` allows; nothing was published."""

    exit_code = 7
    is_worth_retrying = False


class DriftLimitExceeded(RejectLimitExceeded):
    """A version differs from an older one by more than `etl.max_drift` allows."""


class SecurityRefusal(ShardmillError):
    """An artefact asks for something no honest one asks for (a path outside its root, code in data)."""

    exit_code = 8
    is_worth_retrying = False


class GateNotPassed(ShardmillError):
    """The new model did not pass the gate and `--require` asked for it."""

    exit_code = 9
    is_worth_retrying = False


ERROR_BY_EXIT_CODE: dict[int, type[ShardmillError]] = {
    kind.exit_code: kind
    for kind in (
        UsageError,
        IntegrityError,
        StorageError,
        TrainingError,
        CommitConflict,
        RejectLimitExceeded,
        SecurityRefusal,
        GateNotPassed,
    )
}


def error_class(name: str, exit_code: int) -> type[ShardmillError]:
    """The class of an error that another process has named; of an unknown name, that of its exit code."""
    base = ERROR_BY_EXIT_CODE.get(exit_code, ShardmillError)
    return next((kind for kind in base.__subclasses__() if kind.__name__ == name), base)


def is_worth_retrying(exit_code: int) -> bool:
    """Whether to retry a command that ended with this exit code; true after a signal and for unknown codes."""
    return ERROR_BY_EXIT_CODE.get(exit_code, ShardmillError).is_worth_retrying
