"""Enforces the limits of the config, above which nothing is published: on rejected inputs (the ledger lists them), on
what the source has lost, on what would be decoded again, on drift; and on boxes that all lie outside.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow.parquet as pq

from etl.config import REBUILDS_NOTHING, EtlConfig, etl_settings_of
from etl.later_runs.changes import row_ids
from etl.listing.listing import find_sorted
from shardmill.data_quality.drift import Drift, amount_words, baseline_of, measure_drift
from shardmill.dataset.ledger import SEGMENT_ROWS, RejectionLog, write_ledger
from shardmill.dataset.manifest import Manifest
from shardmill.errors import DriftLimitExceeded, RejectLimitExceeded, ShardmillError, StorageError, UsageError
from shardmill.ids import sample_id_of
from shardmill.images.annotations import DROPPED_NOTE
from shardmill.storage import Store, join_uri
from shardmill.typed_columns import BOX_LABELS
from shardmill.values import (
    NO_SUCH_FILE,
    OTHER_SIZE,
    REASONS_OUTSIDE_REJECT_FRACTION,
    TRANSIENT_REASONS,
    Rejection,
    RejectReason,
)
from shardmill.words import name_some, printable

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.listing.listing import Listing
    from etl.plan import BuildPlan


_NUM_EXAMPLES = 3


def check_limits(plan: BuildPlan, rejections: RejectionLog, *, keeps_ledger: bool = True) -> None:
    """Raise StorageError (4) or RejectLimitExceeded (7) if more was refused than a limit of the config allows: how
    many, why, three examples, and where the rest is listed, unless nothing is to be written.
    """
    config, build = plan.task.config, plan.build
    limit = broken_limit(config, rejections, build.num_listed)
    if limit is None:
        return
    ledger = join_uri(plan.store.uri, write_ledger(plan.store, rejections)[0].path) if keeps_ledger else None
    counted, others, named, num_of_other_size = Counter[RejectReason](), Counter[RejectReason](), list[str](), 0
    for each in rejections:
        if not limit.counts(each):
            others[each.reason] += 1
            continue
        counted[each.reason] += 1
        num_of_other_size += each.detail.startswith(OTHER_SIZE)
        if len(named) < _NUM_EXAMPLES:
            named.append(f"{printable(each.key)}: {each.reason}")
    such, beside = ", ".join(named), f"; not counted: {_by_reason(others)}" if others else ""
    shown = "all of them" if len(rejections) <= SEGMENT_ROWS else f"the first {SEGMENT_ROWS:,} of them"
    kind, verb, fix = limit.kind, limit.verb, limit.fix
    if num_of_other_size == counted.total():
        # No later run will find the source as the table has it.
        kind, verb = RejectLimitExceeded, "have another size than size_bytes of their row"
        fix = "correct the column or leave it out"
    raise kind(
        f"{counted.total()} of {build.num_listed} inputs {verb} ({_by_reason(counted)}), such as {such}{beside}",
        f"etl.{limit.key} allows {getattr(config, limit.key):g}; nothing was published",
        f"{shown}: `shardmill inspect --rejects {shlex.quote(ledger)}`; {fix}" if ledger else fix,
        detail={
            "ledger": ledger,
            "source": build.source.uri,
            "source_kind": build.source.kind,
            "num_listed": build.num_listed,
        },
    )


@dataclass(frozen=True, slots=True)
class Limit:
    """A share of the inputs, and the reasons that count against it."""

    key: str
    """The config key, in section `etl`, that holds the share."""
    reasons: frozenset[RejectReason]
    kind: type[ShardmillError]
    verb: str
    fix: str

    def counts(self, rejection: Rejection) -> bool:
        """Whether it counts against this limit."""
        if rejection.detail == NO_SUCH_FILE:
            return self.kind is RejectLimitExceeded
        return rejection.reason in self.reasons


# Access first: while it fails, nothing can be said about the images themselves.
LIMITS = (
    Limit(
        "max_unreadable_fraction", frozenset({RejectReason.UNREADABLE}), StorageError,
        "could not be read", "give this user access to them on every host, or raise the limit",
    ),
    Limit(
        "max_changed_fraction", frozenset({RejectReason.MISSING, RejectReason.SOURCE_CHANGED}), StorageError,
        "vanished or changed after they were listed", (
            "run it again when nothing changes the source, or raise the limit"
        ),
    ),
    Limit(
        "max_reject_fraction", frozenset(RejectReason) - TRANSIENT_REASONS - REASONS_OUTSIDE_REJECT_FRACTION,
        RejectLimitExceeded, "were rejected", "fix the source or raise the limit",
    ),
)  # fmt: skip


def broken_limit(config: EtlConfig, rejections: RejectionLog, num_listed: int) -> Limit | None:
    """The first limit that the rejections exceed. More rejections never undo it, so a part of them may be enough."""
    num_images = num_listed - sum(rejections.by_reason[reason] for reason in REASONS_OUTSIDE_REJECT_FRACTION)
    counted = Counter(limit.key for each in rejections for limit in LIMITS if limit.counts(each))
    for limit in LIMITS:
        if counted[limit.key] > getattr(config, limit.key) * num_images:
            return limit
    return None


def _by_reason(counts: Counter[RejectReason]) -> str:
    """Every reason with its count, the most frequent one first."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())


