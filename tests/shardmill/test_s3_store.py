"""What only S3 does: buckets, refusals, folder markers, servers without conditional puts."""

from __future__ import annotations

import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from etl.config import SourceConfig
from etl.sources import SOURCES
from shardmill.errors import StorageError, UsageError
from shardmill.stores import open_store
from shardmill.stores.s3 import S3Store, _s3_filesystem


def test_an_s3_server_that_refuses_a_listing_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch):
    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = b"<Error><Code>AccessDenied</Code><Message>expired</Message></Error>"
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    _s3_filesystem.cache_clear()
    try:
        store = open_store("s3://bucket/dataset")
        for ask in (lambda: list(store.list("manifests")), lambda: store.stat("manifests/1"), lambda: store.read("x")):
            with pytest.raises(StorageError, match="cannot access s3://bucket/dataset"):
                ask()
    finally:
        _s3_filesystem.cache_clear()
        server.shutdown()
        server.server_close()


def test_a_missing_bucket_is_a_storage_error_and_as_a_source_a_usage_error(s3_server: str):
    store = open_store("s3://nobody-made-this/x")
    for attempt in (lambda: list(store.list("")), lambda: store.put("a", b"1"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StorageError, match="no bucket 'nobody-made-this'"):
            attempt()
    with pytest.raises(UsageError, match="source s3://nobody-made-this/x does not exist"):
        SOURCES["folders"](SourceConfig(uri="s3://nobody-made-this/x"), 10**6)


def test_folder_markers_of_s3_consoles_are_not_files(s3_bucket: str):
    import boto3

    client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    for key, body in (("cats/", b""), ("cats/1.jpg", b"x")):
        client.put_object(Bucket=s3_bucket.removeprefix("s3://"), Key=key, Body=body)
    listing = SOURCES["folders"](SourceConfig(uri=s3_bucket), 10**6)
    assert [image.key for image in listing.images] == ["cats/1.jpg"] and listing.num_listed == 1


def test_a_server_that_ignores_conditional_puts_can_be_read_but_not_committed_to(
    s3_bucket: str, monkeypatch: pytest.MonkeyPatch
):
    store = open_store(s3_bucket)
    store.put("a", b"1")
    monkeypatch.setattr(S3Store, "_create", lambda self, path, data: self.put(path, data) or True)
    with pytest.raises(StorageError, match="ignores `If-None-Match"):
        store.put_if_absent("manifest", b"1")
    assert store.read("a") == b"1" and [file.path for file in store.list("")] == ["a"]
