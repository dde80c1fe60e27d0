"""Commits the results of all work units as one manifest that appears at once, or not at all.

Only the driver commits, from the results of the successful attempts, and only if every listed input is accepted or
rejected exactly once. No manifest names the leftovers of lost attempts, so they are never read.

Why it works: a version is its manifest, and everything else only prepares it. The order must not change: (1) all files
are published, under names of this attempt or their content; (2) the lease is checked; (3) `put_if_absent` creates the
manifest; (4) `committed/` records it. If a file were written after (3), a reader could see a version without it. If (2)
came earlier, or passed for a lease that had lapsed once, `gc` could delete a file of the version (see `publish`). With
a PUT that overwrites in (3), two writers could both believe that they have committed. If (4) came before (3), a crash
between them would record a version that never existed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from shardmill.dataset.build import SplitSums, UnitResult, count_notes
from shardmill.dataset.duplicates import DuplicateCounts
from shardmill.dataset.index import Layout, has_all_files, write_index
from shardmill.dataset.ledger import write_ledger
from shardmill.dataset.manifest import (
    Counts,
    Manifest,
    SplitInfo,
    content_digest,
    digested_classes,
    encode_manifest,
    manifest_path,
    parse_manifest,
)
from shardmill.dataset.statistics import ChannelSums, add_sizes
from shardmill.dataset.versions import read_manifest_bytes, record_commit, record_if_missing
from shardmill.errors import CommitConflict, IntegrityError, StorageError
from shardmill.failpoints import failpoint
from shardmill.ids import add_digests, format_digest
from shardmill.storage import Store

if TYPE_CHECKING:
    from shardmill.dataset.build import Build
    from shardmill.dataset.ledger import RejectionLog


def check_accounting(
    build: Build, results: Sequence[UnitResult], totals: dict[str, SplitSums], rejections: RejectionLog
) -> None:
    """Raise IntegrityError unless listed == accepted + rejected, in number and by an additive hash of the keys."""
    accepted = sum(total.num_rows for total in totals.values())
    rejected = len(rejections)
    if build.num_listed != accepted + rejected:
        raise IntegrityError(
            f"{build.num_listed} inputs were listed, but {accepted} accepted and {rejected} rejected",
            "expected every input in exactly one of the two; nothing was committed",
            "this is a bug in shardmill or a fault of the cluster; run it again and report it",
        )
    key_sum = add_digests(rejections.key_sum, *(int(result.accepted_key_sum, 16) for result in results))
    if format_digest(key_sum) != build.source.key_sum:
        raise IntegrityError(
            "the accepted and rejected inputs are not the listed ones",
            "their number is correct, but an input was counted twice and another was lost; nothing was committed",
            "this is a bug in shardmill or a fault of the cluster; run it again and report it",
        )


def commit_version(
    store: Store, build: Build, results: Sequence[UnitResult], rejections: RejectionLog, duplicates: DuplicateCounts,
    parent: Manifest | None, check: Callable[[Manifest], object] = lambda draft: None,
) -> Manifest:  # fmt: skip
    """Make the version after `parent` (the first, if it is None) visible, and return it; or the winner, if another
    committed the same.

    `check` may still refuse the draft, when all files are written and only the manifest is not; last, it checks the
    lease (see `publish`).

    A build that equals its parent, source included, makes no version: the parent is returned, if all its files exist.
    Raises IntegrityError if the accounting does not add up, CommitConflict (naming the winner) if another writer
    published something else first.
    """
    totals = _total(results)
    check_accounting(build, results, totals, rejections)
    # Results come in the order in which units finished; layout and digests must not depend on it.
    results = sorted(results, key=lambda result: result.unit_index)
    counts = _count(build, results, totals, rejections, duplicates)
    draft = _draft(store, build, results, totals, rejections, counts, parent.version if parent is not None else 0)
    if parent is not None:
        draft = draft.model_copy(update={"expired_versions": parent.expired_versions})
        if (
            draft.is_equivalent_to(parent)
            and (build.operation == "append" or parent.source.is_same_source(build.source))
            and has_all_files(store, parent)
        ):
            record_if_missing(store, parent.version)
            return parent
    return publish(store, draft, lambda: check(draft))


def publish(store: Store, draft: Manifest, check_lease: Callable[[], object] = lambda: None) -> Manifest:
    """Put the manifest if its number is free. One winner among any number of writers, lost replies included.

    `check_lease`: that of the lease which the caller has held since before it wrote, or found, any file of the draft
    that no other version names.

    The new version names no file that `gc` has deleted, however long this process was suspended, and where:
    - `gc` does not begin while the lease is live. If it has seen once that the lease has lapsed, it first commits a
      version of its own, or ends because the lease looks live again.
    - If the lease lapsed before the check, the check raises. Otherwise no `gc` began before the check.
    - If it lapses between the check and the PUT, the version of `gc` has the number of this draft or a higher one. So
      the number of this draft is taken, and the PUT does nothing. If the PUT is first, `gc` fails to commit and deletes
      nothing (or, if the two versions are equal, it lists what the versions name after that).
    - `gc` checks its own lease before each request to delete. It may still be suspended within such a request, beyond
      its lease: that one case remains (docs/dataset-format.md).
    A store needs nothing for this but `put_if_absent`, which decides when the file appears (`link`, rename,
    `If-None-Match`), not when the request is sent.
    """
    data, winner = encode_manifest(draft), draft
    check_lease()
    failpoint("manifest_put")
    # Everything that the manifest names is published by now; from this one request on, the version exists.
    try:
        is_first = store.put_if_absent(manifest_path(draft.version), data)
    except StorageError:
        raise
    except BaseException:
        # The request may be on its way, and arrive once the lease is released and `gc` has worked: it must end first.
        store.put_if_absent(manifest_path(draft.version), data)
        raise
    if not is_first:
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
        f"see what was committed with `shardmill inspect {store.uri}@{draft.version}`, then run again",
    )


def _draft(
    store: Store, build: Build, results: Sequence[UnitResult], totals: dict[str, SplitSums], rejections: RejectionLog,
    counts: Counts, parent_version: int,
) -> Manifest:  # fmt: skip
    layout = Layout(shard for result in results for shard in result.shards if shard.format == build.formats[0])
    splits = {name: _split_info(total, layout) for name, total in totals.items()}
    classes = digested_classes(build.class_names, splits)
    content = content_digest(build.columns, classes, build.normalization_fingerprint, splits)
    # Index and ledger are published while the manifest is made: a crash here leaves files that nothing names.
    return Manifest(
        version=parent_version + 1,
        commit_id=uuid.uuid4().hex,
        run_id=build.run_id,
        operation=build.operation,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        parent_version=parent_version or None,
        content_digest=content,
        layout_digest=layout.digest(content, build.class_names, classes),
        columns=build.columns,
        formats=build.formats,
        class_names=build.class_names,
        splits=splits,
        counts=counts,
        channel_sums=_channel_sums(totals.get("train")),
        sizes=add_sizes(total.sizes for total in totals.values()),
        normalize=build.normalize,
        normalization_fingerprint=build.normalization_fingerprint,
        decoder_id=build.decoder_id,
        config=build.config,
        config_fingerprint=build.config_fingerprint,
        source=build.source,
        other_sources=build.other_sources,
        index_segments=write_index(store, (shard for result in results for shard in result.shards)),
        ledger_segments=write_ledger(store, rejections),
        ledger_digest=rejections.digest,
        predicted_by=build.predicted_by,
    )


def _total(results: Sequence[UnitResult]) -> dict[str, SplitSums]:
    """The sums of each split, in the order of their names. Those of many units are read from a disk, once."""
    totals: dict[str, SplitSums] = {}
    for part in (part for result in results for part in result.splits):
        totals[part.split] = totals[part.split].plus(part) if part.split in totals else part
    return dict(sorted(totals.items()))


def _split_info(total: SplitSums, layout: Layout) -> SplitInfo:
    return SplitInfo(
        num_rows=total.num_rows,
        num_chunks=layout.num_chunks[total.split],
        num_shards=layout.num_shards[total.split],
        image_bytes=total.image_bytes,
        class_counts=total.class_counts,
        row_digest_sum=total.row_digest_sum,
    )


def _channel_sums(train: SplitSums | None) -> ChannelSums:
    if train is None:
        return ChannelSums()
    return ChannelSums(num_pixels=train.num_pixels, sums=train.channel_sums, square_sums=train.channel_square_sums)


def _count(
    build: Build, results: Sequence[UnitResult], totals: dict[str, SplitSums], rejections: RejectionLog,
    duplicates: DuplicateCounts,
) -> Counts:  # fmt: skip
    by_split = {name: total.num_rows for name, total in totals.items()}
    return Counts(
        listed=build.num_listed,
        accepted=sum(by_split.values()),
        rejected=len(rejections),
        by_reason={str(reason): times for reason, times in sorted(rejections.by_reason.items())},
        by_split=by_split,
        duplicate_content=duplicates.duplicates,
        conflicting_label=duplicates.conflicting,
        leaked_content=duplicates.leaked,
        by_note=count_notes(results),
    )