def check_vanished(plan: BuildPlan, changes: Changes | None) -> None:
    """Raise StorageError if the source lists too few of the images that the latest version has of it.

    `changes`: what was found to be gone or changed, None if nothing was compared. An append replaces nothing.
    """
    parent, limit = plan.replaced, plan.task.config.max_vanished_fraction
    if parent is None:
        return
    num_allowed = limit * parent.counts.accepted
    # The names are looked up only if they can tell: a row that is unchanged has not vanished. One of a lost shard may.
    num_unchanged = 0 if changes is None else changes.num_unchanged
    if num_allowed >= parent.counts.accepted - num_unchanged:
        return
    num_vanished = _num_vanished(plan.store, parent, plan.listing)
    if num_vanished > num_allowed:
        raise StorageError(
            f"{num_vanished:,} of the {parent.counts.accepted:,} images of version {parent.version} are not in "
            f"{plan.build.source.described} any more",
            f"etl.max_vanished_fraction allows {limit:g}; nothing was published",
            "mount or restore the source and run again; if they were removed on purpose, set the limit to 1",
        )


def _num_vanished(store: Store, parent: Manifest, listing: Listing) -> int:
    """Rows of which no input of the listing has the sample id; 9 bytes a row are in memory. Those of lost row segments
    do not count: the build makes them again.
    """
    ids_N = np.sort(np.concatenate([np.empty(0, np.int64), *(ids for _, ids in row_ids(store, parent))]))
    is_listed_N = np.zeros(len(ids_N), bool)

    def mark(listed_M: np.ndarray) -> None:
        places_M, found_M = find_sorted(ids_N, listed_M)
        is_listed_N[places_M[found_M]] = True

    mark(np.array([sample_id_of(each.key) for each in listing.rejections], np.int64))
    for segment in listing.segments:
        for batch in pq.ParquetFile(listing.folder / segment.path).iter_batches(columns=["sample_id"]):
            mark(batch.column("sample_id").to_numpy())
    return int((~is_listed_N).sum())


def check_redecoded(plan: BuildPlan, changes: Changes | None) -> Iterator[str]:
    """A warning, if any. Raises RejectLimitExceeded above `etl.max_redecoded_fraction`.

    `changes`: what was found to differ from the latest version, None if nothing of it is kept.
    """
    parent = plan.replaced
    # Another model predicts all of them anew, as it should.
    if parent is None or plan.task.mapping is not None:
        return
    if changes is not None:
        num_images = changes.num_redecoded
    else:
        # Of inputs of which each has changed, nothing could be kept by any settings.
        num_images = 0 if plan.extends_parent else min(parent.counts.accepted, plan.num_images)
    if not num_images:
        return
    what = f"{num_images:,} of the {parent.counts.accepted:,} images of version {parent.version}"
    reasons = "; ".join(_reasons(plan, parent)) or "other settings"
    limit = plan.task.config.max_redecoded_fraction
    if num_images > limit * parent.counts.accepted:
        raise RejectLimitExceeded(
            f"{what} would be decoded again, because of {reasons}",
            f"etl.max_redecoded_fraction allows {limit:g}; nothing was read or published",
            f"go back to the settings and the decoders of version {parent.version}, or raise the limit",
        )
    yield f"{what} are decoded again, because of {reasons}"


