"""Compares an older version's rejections with the new listing: keeps 17 bytes per rejection in memory, and no key."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import compress

import numpy as np

from etl.listing.segments import find_sorted
from shardmill.ids import key_bytes
from shardmill.values import Rejection

_DIGEST_BYTES = 16


class RefusedBefore:
    """Rejections that are read from their ledger again whenever they are asked for; some of them are marked."""

    def __init__(self, read: Callable[[], Iterable[Rejection]], name_of: Callable[[Rejection], str]) -> None:
        """`name_of`: what a rejection is found by."""
        self._read = read
        digests_N = _digests(map(name_of, read()))
        self._order_N = np.argsort(digests_N, kind="stable")
        self._digests_N = digests_N[self._order_N]
        self._is_marked_N = np.zeros(len(digests_N), bool)

    def __len__(self) -> int:
        return len(self._digests_N)

    def mark(self, names: Iterable[str]) -> np.ndarray:
        """Mark those of these names; bool for each name: whether there is one."""
        places_N, found_N = find_sorted(self._digests_N, _digests(names))
        self._is_marked_N[self._order_N[places_N[found_N]]] = True
        return found_N

    def marked(self) -> Iterator[Rejection]:
        """Return the rejections marked so far, in the ledger's order."""
        return compress(self._read(), self._is_marked_N.tolist())

    def others(self) -> Iterator[Rejection]:
        """Return the rejections not marked so far, in the ledger's order."""
        return compress(self._read(), (~self._is_marked_N).tolist())


def _digests(names: Iterable[str]) -> np.ndarray:
    """The first 16 bytes of each name's SHA-256, as `S16`."""
    joined = bytearray()
    for name in names:
        joined += hashlib.sha256(key_bytes(name)).digest()[:_DIGEST_BYTES]
    return np.frombuffer(bytes(joined), f"S{_DIGEST_BYTES}")
