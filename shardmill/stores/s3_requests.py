"""Requests to S3: transient failures are retried until a deadline, permanent ones are raised at once.

One loop, around each request and the reading of its answer, in place of botocore's own: a conditional PUT that a client
repeats unseen is refused because of itself. Each request is made by the thread that asks, on a connection of a pool.

Ranged GETs, by which a reader gets its chunks, are signed here and sent on botocore's connections: a request of its
client takes 0.8 to 1.2 ms of processor time, most of it hooks, serializing and parsing; one of these takes 0.3 to 0.4.
URL, credentials, signature and proxies are botocore's all the same.
"""

from __future__ import annotations

import errno
import functools
import io
import math
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import botocore.exceptions as botocore_errors
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.parsers import ResponseParserError, create_parser
from botocore.response import StreamingBody
from botocore.utils import get_environ_proxies
from urllib3.exceptions import HTTPError

from shardmill.errors import UsageError
from shardmill.storage_errors import with_advice
from shardmill.stores.retries import has_driver, patiently

if TYPE_CHECKING:
    from botocore.client import BaseClient
    from botocore.config import Config
    from botocore.session import Session


_MAX_URLS = 1 << 10


class SignedGets:
    """The connections of one process, set up as `client`'s are. Safe to use from several threads."""

    def __init__(self, session: Session, client: BaseClient, config: Config) -> None:
        self._client = client
        # None where requests are not signed, or are in another way.
        self._credentials = session.get_credentials() if client.meta.config.signature_version == "s3v4" else None
        # Without a region the client has one of its own name, which no server knows.
        self._region = client.meta.region_name.replace("aws-global", "us-east-1")
        certificates = session.get_config_variable("ca_bundle") or os.environ.get("REQUESTS_CA_BUNDLE") or True
        self._http = URLLib3Session(
            verify=certificates,  # pyright: ignore[reportArgumentType]
            proxies=get_environ_proxies(client.meta.endpoint_url),
            timeout=(config.connect_timeout, config.read_timeout),  # pyright: ignore[reportAttributeAccessIssue]
            max_pool_connections=config.max_pool_connections,  # pyright: ignore[reportAttributeAccessIssue]
        )
        # A shard is asked for once for each of its chunks.
        self._url = functools.lru_cache(_MAX_URLS)(self._url_of)
        self._parser = create_parser(client.meta.service_model.metadata["protocol"])
        self._shape = client.meta.service_model.operation_model("GetObject").output_shape

    def get_object(self, **arguments: str) -> dict[str, Any]:
        """`Bucket`, `Key` and `Range` -> of the client's answer `Body`, `ContentRange` and `ETag`, and it raises as
        the client does; but the server is not asked for a checksum, which it has of whole objects only."""
        if self._credentials is None or not _is_plain(arguments["Bucket"]):
            return self._client.get_object(**arguments)
        url = self._url(arguments["Bucket"], arguments["Key"])
        request = AWSRequest("GET", url, headers={"Range": arguments["Range"]}, stream_output=True)
        # In headers: no line of a log and no error has a signed URL, or a session's token, in it.
        S3SigV4Auth(self._credentials.get_frozen_credentials(), "s3", self._region).add_auth(request)
        answer = self._http.send(request.prepare())
        if answer.status_code < HTTPStatus.MULTIPLE_CHOICES:
            headers = answer.headers
            body = StreamingBody(answer.raw, headers.get("content-length"))
            return {"Body": body, "ContentRange": headers.get("content-range", ""), "ETag": headers.get("etag", "")}
        answered = {"status_code": answer.status_code, "headers": answer.headers, "body": answer.content}
        told = self._parser.parse(answered, self._shape)
        if _is_elsewhere(answer.status_code, told.get("Error", {})):
            # The client finds out where, and follows. Nothing else that is refused is asked for again.
            return self._client.get_object(**arguments)
        raise botocore_errors.ClientError(told, "GetObject")

    def _url_of(self, bucket: str, key: str) -> str:
        place = {"Bucket": bucket, "Key": key}
        return self._client.generate_presigned_url("get_object", Params=place).partition("?")[0]


def _is_plain(bucket: str) -> bool:
    """Whether it is signed for as all are: not an access point's name, nor a directory bucket's."""
    return not (bucket.startswith("arn:") or bucket.endswith("--x-s3"))


def _is_elsewhere(status: int, error: dict[str, str]) -> bool:
    """Whether a server refers to another region: what botocore's client takes as that, for a GET."""
    if status in (HTTPStatus.MOVED_PERMANENTLY, HTTPStatus.FOUND, HTTPStatus.TEMPORARY_REDIRECT):
        return True
    code = error.get("Code")
    return code == "IllegalLocationConstraintException" or (
        code == "AuthorizationHeaderMalformed" and "Region" in error
    )