def _reasons(plan: BuildPlan, parent: Manifest) -> Iterator[str]:
    build = plan.build
    if parent.decoder_id != build.decoder_id:
        yield f"the decoder ({', '.join(_differences(_parts(parent.decoder_id), _parts(build.decoder_id)))})"
    others = etl_settings_of(REBUILDS_NOTHING)
    before, now = (
        {name: value for name, value in config.items() if name not in others}
        for config in (parent.config, build.config)
    )
    if settings := list(_differences(before, now)):
        yield f"the config ({name_some([f'etl.{each}' for each in settings])})"
    columns = list(_differences(parent.columns, build.columns))
    if columns or parent.class_names != build.class_names[: len(parent.class_names)]:
        yield f"columns and classes ({name_some(columns) or 'classes have other numbers'})"
    if parent.source.names_splits and not build.source.names_splits:
        yield "the splits, which the source names no more"
    if parent.decoder_id == build.decoder_id and not settings and not columns and plan.task.source.image_fields():
        yield f"source.image_field = {printable(plan.task.source.image_fields())}"


def _parts(decoder_id: str) -> dict[str, str]:
    """Name -> version of each part of an id such as `rules-6+pillow-11.0`."""
    found = (re.fullmatch(r"(.+?)-([^-]*)", part) for part in decoder_id.split("+"))
    return {match[1]: match[2] for match in found if match}


def _differences(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*before, *now}):
        old, new = before.get(name, _default(name)), now.get(name, _default(name))
        if old != new:
            was, is_now = ("none" if each is None else printable(str(each)) for each in (old, new))
            yield f"{name} {was} -> {is_now}"


def _default(name: str) -> Any:
    """Of a setting that an older config did not have."""
    field = EtlConfig.model_fields.get(name)
    return None if field is None else field.get_default(call_default_factory=True)


NO_LIMIT = 1.0
"""No drift is larger."""


def check_drift(store: Store, config: EtlConfig, draft: Manifest) -> None:
    """Raise DriftLimitExceeded (7) if the version that is about to be committed has drifted beyond the limit."""
    if config.max_drift >= NO_LIMIT:
        return
    drift = drift_of(store, config, draft)
    if drift is None or drift.amount <= config.max_drift:
        return
    next_baseline = ", then set etl.drift_baseline to the new version" if config.drift_baseline else ""
    raise DriftLimitExceeded(
        f"the new version of {store.uri} has drifted by {amount_words(drift.amount)} from @{drift.against_version}: "
        f"{drift.words_above(config.max_drift)}",
        f"etl.max_drift allows {config.max_drift:g}; nothing was published",
        "restore what the source has lost or changed; if the change is meant, run it once with --set etl.max_drift=1"
        f"{next_baseline} (finished work units are kept)",
        detail={"drift": drift.model_dump(mode="json")},
    )


def drift_of(store: Store, config: EtlConfig, manifest: Manifest) -> Drift | None:
    """From the baseline of the config, or the version before; None for the first version."""
    before = baseline_of(store, manifest, config.drift_baseline)
    return None if before is None else measure_drift(before, manifest)


def check_boxes_left(draft: Manifest) -> None:
    """Raise UsageError if boxes were dropped, and no image has one left. Only classes of boxes tell what is left."""
    dropped = [note for note in draft.counts.by_note if note.startswith(DROPPED_NOTE)]
    if BOX_LABELS not in draft.columns or not dropped or any(sum(each.class_counts) for each in draft.splits.values()):
        return
    raise UsageError(
        "all boxes of the source lie outside of what is kept of their images",
        "expected boxes in pixels of the upright source",
        "check source.boxes.format, and set etl.resize_mode to pad or stretch, which keep all of an image",
    )
