"""Starts the tests' storage servers for benchmarks, and configures this process for them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.s3 import s3_client
from tests.services.versitygw import KEY, SECRET, Gateway, versitygw


@contextmanager
def s3_root(folder: Path) -> Iterator[str]:
    """URI of a bucket on versitygw, which keeps its files below `folder`; the AWS_* environment points there."""
    with fixture(versitygw, folder / "versitygw") as server:
        assert isinstance(server, Gateway)
        os.environ |= {"AWS_ENDPOINT_URL": server.endpoint, "AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET,
                       "AWS_DEFAULT_REGION": "us-east-1"}  # fmt: skip
        s3_client(server.endpoint).create_bucket(Bucket="benchmark")
        yield "s3://benchmark"


@contextmanager
def hdfs_root(folder: Path) -> Iterator[str]:
    """URI of a folder on a NameNode with one DataNode."""
    from tests.services.hdfs import HdfsServer, hdfs_server

    with fixture(hdfs_server, folder / "hdfs") as server:
        assert isinstance(server, HdfsServer)
        yield f"{server.uri}/benchmark"


@contextmanager
def fixture(of_session: object, folder: Path) -> Iterator[object]:
    """What a session's fixture of the tests yields, outside pytest."""

    class Folders:
        def mktemp(self, name: str) -> Path:
            folder.mkdir(parents=True, exist_ok=True)
            return folder

    with contextmanager(of_session.__wrapped__)(Folders()) as server:  # pyright: ignore[reportAttributeAccessIssue]
        yield server
