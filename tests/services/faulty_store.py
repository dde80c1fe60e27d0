"""Storage of a scheme of our own, `faulty://FOLDER`: that folder, but for the calls that a test answers itself.

It enters by the registry of stores, as any storage does. For faults that no test can have of a real file system:
a file that even root may not read, a disk that fails once, a reply that is lost, another writer at the worst moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from shardmill.registry import Entry
from shardmill.storage import StoredFile
from shardmill.stores import STORES
from shardmill.stores.local import LocalStore

_ANSWERS: dict[str, Callable[..., Any]] = {}


class FaultyStore(LocalStore):
    """A local store that asks the test first."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.removeprefix("faulty://"))
        self.sound = LocalStore(self.uri)
        self.uri = uri

    def read(self, path: str) -> bytes:
        return _ANSWERS.get("read", LocalStore.read)(self, path)

    def put(self, path: str, data: bytes) -> None:
        return _ANSWERS.get("put", LocalStore.put)(self, path, data)

    def list(self, prefix: str) -> Iterator[StoredFile]:
        return _ANSWERS.get("list", LocalStore.list)(self, prefix)

    def stat(self, path: str) -> StoredFile | None:
        return _ANSWERS.get("stat", LocalStore.stat)(self, path)

    def put_if_absent(self, path: str, data: bytes) -> bool:
        return _ANSWERS.get("put_if_absent", LocalStore.put_if_absent)(self, path, data)

    def delete(self, path: str) -> None:
        return _ANSWERS.get("delete", LocalStore.delete)(self, path)


@pytest.fixture
def faulty(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """Opens the scheme. What a test puts here under a method's name is called instead: (store, *its arguments)."""
    monkeypatch.setitem(STORES.entries, "faulty", Entry(f"{__name__}:FaultyStore", "for tests"))
    yield _ANSWERS
    _ANSWERS.clear()


def send_twice(store: FaultyStore, path: str, data: bytes) -> bool:
    """`put_if_absent` whose first reply was lost: what the client's retry is told."""
    store.sound.put_if_absent(path, data)
    return store.sound.put_if_absent(path, data)
