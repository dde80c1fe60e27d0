"""Checks that every host sees the driver's storage: the driver writes a nonce that every rank or task reads back.

A local path is the same text everywhere and another folder on each machine. Without this check, that is noticed only
when a task's shards are missing, or after the last epoch.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from shardmill.errors import AccessDenied, ShardmillError, UsageError
from shardmill.storage import Store
from shardmill.stores import open_store
from shardmill.values import Nonce

REACH = "reach"
# No driver starts its ranks or tasks that late, so the process that wrote an older file was killed.
_STALE_SECONDS = 86400


def clear_stale(store: Store) -> None:
    """Remove files below `reach/` that killed processes could not remove; a fault of the store is ignored."""
    with suppress(ShardmillError):
        for file in list(store.list(REACH)):
            if file.mtime_ns and time.time() - file.mtime_ns / 1e9 > _STALE_SECONDS:
                store.delete(file.path)


def check_nonce(nonce: Nonce) -> None:
    """Raise UsageError (exit 2), naming the place and this host, unless the nonce can be read back here."""
    try:
        found = open_store(nonce.uri).read(nonce.path)
    except FileNotFoundError:
        problem = "the driver's file does not exist"
    except AccessDenied as error:
        problem = error.what
    else:
        if found == nonce.value.encode():
            return
        problem = "it has another file of that name"
    raise UsageError(
        f"host {socket.gethostname()} does not share {nonce.uri} with the driver: {problem}",
        "expected storage that the driver and every host of the job can read and write",
        "use a bucket (s3://, gs://, az://), hdfs://, or a file system that is mounted at the same path on every host",
    )


@contextmanager
def planted(store: Store) -> Iterator[Nonce]:
    """A nonce below the root of `store` for as long as the work inside lasts; those of killed drivers go."""
    nonce = Nonce(store.uri, f"{REACH}/{secrets.token_hex(8)}", secrets.token_hex(16))
    try:
        # Inside: a SIGTERM may come when it is there already.
        store.put(nonce.path, nonce.value.encode())
        clear_stale(store)
        yield nonce
    finally:
        # It must not hide an error from inside; a later driver clears what is left.
        with suppress(ShardmillError):
            store.delete(nonce.path)


@contextmanager
def removed_afterwards(store: Store, folder: str) -> Iterator[str]:
    """The path of a folder whose files are deleted at the end, with those that a failed process has not published."""
    try:
        yield folder
    finally:
        # It must not hide an error from inside.
        with suppress(ShardmillError):
            for file in list(store.list(folder)):
                store.delete(file.path)
            for file in list(store.list_unpublished(folder)):
                store.delete_unpublished(file)
