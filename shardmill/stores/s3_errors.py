"""What a failed request to S3 means: whether it may succeed later, and whether it was sent at all."""

from __future__ import annotations

import socket
from http import HTTPStatus

import aiohttp
import botocore.exceptions as botocore_errors
from botocore.parsers import ResponseParserError

# What a server says of a request that came late, damaged or too soon, under statuses that mean other things, too.
_TRANSIENT_CODES = {
    "BadDigest", "ConditionalRequestConflict", "IncompleteBody", "InternalError", "OperationAborted", "RequestTimeout",
    "ServiceUnavailable", "SlowDown", "Throttling", "ThrottlingException", "XAmzContentSHA256Mismatch",
}  # fmt: skip
Damaged = botocore_errors.FlexibleChecksumError
"""A body that does not match the checksum which the server keeps of it."""
_BROKEN = (
    aiohttp.ClientError, botocore_errors.ConnectionError, botocore_errors.HTTPClientError,
    botocore_errors.IncompleteReadError, ConnectionError, Damaged, ResponseParserError, TimeoutError,
)  # fmt: skip
_FOR_GOOD = (botocore_errors.SSLError, botocore_errors.ProxyConnectionError)


def was_not_sent(error: BaseException) -> bool:
    """Whether nobody took the connection. A line that is reset later, aiobotocore reports by the same class."""
    if isinstance(error, botocore_errors.EndpointConnectionError):
        return isinstance(error.__context__, aiohttp.ClientConnectorError | socket.gaierror)
    return isinstance(error, botocore_errors.ConnectTimeoutError)


def status_of(error: BaseException) -> int:
    """The HTTP status of a server's answer; 0 if there was none."""
    answer = error.response if isinstance(error, botocore_errors.ClientError) else {}
    return int(answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def is_transient(error: BaseException) -> bool:
    """Whether the same request may succeed later: the server is busy or broken, or the line is."""
    if isinstance(error, botocore_errors.ClientError):
        status = status_of(error)
        is_busy = (status >= 500 and status != HTTPStatus.NOT_IMPLEMENTED) or status == HTTPStatus.TOO_MANY_REQUESTS
        return is_busy or error.response.get("Error", {}).get("Code") in _TRANSIENT_CODES
    return isinstance(error, _BROKEN) and not isinstance(error, _FOR_GOOD)