DEADLINE = "SHARDMILL_S3_DEADLINE_SECONDS"
"""Environment variable: seconds that a request may take including all retries; 120 if it is not set."""
CONNECT_SECONDS = 10.0
"""Time for which a server that has never answered this process or its driver is tried: its address may be wrong."""
PIECE_BYTES = 1 << 24
"""Maximum transfer of one request, so that a slow line needs no other deadline than a fast one."""
_BLOCK_BYTES = 1 << 20
_SENT_WHOLE_BYTES = 1 << 17
_PARALLEL = 4
_MAX_CONNECTIONS = 32
_MAX_UPLOADS = 3
_MAX_DAMAGED = 3
Value = TypeVar("Value")


class UnknownOutcome(OSError):
    """A conditional PUT was sent, and neither its answer nor the object could be had."""


@dataclass(frozen=True, slots=True)
class _Piece:
    """The bytes of an object that one ranged GET returned."""

    data: bytes
    object_bytes: int
    etag: str


class S3Requests:
    """The connections of one process, set up from the usual AWS_* environment. Safe to use from several threads.

    What a server refuses is raised as OSError: FileNotFoundError for an object or bucket that is not there,
    PermissionError for a 403. What cannot be reached is raised as botocore names it.
    """

    def __init__(self) -> None:
        from botocore.config import Config
        from botocore.session import Session

        self._deadline_seconds = given_deadline_seconds()
        self._has_answered = self._is_given_up = False
        # A stall is noticed early enough for further requests.
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=5.0,
            read_timeout=self._deadline_seconds / 8,
            max_pool_connections=_MAX_CONNECTIONS,
        )
        # Now, not within the deadline of the first request: reading botocore's tables takes most of a second.
        session = Session()
        self._client = session.create_client("s3", config=config)
        self._signed = SignedGets(session, self._client, config)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request of Amazon's API, by its snake_case name."""
        with as_os_error():
            return self._call(method, **arguments)

    def get(self, bucket: str, key: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """`num_bytes` from `start`, or all; fewer at the end of the object, none behind it. All of it is compared with
        the server's checksum, if it has one: raises Damaged."""
        size = PIECE_BYTES if num_bytes is None else min(num_bytes, PIECE_BYTES)
        ask = self._client.get_object if num_bytes is None else self._signed.get_object

        def get(at: int, num_bytes: int) -> _Piece:
            return self._patiently(lambda deadline: _get_piece(ask, bucket, key, (at, num_bytes), deadline))

        with as_os_error():
            first = get(start, size)
            end = first.object_bytes if num_bytes is None else min(first.object_bytes, start + num_bytes)
            others = _a_few_at_once(
                [
                    lambda at=at: get(at, min(PIECE_BYTES, end - at))
                    for at in range(start + PIECE_BYTES, end, PIECE_BYTES)
                ]
            )
        if any(piece.etag != first.etag for piece in others):
            raise OSError(errno.EIO, "it was replaced while it was read")
        return b"".join(piece.data for piece in (first, *others)) if others else first.data

    def put(self, bucket: str, key: str, data: bytes) -> None:
        """The object is there whole, or as it was."""
        with as_os_error():
            self._upload(bucket, key, len(data), lambda start, end: data[start:end])

    def put_file(self, bucket: str, key: str, file: Path) -> None:
        """Like `put`, for a file of which only a few pieces are in memory at once."""

        def read(start: int, end: int) -> bytes:
            with open(file, "rb") as source:
                return os.pread(source.fileno(), end - start, start)

        with as_os_error():
            self._upload(bucket, key, file.stat().st_size, read)

    def create(self, bucket: str, key: str, data: bytes) -> bool:
        """PUT unless the name exists: whether the object is this call's. Raises UnknownOutcome if nothing tells."""
        is_unknown = False

        def attempt(deadline: float) -> bool:
            nonlocal is_unknown
            try:
                self._once("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
                return True
            except Exception as error:
                # A 412 may be the answer to a repetition of what was done, by a proxy on the way. The object alone
                # tells, now or after the next attempt.
                is_lost = is_transient(error) and not was_not_sent(error)
                if status_of(error) != HTTPStatus.PRECONDITION_FAILED and not is_lost:
                    raise
                is_unknown = True
                try:
                    ask = self._client.get_object
                    return _get_piece(ask, bucket, key, (0, len(data) + 1), deadline).data == data
                except botocore_errors.ClientError as absent:
                    if status_of(absent) != HTTPStatus.NOT_FOUND:
                        raise
                raise

        with as_os_error():
            try:
                return self._patiently(attempt)
            except Exception as error:
                if is_unknown:
                    raise UnknownOutcome(errno.EIO, getattr(error, "strerror", None) or str(error)) from error
                raise

    def _patiently(self, request: Callable[[float], Value]) -> Value:
        """As `shardmill.stores.retries.patiently`; the last request may stall beyond the deadline by an eighth."""
        failed: list[BaseException] = []

        def is_worth_another(error: BaseException | None, seconds: float) -> bool:
            if error is None or isinstance(error, botocore_errors.ClientError):
                self._has_answered = True
            if error is None or not is_transient(error):
                return False
            failed.append(error)
            if sum(isinstance(each, Damaged) for each in failed) == _MAX_DAMAGED:
                # Not on its way: there.
                return False
            if self._has_answered or has_driver() or not was_not_sent(error):
                return True
            # Once: what comes after it, to clean up, is not to wait as long again.
            self._is_given_up |= seconds >= CONNECT_SECONDS
            return not self._is_given_up

        def give_up() -> NoReturn:
            waited = f"no success within {self._deadline_seconds:g} s ({DEADLINE})"
            raise OSError(errno.EIO, f"{waited}; the last of {len(failed)} errors: {failed[-1]}") from failed[-1]

        return patiently(request, is_worth_another, self._deadline_seconds, give_up)

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._patiently(lambda deadline: self._once(method, **arguments))

    def _once(self, method: str, **arguments: Any) -> dict[str, Any]:
        data = arguments.get("Body", b"")
        if len(data) > _SENT_WHOLE_BYTES:
            # Sending all of some bytes must not take longer than a connection; of a file, that holds for each block.
            arguments["Body"] = io.BytesIO(data)
        return getattr(self._client, method)(**arguments)

    def _upload(self, bucket: str, key: str, num_bytes: int, read: Callable[[int, int], bytes]) -> None:
        if num_bytes <= PIECE_BYTES:
            self._call("put_object", Bucket=bucket, Key=key, Body=read(0, num_bytes))
            return
        for uploads in range(1, _MAX_UPLOADS + 1):
            try:
                self._upload_in_parts(bucket, key, num_bytes, read)
                return
            except botocore_errors.ClientError as error:
                # The end of an upload is no name for the next request: if its answer was lost, begin anew.
                if error.response["Error"].get("Code") != "NoSuchUpload" or uploads == _MAX_UPLOADS:
                    raise

    def _upload_in_parts(self, bucket: str, key: str, num_bytes: int, read: Callable[[int, int], bytes]) -> None:
        upload = self._call("create_multipart_upload", Bucket=bucket, Key=key)
        place = {"Bucket": bucket, "Key": key, "UploadId": upload["UploadId"]}

        def send(number: int, start: int) -> dict[str, Any]:
            data = read(start, min(start + PIECE_BYTES, num_bytes))
            answer = self._call("upload_part", **place, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        starts = enumerate(range(0, num_bytes, PIECE_BYTES), 1)
        try:
            parts = _a_few_at_once([lambda number=n, start=at: send(number, start) for n, at in starts])
            self._call("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except Exception:
            # What cannot be removed now is found by `gc`.
            with suppress(Exception):
                self._once("abort_multipart_upload", **place)
            raise


def _get_piece(
    ask: Callable[..., dict[str, Any]], bucket: str, key: str, place: tuple[int, int], deadline: float
) -> _Piece:
    """`place`: start, number of bytes. Every read names a range: only then does the answer tell the object's size."""
    start, num_bytes = place
    asked = f"bytes={start}-{start + num_bytes - 1}"
    try:
        answer = ask(Bucket=bucket, Key=key, Range=asked)
    except botocore_errors.ClientError as error:
        if status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return _Piece(b"", 0, "")
        raise
    blocks: list[bytes] = []
    with closing(answer["Body"]) as body:
        # To the end, where botocore compares checksums.
        while block := body.read(_BLOCK_BYTES):
            blocks.append(block)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{sum(map(len, blocks))} bytes received for {asked}, slowly")
    data = b"".join(blocks)
    object_bytes = int(answer.get("ContentRange", "").rpartition("/")[2] or -1)
    if len(data) != min(num_bytes, object_bytes - start):
        raise ConnectionError(f"received {len(data)} bytes for {asked} of {object_bytes}")
    return _Piece(data, object_bytes, answer.get("ETag", ""))


def _a_few_at_once(requests: list[Callable[[], Value]]) -> list[Value]:
    if not requests:
        return []
    with ThreadPoolExecutor(_PARALLEL, "shardmill-s3") as pool:
        futures = [pool.submit(request) for request in requests]
        # The first error cancels requests that have not begun, and the others are waited for, so that none is still
        # running when the caller handles the error.
        wait(futures, return_when=FIRST_EXCEPTION)
        for future in futures:
            future.cancel()
        return [future.result() for future in futures]


def given_deadline_seconds() -> float:
    """Raises UsageError if the environment's value is not a number of seconds."""
    given = os.environ.get(DEADLINE) or "120"
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise UsageError(f"{DEADLINE} = {given!r}", "expected a number of seconds above 0", f"set {DEADLINE}=120")
    return seconds


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
# A full bucket does not empty itself. The message is that of HDFS's quotas.
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
