"""S3: the store, its retries, and what passes over the wire."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.applications import OnExecutor
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.verify import verify_dataset, verify_present
from shardmill.errors import AccessDenied, StorageError, UsageError
from shardmill.jobs.config import DatasetConfig
from shardmill.loader.samples import read_samples
from shardmill.storage_errors import as_storage_error
from shardmill.stores import STORES, open_store, retries, s3_requests
from shardmill.stores.s3 import S3Store
from shardmill.stores.s3_requests import as_os_error, is_transient
from tests.counting_store import CALLS, ENTRY, SCHEME
from tests.etl.building import images_of, list_images
from tests.lab.datasets import HERE, build_here, write_images
from tests.programs.use_store import use_store
from tests.services.s3 import s3_client


def refusing(environ: dict[str, Any], start: Callable[..., Any]) -> list[bytes]:
    """A server that denies all access, as a WSGI application."""
    start("403 Forbidden", [("Content-Type", "application/xml")])
    return [b"<Error><Code>AccessDenied</Code><Message>expired</Message></Error>"]


def unconditional() -> Callable[..., Any]:
    """A server that does not know `If-None-Match`, as old ones."""
    from moto.server import DomainDispatcherApplication, create_backend_app

    application = DomainDispatcherApplication(create_backend_app)
    return lambda environ, start: application({**environ, "HTTP_IF_NONE_MATCH": ""}, start)


@contextmanager
def serving(application: Callable[..., Any]) -> Iterator[str]:
    """The endpoint of a server of its own."""
    from werkzeug.serving import make_server

    server = make_server("127.0.0.1", 0, application, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.starts("program")
def test_an_s3_server_that_refuses_a_listing_is_not_an_empty_one(s3_server: str):
    with serving(refusing) as endpoint:
        outcomes = use_store("s3://bucket/dataset", AWS_ENDPOINT_URL=endpoint)
    assert len(outcomes) == 5
    for outcome in outcomes.values():
        assert outcome.startswith("StorageError: cannot access s3://bucket/dataset")


@pytest.mark.starts("program")
def test_a_server_that_ignores_conditional_puts_can_be_read_but_not_committed_to(s3_server: str):
    with serving(unconditional()) as endpoint:
        client = s3_client(endpoint)
        client.create_bucket(Bucket="bucket")
        client.put_object(Bucket="bucket", Key="a", Body=b"1")
        outcomes = use_store("s3://bucket", AWS_ENDPOINT_URL=endpoint)
    assert "ignores `If-None-Match" in outcomes.pop("put_if_absent")
    assert outcomes == {"list": "['a']", "stat": "True", "read": "b'1'", "list again": "['a']"}


def test_a_missing_bucket_is_a_storage_error_and_as_a_source_a_usage_error(s3_server: str):
    store = open_store("s3://nobody-made-this/x")
    for attempt in (lambda: list(store.list("")), lambda: store.put("a", b"1"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StorageError, match="no bucket 'nobody-made-this'"):
            attempt()
    with pytest.raises(UsageError, match="source s3://nobody-made-this/x does not exist"):
        list_images(SourceConfig(uri="s3://nobody-made-this/x"))


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("AWS_ENDPOINT_URL", "127.0.0.1:5055", "AWS_ENDPOINT_URL=http://127.0.0.1:5055"),
        ("AWS_ENDPOINT_URL_S3", "minio:9000", "AWS_ENDPOINT_URL_S3=http://minio:9000"),
        ("AWS_DEFAULT_REGION", "us east", "AWS_DEFAULT_REGION=us-east-1"),
    ],
)
def test_a_variable_that_the_client_cannot_use_is_named(variable: str, value: str, fix: str, monkeypatch):
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv(variable, value)
    with pytest.raises(UsageError) as refused:
        s3_requests.S3Requests(S3Store.deadline_variable)
    assert str(refused.value).startswith(f"{variable} = {value!r}") and refused.value.fix.endswith(fix)


def test_folder_markers_of_s3_consoles_are_not_files(s3_server: str, s3_bucket: str):
    for key, body in (("cats/", b""), ("cats/1.jpg", b"x")):
        s3_client(s3_server).put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key, Body=body)
    listing = list_images(SourceConfig(uri=s3_bucket))
    assert [image.key for image in images_of(listing)] == ["cats/1.jpg"] and listing.num_listed == 1


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """This process has none before a test and after it; no pause is long."""
    monkeypatch.setattr(retries, "_has_driver", False)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(retries, "CONNECT_SECONDS", 0.0)
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


@pytest.mark.usefixtures("driver")
def test_a_driver_gives_up_an_address_that_never_answered_and_waits_for_one_that_did():
    requests, away = s3_requests.S3Requests(S3Store.deadline_variable), _Away()
    with pytest.raises(EndpointConnectionError):
        requests._patiently(away.answer)
    assert away.num_asked == 1
    away.num_asked = 3
    assert requests._patiently(away.answer) == "data"
    away.num_asked = 0
    assert requests._patiently(away.answer) == "data"


@pytest.mark.usefixtures("driver")
def test_a_task_waits_for_a_server_that_its_driver_has_reached():
    assert OnExecutor(lambda: s3_requests.S3Requests(S3Store.deadline_variable)._patiently(_Away().answer))() == "data"


@pytest.mark.usefixtures("driver")
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


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A dataset of many small shards behind a counting store."""
    monkeypatch.setitem(STORES.entries, SCHEME, ENTRY)
    write_images(tmp_path / "images", num_images=58)
    config = EtlConfig(image_size=8, unit_min_images=1, formats=("parquet",))
    return build_here(str(tmp_path / "images"), f"{SCHEME}://{tmp_path}/dataset", config)


def test_an_unchanged_run_asks_for_no_shard_by_name(uri: str, tmp_path: Path):
    tree = EtlTree(
        source=SourceConfig(uri=str(tmp_path / "images")),
        dataset=DatasetConfig(uri=uri),
        etl=EtlConfig(image_size=8, unit_min_images=1, formats=("parquet",), engine=HERE),
    )
    num_shards = len(open_dataset(uri).shards)
    assert num_shards > 40

    # `build_here` writes no dataset card, and a run writes a missing one.
    assert build_dataset(tree, run_id="card").skipped
    CALLS.clear()
    assert build_dataset(tree, run_id="again").skipped
    assert CALLS["list"] <= 10 and CALLS["stat"] + CALLS["read"] + CALLS["read_range"] <= 10, CALLS
    assert not CALLS["put"] + CALLS["put_if_absent"] + CALLS["delete"]

    # The rules need the rows, so each shard's row segment is read: one request for each, none for its size.
    CALLS.clear()
    verify_dataset(open_dataset(uri)).raise_if_failed()
    assert CALLS["list"] <= 10 and CALLS["stat"] == 0
    assert CALLS["read"] + CALLS["read_range"] <= num_shards + 10, CALLS

    # What a training asks before it starts.
    CALLS.clear()
    verify_present(open_dataset(uri))
    assert CALLS.total() <= 10, CALLS


def test_reading_a_shard_takes_a_request_for_its_footer_and_one_for_each_chunk(uri: str):
    dataset = open_dataset(uri)
    index = dataset.index("train")
    CALLS.clear()
    assert len(read_samples(dataset, "train", 1000)) == dataset.manifest.splits["train"].num_rows
    assert {"read_range": index.num_shards + index.num_chunks} == CALLS
