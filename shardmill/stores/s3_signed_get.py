"""Signs ranged GETs here and sends them on botocore's connections: how a reader gets its chunks from S3.

A request of botocore's client takes 0.8 to 1.2 ms of processor time, most of it hooks, serializing and parsing; one of
these takes 0.3 to 0.4. URL, credentials, signature and proxies are botocore's all the same.
"""

from __future__ import annotations

import functools
import os
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import botocore.exceptions as botocore_errors
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.httpsession import URLLib3Session
from botocore.parsers import create_parser
from botocore.response import StreamingBody
from botocore.utils import get_environ_proxies

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
