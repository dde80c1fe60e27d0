"""A store that counts what it is asked: local folders under `counted://`, which a test enters into `STORES`."""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

from shardmill.registry import Entry
from shardmill.stores.local import LocalStore

SCHEME = "counted"
ENTRY = Entry("tests.counting_store:CountingStore", "counts its calls")
CALLS: Counter[str] = Counter()
BYTES_READ: Counter[str] = Counter()
"""Path -> bytes, since it was last cleared."""
_COUNTED = ("read", "read_range", "put", "put_file", "put_if_absent", "list", "stat", "delete")


class CountingStore:
    """Passes every call on to a `LocalStore`."""

    def __init__(self, uri: str) -> None:
        self._store = LocalStore(uri.removeprefix(f"{SCHEME}://"))
        self.uri = uri
        self.local_root, self.deadline_seconds = self._store.local_root, self._store.deadline_seconds

    def __getattr__(self, name: str):
        if name not in _COUNTED:
            raise AttributeError(name)
        return functools.partial(self._counted, name)

    def _counted(self, name: str, *arguments: Any, **named: Any) -> Any:
        CALLS[name] += 1
        answer = getattr(self._store, name)(*arguments, **named)
        if name in ("read", "read_range"):
            BYTES_READ[arguments[0]] += len(answer)
        return answer
