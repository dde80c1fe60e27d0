"""Errors that a user's own source, format or encoding raises, and unexpected ones of a work unit, as errors of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from shardmill.errors import ShardmillError, StorageError, UsageError
from shardmill.registry import line_of_user, with_line_of_user


def own_error(where: str, error: Exception) -> ShardmillError:
    """What `error` becomes: by exit code 2 the user's code is wrong, 4 if a file or a host was the cause, 1 is ours."""
    what = f"{where}: {with_line_of_user(error)}"
    if isinstance(error, OSError):
        return StorageError(what, "nothing was committed", "see what it names, then run the same command again")
    if line_of_user(error):
        return UsageError(what, "expected no error of this code; nothing was committed", "correct that line")
    return ShardmillError(what, "unexpected error; nothing was committed", "--debug shows where")


@contextmanager
def with_users_line(where: str) -> Iterator[None]:
    """Inside, what a user's code raises becomes an error of ours with its line; anything else is raised as it is."""
    try:
        yield
    except (ShardmillError, MemoryError):
        raise
    except Exception as error:
        if not line_of_user(error):
            raise
        raise own_error(where, error) from error
