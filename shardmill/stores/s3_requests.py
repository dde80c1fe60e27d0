"""Requests to S3 by botocore, none of which it repeats by itself.

Ranged GETs, by which a reader gets its chunks, are signed here and sent on botocore's connections: a request of its
client takes 0.8 to 1.2 ms of processor time, most of it hooks, serializing and parsing; one of these takes 0.3 to 0.4.
URL, credentials, signature and proxies are botocore's all the same.
"""

from __future__ import annotations

import errno
import functools
import io
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, suppress
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from shardmill.stores import bucket_requests
from shardmill.stores.bucket_requests import BucketRequests, Failure, Piece, a_few_at_once, received_whole
from shardmill.stores.retries import stall_seconds

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


_BLOCK_BYTES = 1 << 20
_SENT_WHOLE_BYTES = 1 << 17
_MAX_CONNECTIONS = 32
_MAX_UPLOADS = 3


def _unusable(said: str) -> UsageError:
    """What botocore refuses to work with, by the name that people know it by."""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION")
    name = next((name for name in names if (value := os.environ.get(name)) and value in said), "")
    if not name:
        return UsageError(f"the config file of AWS: {said}", "expected what botocore accepts", "correct ~/.aws/config")
    if name == "AWS_DEFAULT_REGION":
        return UsageError(f"{name} = {os.environ[name]!r}", "expected a region", f"set {name}=us-east-1")
    address = os.environ[name].rpartition("://")[2] or "HOST:PORT"
    return UsageError(f"{name} = {os.environ[name]!r}", "expected a URL", f"set {name}=http://{address}")


class S3Requests(BucketRequests):
    """The connections of one process, set up from the usual AWS_* environment. What cannot be reached is raised as
    botocore names it. All of a whole object is compared with the server's checksum, if it has one: raises Damaged.

    Raises UsageError if the environment names no endpoint or region that there can be.
    """

    def __init__(self, deadline_variable: str) -> None:
        from botocore.config import Config
        from botocore.session import Session

        super().__init__(deadline_variable)
        config = Config(
            retries={"mode": "standard", "total_max_attempts": 1},
            connect_timeout=5.0,
            read_timeout=stall_seconds(self._deadline_seconds),
            max_pool_connections=_MAX_CONNECTIONS,
        )
        # Now, not within the deadline of the first request: reading botocore's tables takes most of a second.
        session = Session()
        try:
            self._client = session.create_client("s3", config=config)
        except ValueError as error:
            raise _unusable(str(error)) from error
        self._signed = SignedGets(session, self._client, config)

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """One request of Amazon's API, by its snake_case name."""
        with as_os_error():
            return self._call(method, **arguments)

    def put(self, bucket: str, key: str, data: bytes) -> None:
        with as_os_error():
            self._upload(bucket, key, len(data), lambda start, end: data[start:end])

    def put_file(self, bucket: str, key: str, file: Path) -> None:
        def read(start: int, end: int) -> bytes:
            with open(file, "rb") as source:
                return os.pread(source.fileno(), end - start, start)

        with as_os_error():
            self._upload(bucket, key, file.stat().st_size, read)

    def _put_new(self, bucket: str, key: str, data: bytes) -> None:
        self._once("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")

    def _get_piece(self, bucket: str, key: str, place: tuple[int, int], deadline: float, is_whole: bool) -> Piece:
        # Every read names a range: only then does the answer tell the object's size.
        start, num_bytes = place
        asked = f"bytes={start}-{start + num_bytes - 1}"
        ask = self._client.get_object if is_whole else self._signed.get_object
        try:
            answer = ask(Bucket=bucket, Key=key, Range=asked)
        except botocore_errors.ClientError as error:
            if status_of(error) == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return Piece(b"", 0, "")
            raise
        object_bytes = int(answer.get("ContentRange", "").rpartition("/")[2] or -1)
        with closing(answer["Body"]) as body:
            # To the end, where botocore compares checksums.
            data = received_whole(iter(lambda: body.read(_BLOCK_BYTES), b""), place, object_bytes, deadline)
        return Piece(data, object_bytes, answer.get("ETag", ""))

    def _failure_of(self, error: BaseException) -> Failure:
        if was_not_sent(error):
            return Failure.NOT_SENT
        if isinstance(error, Damaged):
            return Failure.DAMAGED
        if not isinstance(error, botocore_errors.ClientError):
            return Failure.LOST if is_transient(error) else Failure.OTHER
        if is_transient(error):
            return Failure.BUSY
        named: dict[int, Failure] = {
            HTTPStatus.NOT_FOUND: Failure.ABSENT,
            HTTPStatus.PRECONDITION_FAILED: Failure.TAKEN,
        }
        return named.get(status_of(error), Failure.REFUSED)

    def _as_os_error(self) -> AbstractContextManager[None]:
        return as_os_error()

    def _call(self, method: str, **arguments: Any) -> dict[str, Any]:
        return self._patiently(lambda deadline: self._once(method, **arguments))

    def _once(self, method: str, **arguments: Any) -> dict[str, Any]:
        data = arguments.get("Body", b"")
        if len(data) > _SENT_WHOLE_BYTES:
            # Sending all of some bytes must not take longer than a connection; of a file, that holds for each block.
            arguments["Body"] = io.BytesIO(data)
        return getattr(self._client, method)(**arguments)

    def _upload(self, bucket: str, key: str, num_bytes: int, read: Callable[[int, int], bytes]) -> None:
        if num_bytes <= bucket_requests.PIECE_BYTES:
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
            data = read(start, min(start + bucket_requests.PIECE_BYTES, num_bytes))
            answer = self._call("upload_part", **place, PartNumber=number, Body=data)
            return {"PartNumber": number, "ETag": answer["ETag"]}

        starts = enumerate(range(0, num_bytes, bucket_requests.PIECE_BYTES), 1)
        try:
            parts = a_few_at_once([lambda number=n, start=at: send(number, start) for n, at in starts])
            self._call("complete_multipart_upload", **place, MultipartUpload={"Parts": parts})
        except Exception:
            # What cannot be removed now is found by `gc`.
            with suppress(Exception):
                self._once("abort_multipart_upload", **place)
            raise


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
ADVICE = {
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
        raise with_advice(OSError(number, words), ADVICE.get(code_of(error), "")) from error
