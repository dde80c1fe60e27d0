"""Enforces the configured limits on rejected inputs: a build above a limit fails, and its ledger lists
all rejections.
"""

from __future__ import annotations

import shlex
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from etl.config import EtlConfig
from shardmill.dataset.ledger import SEGMENT_ROWS, RejectionLog, write_ledger
from shardmill.errors import RejectLimitExceeded, ShardmillError, StorageError
from shardmill.storage import join_uri
from shardmill.values import (
    NO_SUCH_FILE,
    OTHER_SIZE,
    REASONS_OUTSIDE_REJECT_FRACTION,
    TRANSIENT_REASONS,
    Rejection,
    RejectReason,
)
from shardmill.words import printable

if TYPE_CHECKING:
    from etl.plan import BuildPlan

_NUM_EXAMPLES = 3


def check_limits(plan: BuildPlan, rejections: RejectionLog) -> None:
    """Raise StorageError (4) or RejectLimitExceeded (7) if more was refused than a limit of the config allows."""
    config, num_listed = plan.task.config, plan.build.num_listed
    limit = broken_limit(config, rejections, num_listed)
    if limit is not None:
        ledger, *_ = write_ledger(plan.store, rejections)
        raise limit_error(limit, plan, rejections, join_uri(plan.store.uri, ledger.path))


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


def limit_error(limit: Limit, plan: BuildPlan, rejections: RejectionLog, ledger: str) -> ShardmillError:
    """The error for a broken limit: how many, why, three examples, and where the rest is listed."""
    counted, others = Counter[RejectReason](), Counter[RejectReason]()
    named: list[str] = []
    num_of_other_size = 0
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
    build, kind, verb, fix = plan.build, limit.kind, limit.verb, limit.fix
    if num_of_other_size == counted.total():
        # No later run will find the source as the table has it.
        kind, verb = RejectLimitExceeded, "have another size than size_bytes of their row"
        fix = "correct the column or leave it out"
    return kind(
        f"{counted.total()} of {build.num_listed} inputs {verb} ({_by_reason(counted)}), such as {such}{beside}",
        f"etl.{limit.key} allows {getattr(plan.task.config, limit.key):g}; nothing was published",
        f"{shown}: `shardmill inspect --rejects {shlex.quote(ledger)}`; {fix}",
        detail={
            "ledger": ledger,
            "source": build.source.uri,
            "source_kind": build.source.kind,
            "num_listed": build.num_listed,
        },
    )


def _by_reason(counts: Counter[RejectReason]) -> str:
    """Every reason with its count, the most frequent one first."""
    return ", ".join(f"{reason} {count}" for reason, count in counts.most_common())
