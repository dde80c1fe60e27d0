"""A store that counts what it is asked: local folders under the scheme `counted://`."""

from __future__ import annotations

import functools
from collections import Counter

from shardmill.stores.local import LocalStore

SCHEME = "counted"
CALLS: Counter[str] = Counter()
_COUNTED = ("read", "read_range", "put", "put_file", "put_if_absent", "list", "stat", "delete")


class CountingStore:
    """Passes every call on to a `LocalStore`; `CALLS` says how many there were of each."""

    def __init__(self, uri: str) -> None:
        self._store = LocalStore(uri.removeprefix(f"{SCHEME}://"))
        self.uri = uri
        self.local_root = self._store.local_root

    def __getattr__(self, name: str):
        if name not in _COUNTED:
            raise AttributeError(name)
        CALLS[name] += 1
        return functools.partial(getattr(self._store, name))
