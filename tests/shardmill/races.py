"""Writers of one dataset that commit at the same moment, wherever it lies."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from shardmill.dataset.commit import publish
from shardmill.dataset.versions import latest_version, read_manifest
from shardmill.errors import CommitConflict
from shardmill.stores import open_store
from tests.lab.scale import usually

NUM_ROUNDS = usually(3, 20)
"""Of the races and of the flipped bits, on each store that is not a local folder."""
_NUM_WRITERS = 8


def race_of_writers(root: str) -> None:
    """Eight writers commit in lock step, each its own content: one of them wins each version, and all know which."""
    first, start = read_manifest(open_store(root), 1), threading.Barrier(_NUM_WRITERS, timeout=240)

    def commit_each_round(writer: int) -> list[int]:
        """In lock step with the other writers; each one's manifest has content of its own. The versions that it won."""
        store, won = open_store(root), []
        for version in range(2, NUM_ROUNDS + 2):
            mine = {"version": version, "commit_id": f"{writer}-{version}", "run_id": f"writer{writer}"}
            content = {"parent_version": version - 1, "content_digest": f"{writer * 1000 + version:064x}"}
            start.wait()
            with suppress(CommitConflict):
                publish(store, first.model_copy(update={**mine, **content}))
                won.append(version)
        return won

    with ThreadPoolExecutor(_NUM_WRITERS) as writers:
        winners = {version: writer for writer, won in enumerate(writers.map(commit_each_round, range(_NUM_WRITERS)))
                   for version in won}  # fmt: skip
    store = open_store(root)
    assert sorted(winners) == list(range(2, NUM_ROUNDS + 2)) and latest_version(store) == NUM_ROUNDS + 1
    assert all(read_manifest(store, version).run_id == f"writer{writer}" for version, writer in winners.items())
