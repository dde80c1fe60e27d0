"""The commit: from the results of all work units to one manifest that appears at once, or not at all.

Only the driver commits, from what the successful attempts returned, and only if every listed input is accepted or
rejected exactly once. What lost attempts left behind is named by no manifest and therefore never read.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.index import check_files, read_shards, write_index
from shardmill.dataset.ledger import write_ledger
from shardmill.dataset.manifest import (
    Counts,
    Manifest,
    SplitInfo,
    content_digest,
    encode_manifest,
    layout_digest,
    manifest_path,
    parse_manifest,
)
from shardmill.dataset.statistics import ChannelSums, add_sizes
from shardmill.dataset.unit_result import UnitResult
from shardmill.dataset.versions import read_manifest, read_manifest_bytes, record_commit, record_if_missing
from shardmill.errors import CommitConflict, IntegrityError
from shardmill.failpoints import failpoint
from shardmill.ids import add_digests, format_digest
from shardmill.storage import Store

if TYPE_CHECKING:
    from shardmill.dataset.build import Build
    from shardmill.dataset.rejection_log import RejectionLog
    from shardmill.values import ShardInfo


def check_accounting(build: Build, results: Sequence[UnitResult], rejections: RejectionLog) -> None:
    """Raise IntegrityError unless listed == accepted + rejected, in number and by an additive hash of the keys."""
    accepted = sum(part.num_rows for result in results for part in result.splits)
    rejected = len(rejections)
    if build.num_listed != accepted + rejected:
        raise IntegrityError(
            f"{build.num_listed} inputs were listed, but {accepted} accepted and {rejected} rejected",
            "expected every input in exactly one of the two; nothing was committed",
            "this is a fault in shardmill or in the cluster; run it again and report it",
        )
    key_sum = add_digests(rejections.key_sum, *(int(result.accepted_key_sum, 16) for result in results))
    if format_digest(key_sum) != build.source.key_sum:
        raise IntegrityError(
            "the accepted and rejected inputs are not the listed ones",
            "their number is right, but some input was counted twice and another lost; nothing was committed",
            "this is a fault in shardmill or in the cluster; run it again and report it",
        )


def commit_version(
    store: Store, build: Build, results: Sequence[UnitResult], rejections: RejectionLog, duplicates: DuplicateCounts,
    parent_version: int,
) -> Manifest:  # fmt: skip
    """Make version `parent_version + 1` visible, and return it; or the winner, if another committed the same.

    A build that equals its parent, source included, makes no version: the parent is returned, if all its files exist.
    Raises IntegrityError if the accounting does not add up, CommitConflict (naming the winner) if another writer
    published something else first.
    """
    check_accounting(build, results, rejections)
    # Results come in the order in which units finished; layout and digests must not depend on it.
    results = sorted(results, key=lambda result: result.unit_index)
    counts = _count(build, results, rejections, duplicates)
    draft = _draft(store, build, results, rejections, counts, parent_version)
    if parent_version:
        parent = read_manifest(store, parent_version)
        draft = draft.model_copy(update={"expired_versions": parent.expired_versions})
        if (
            draft.is_equivalent_to(parent)
            and (build.operation == "append" or parent.source.is_same_place(build.source))
            and has_all_files(store, parent)
        ):
            record_if_missing(store, parent_version)
            return parent
    return publish(store, draft)


def publish(store: Store, draft: Manifest) -> Manifest:
    """Put the manifest if its number is free. One winner among any number of writers, lost replies included."""
    data, winner = encode_manifest(draft), draft
    failpoint("manifest_put")
    # Everything that the manifest names is published by now; from this one request on, the version exists.
    if not store.put_if_absent(manifest_path(draft.version), data):
        data = read_manifest_bytes(store, draft.version)
        winner = parse_manifest(data, draft.version, store.uri)
    failpoint("post_commit")
    # An attempt whose first PUT succeeded but whose reply was lost finds itself here.
    if winner.commit_id == draft.commit_id or draft.is_equivalent_to(winner):
        record_commit(store, draft.version, data)
        return winner
    raise CommitConflict(
        f"{store.uri} version {draft.version} was committed by run {winner.run_id} while run {draft.run_id} worked",
        "expected no other writer; nothing of this run was published",
        f"look at the winner with `shardmill inspect {store.uri}@{draft.version}`, then run again",
    )


def has_all_files(store: Store, manifest: Manifest) -> bool:
    """Whether every file of a version is there with its size: a version that lost one is no reason to skip a build."""
    try:
        check_files(store, read_shards(store, manifest))
    except IntegrityError:
        return False
    return True


def _draft(
    store: Store, build: Build, results: Sequence[UnitResult], rejections: RejectionLog, counts: Counts,
    parent_version: int,
) -> Manifest:  # fmt: skip
    shards = [shard for result in results for shard in result.shards]
    splits = _merge_splits(results, shards, build.formats[0])
    content = content_digest(build.columns, build.class_names, build.normalization_fingerprint, splits)
    one_format = [shard for shard in shards if shard.format == build.formats[0]]
    # Index and ledger are published while the manifest is made: a crash here leaves files that nothing names.
    return Manifest(
        version=parent_version + 1,
        commit_id=uuid.uuid4().hex,
        run_id=build.run_id,
        operation=build.operation,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        parent_version=parent_version or None,
        content_digest=content,
        # Chunks are equal in every format, so the first one stands for all.
        layout_digest=layout_digest(content, one_format, build.class_names),
        columns=build.columns,
        formats=build.formats,
        class_names=build.class_names,
        splits=splits,
        counts=counts,
        channel_sums=_merge_channel_sums(results),
        sizes=add_sizes(part.sizes for result in results for part in result.splits),
        normalize=build.normalize,
        normalization_fingerprint=build.normalization_fingerprint,
        decoder_id=build.decoder_id,
        config=build.config,
        config_fingerprint=build.config_fingerprint,
        source=build.source,
        other_sources=build.other_sources,
        index_segments=write_index(store, shards),
        ledger_segments=write_ledger(store, rejections),
        ledger_digest=rejections.digest,
    )


def _merge_splits(results: Sequence[UnitResult], shards: Sequence[ShardInfo], one_format: str) -> dict[str, SplitInfo]:
    splits: dict[str, SplitInfo] = {}
    for name in sorted({part.split for result in results for part in result.splits}):
        parts = [part for result in results for part in result.splits if part.split == name]
        mine = [shard for shard in shards if shard.split == name and shard.format == one_format]
        splits[name] = SplitInfo(
            num_rows=sum(part.num_rows for part in parts),
            num_chunks=sum(len(shard.chunks) for shard in mine),
            num_shards=len(mine),
            image_bytes=sum(part.image_bytes for part in parts),
            class_counts=tuple(sum(counts) for counts in zip(*(part.class_counts for part in parts), strict=True)),
            row_digest_sum=format_digest(add_digests(*(int(part.row_digest_sum, 16) for part in parts))),
        )
    return splits


def _merge_channel_sums(results: Sequence[UnitResult]) -> ChannelSums:
    parts = [part for result in results for part in result.splits if part.split == "train"]
    return ChannelSums(
        num_pixels=sum(part.num_pixels for part in parts),
        sums=tuple(sum(sums) for sums in zip(*(part.channel_sums for part in parts), strict=True)),
        square_sums=tuple(sum(sums) for sums in zip(*(part.channel_square_sums for part in parts), strict=True)),
    )


def _count(
    build: Build, results: Sequence[UnitResult], rejections: RejectionLog, duplicates: DuplicateCounts
) -> Counts:
    by_split: Counter[str] = Counter()
    by_note: Counter[str] = Counter()
    for result in results:
        by_split.update({part.split: part.num_rows for part in result.splits})
        by_note.update(dict(result.note_counts))
    return Counts(
        listed=build.num_listed,
        accepted=by_split.total(),
        rejected=len(rejections),
        by_reason={str(reason): times for reason, times in sorted(rejections.by_reason.items())},
        by_split=dict(sorted(by_split.items())),
        duplicate_content=duplicates.duplicates,
        conflicting_label=duplicates.conflicting,
        by_note=dict(sorted(by_note.items())),
    )
