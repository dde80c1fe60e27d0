"""Converts errors of file systems and storage clients to a one-line StorageError."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardmill.errors import StorageError

ACCESS_FIX = (
    "check the path, its permissions and, for s3://, the AWS_* environment (for hdfs://, HADOOP_CONF_DIR and "
    "HADOOP_USER_NAME); then run it again"
)


def with_advice(error: OSError, advice: str) -> OSError:
    """The error with what to do about it, for `as_storage_error`; the usual advice if that is empty."""
    if advice:
        error.add_note(advice)
    return error


@contextmanager
def as_storage_error(
    path: Path | str,
    num_bytes: int | None = None,
    *,
    denied: type[StorageError] = StorageError,
    fix: str = ACCESS_FIX,
) -> Iterator[None]:
    """Turn what a file system or S3 client raises into one StorageError line; only absence passes through.

    `denied` is the class raised for a lack of permission; `fix` what to do, unless the error says it.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        size = "" if num_bytes is None else f" ({num_bytes} bytes)"
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise StorageError(
                f"no space to write {path}{size}: {reason}{_free(path)}",
                "nothing was published",
                "free space, then run it again",
            ) from error
        [advice] = getattr(error, "__notes__", None) or [fix]
        kind = denied if isinstance(error, PermissionError) and advice == fix else StorageError
        raise kind(f"cannot access {path}{size}: {reason}", fix=advice) from error
    except Exception as error:
        # botocore raises a family of exceptions of its own; each means that the request failed.
        if type(error).__module__.split(".")[0] == "botocore":
            raise StorageError(f"cannot access {path}: {error}", fix=ACCESS_FIX) from error
        raise


def _free(path: Path | str) -> str:
    """Return the free space at `path`, in words; empty if that is not a folder of this machine."""
    for folder in Path(path).parents if Path(path).is_absolute() else ():
        with suppress(OSError):
            return f", {shutil.disk_usage(folder).free} bytes are free"
    return ""
