"""A store that no cache takes for local: the folders of `CountingStore` under `far://`, which a test enters into
`STORES`."""

from __future__ import annotations

from shardmill.registry import Entry
from tests.counting_store import SCHEME as COUNTED
from tests.counting_store import CountingStore

SCHEME = "far"
ENTRY = Entry("tests.far_store:FarStore", "local folders as if they were remote")


class FarStore(CountingStore):
    """Counts its calls, too."""

    def __init__(self, uri: str) -> None:
        super().__init__(uri.replace(f"{SCHEME}://", f"{COUNTED}://"))
        self.uri, self.local_root = uri, None
