"""Which requests are repeated and for how long, and what is said of those that are not."""

from __future__ import annotations

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from shardmill.applications import OnExecutor
from shardmill.errors import AccessDenied, StorageError, UsageError
from shardmill.storage_errors import as_storage_error
from shardmill.stores import open_store, retries, s3_requests
from shardmill.stores.s3_errors import as_os_error, is_transient


@pytest.fixture(autouse=True)
def driver(monkeypatch: pytest.MonkeyPatch):
    """This process has none before a test and after it; no pause is long."""
    monkeypatch.setattr(retries, "_has_driver", False)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(s3_requests, "CONNECT_SECONDS", 0.0)
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")


class _Away:
    """A server that cannot be connected to for three requests."""

    def __init__(self) -> None:
        self.num_asked = 0

    def answer(self, deadline: float) -> str:
        self.num_asked += 1
        if self.num_asked <= 3:
            raise EndpointConnectionError(endpoint_url="http://127.0.0.1:1")
        return "data"


def test_a_driver_gives_up_an_address_that_never_answered_and_waits_for_one_that_did():
    requests, away = s3_requests.S3Requests(), _Away()
    with pytest.raises(EndpointConnectionError):
        requests._patiently(away.answer)
    assert away.num_asked == 1
    away.num_asked = 3
    assert requests._patiently(away.answer) == "data"
    away.num_asked = 0
    assert requests._patiently(away.answer) == "data"


def test_a_task_waits_for_a_server_that_its_driver_has_reached():
    assert OnExecutor(lambda: s3_requests.S3Requests()._patiently(_Away().answer))() == "data"


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (507, "InsufficientStorage", "no space to write s3://b/x: .*; nothing was published; free space"),
        (507, "", "no space to write s3://b/x"),
        (403, "QuotaExceeded", "no space to write s3://b/x"),
        (400, "XMinioStorageFull", "no space to write s3://b/x"),
        (403, "RequestTimeTooSkewed", "cannot access s3://b/x: .*; set this machine's clock"),
        (400, "InvalidBucketName", "cannot access s3://b/x: .*; an S3 bucket has 3 to 63"),
        (403, "AccessDenied", "cannot access s3://b/x: .*check the path, its permissions"),
    ],
)
def test_what_no_retry_mends_is_said_at_once_with_its_remedy(status: int, code: str, said: str):
    answer = {"Error": {"Code": code, "Message": "it says so"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    error = ClientError(answer, "PutObject")  # pyright: ignore[reportArgumentType]
    assert not is_transient(error)
    with pytest.raises(StorageError, match=said) as raised, as_storage_error("s3://b/x", denied=AccessDenied):
        with as_os_error():
            raise error
    # A clock that is wrong refuses all files, not one.
    assert isinstance(raised.value, AccessDenied) == (code == "AccessDenied")


@pytest.mark.parametrize("uri", ["s3://", "s3://a b/x", "s3:///x", "s3://-bucket"])
def test_a_bucket_that_cannot_be_is_refused_before_any_request(uri: str):
    with pytest.raises(UsageError, match="no S3 bucket can be called"):
        open_store(uri)


def test_buckets_of_all_times_are_buckets():
    for name in ("abc", "Old_Bucket", "a.b-c", "arn:aws:s3:eu-west-1:123456789012:accesspoint:mine"):
        assert open_store(f"s3://{name}/x").uri == f"s3://{name}/x"
