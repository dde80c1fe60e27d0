"""Makes an older version's content the latest again: a new version that refers to the old one's files."""

from __future__ import annotations

from dataclasses import dataclass

from shardmill.dataset.commit import publish
from shardmill.dataset.dataset import check_files, files_of, read_shards
from shardmill.dataset.leases import writing
from shardmill.dataset.manifest import Manifest, child_of
from shardmill.dataset.versions import check_not_expired, latest_version, read_manifest
from shardmill.storage import Store


@dataclass(frozen=True, slots=True)
class Rollback:
    """The result of `roll_back`."""

    manifest: Manifest
    """The latest version, which holds what the wanted one holds."""
    is_new: bool
    """False if the latest version named those files already."""


def roll_back(store: Store, version: int, run_id: str) -> Rollback:
    """Commit a version with the content of `version`; nothing is copied, and no version between them is touched.

    Raises UsageError if there is no such version or it has expired, IntegrityError if a file of it is missing,
    CommitConflict if another writer published first, or `gc` is at work.
    """
    # Under a writer's lease the version cannot expire between the check and the commit.
    with writing(store, f"rollback, run {run_id},") as lease:
        wanted = read_manifest(store, version)
        check_not_expired(store, version)
        latest = read_manifest(store, latest_version(store))
        if latest.index_segments == wanted.index_segments and latest.ledger_segments == wanted.ledger_segments:
            return Rollback(latest, is_new=False)
        check_files(store, files_of(read_shards(store, wanted)))
        draft = child_of(latest, "rollback", run_id, content=wanted, restored_version=version)
        return Rollback(publish(store, draft, lease.check), is_new=True)
