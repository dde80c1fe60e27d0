"""Uses the S3 store at argv[1] in every way that a commit does; prints a line for each with what came of it.

A process of its own, because one process keeps one connection to one server.
"""

import sys

from shardmill.errors import StorageError
from shardmill.stores import open_store

store = open_store(sys.argv[1])
for name, use in {
    "list": lambda: [file.path for file in store.list("")],
    "stat": lambda: store.stat("a") is not None,
    "read": lambda: store.read("a"),
    "put_if_absent": lambda: store.put_if_absent("manifest", b"1"),
    "list again": lambda: [file.path for file in store.list("")],
}.items():
    try:
        print(f"{name}: {use()}")
    except StorageError as error:
        print(f"{name}: StorageError: {error}")
