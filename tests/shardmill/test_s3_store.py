"""Behaviour specific to S3: buckets, refusals, folder markers, servers without conditional puts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from etl.config import SourceConfig
from shardmill.errors import StorageError, UsageError
from shardmill.stores import open_store
from tests.etl.building import images_of, list_images
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


def test_folder_markers_of_s3_consoles_are_not_files(s3_server: str, s3_bucket: str):
    for key, body in (("cats/", b""), ("cats/1.jpg", b"x")):
        s3_client(s3_server).put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key, Body=body)
    listing = list_images(SourceConfig(uri=s3_bucket))
    assert [image.key for image in images_of(listing)] == ["cats/1.jpg"] and listing.num_listed == 1
