"""Classifies failed S3 requests: whether they may succeed later, whether they were sent, and their OSError."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus

import botocore.exceptions as botocore_errors
from botocore.parsers import ResponseParserError
from urllib3.exceptions import HTTPError

from shardmill.storage_errors import with_advice

# What a server says of a request that came late, damaged or too soon, under statuses that mean other things, too.
_TRANSIENT_CODES = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "XAmzContentSHA256Mismatch",
}  # fmt: skip
Damaged = botocore_errors.FlexibleChecksumError
"""A body that does not match the checksum which the server keeps of it."""
_BROKEN = (
    botocore_errors.ConnectionError, botocore_errors.HTTPClientError, botocore_errors.IncompleteReadError,
    ConnectionError, Damaged, HTTPError, ResponseParserError, TimeoutError,
)  # fmt: skip
# A full bucket does not empty itself. HDFS's quotas are told in the same words.
_FULL_CODES = {"InsufficientStorage", "QuotaExceeded", "ServiceQuotaExceeded", "StorageFull", "XMinioStorageFull"}
_ADVICE = {
    "RequestTimeTooSkewed": "set this machine's clock (S3 refuses requests that are 15 minutes off); then run it again",
    "InvalidBucketName": "an S3 bucket has 3 to 63 lowercase letters, digits, dots and hyphens: correct the URI",
}
_FOR_GOOD = (botocore_errors.SSLError, botocore_errors.ProxyConnectionError)
_OS_ERRORS: dict[int, int] = {
    HTTPStatus.NOT_FOUND: errno.ENOENT, HTTPStatus.FORBIDDEN: errno.EACCES, HTTPStatus.NOT_IMPLEMENTED: errno.ENOSYS
}  # fmt: skip


def was_not_sent(error: BaseException) -> bool:
    """Whether nobody took the connection."""
    return isinstance(error, botocore_errors.EndpointConnectionError | botocore_errors.ConnectTimeoutError)


def status_of(error: BaseException) -> int:
    """The HTTP status of a server's answer; 0 if there was none."""
    answer = error.response if isinstance(error, botocore_errors.ClientError) else {}
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: botocore_errors.ClientError) -> str:
    return error.response.get("Error", {}).get("Code", "")


def is_full(error: botocore_errors.ClientError) -> bool:
    return status_of(error) == HTTPStatus.INSUFFICIENT_STORAGE or code_of(error) in _FULL_CODES


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is busy or broken, or the line is."""
    if isinstance(error, botocore_errors.ClientError):
        if is_full(error):
            return False
        status = status_of(error)
        is_busy = (status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED) or status == HTTPStatus.TOO_MANY_REQUESTS
        return is_busy or code_of(error) in _TRANSIENT_CODES
    return isinstance(error, _BROKEN) and not isinstance(error, _FOR_GOOD)


@contextmanager
def as_os_error() -> Iterator[None]:
    """Convert a server's refusal to the OSError that a file system would raise, with the server's words."""
    try:
        yield
    except botocore_errors.ClientError as error:
        words = error.response.get("Error", {}).get("Message") or str(error)
        number = errno.EDQUOT if is_full(error) else _OS_ERRORS.get(status_of(error), errno.EIO)
        raise with_advice(OSError(number, words), _ADVICE.get(code_of(error), "")) from error
