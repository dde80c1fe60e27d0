"""How much of a source may be refused before a build ends with nothing published."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from etl.config import EtlConfig
from shardmill.errors import RejectLimitExceeded, ShardmillError, StorageError
from shardmill.printable import printable
from shardmill.values import REASONS_OUTSIDE_REJECT_FRACTION, TRANSIENT_REASONS, Rejection, RejectReason

_NUM_EXAMPLES = 3


@dataclass(frozen=True, slots=True)
class Limit:
    """A share of the inputs, and the reasons that count against it."""

    key: str
    """The config key, in section `etl`, that holds the share."""
    reasons: frozenset[RejectReason]
    kind: type[ShardmillError]
    verb: str
    fix: str


# Access first: while it fails, nothing can be said about the images themselves.
LIMITS = (
    Limit(
        "max_unreadable_fraction", frozenset({RejectReason.UNREADABLE}), StorageError,
        "could not be read", "give this user access to them on every host, or raise the limit",
    ),
    Limit(
        "max_changed_fraction", frozenset({RejectReason.MISSING, RejectReason.SOURCE_CHANGED}), StorageError,
        "vanished or changed after they were listed", "run it again when the source is at rest, or raise the limit",
    ),
    Limit(
        "max_reject_fraction", frozenset(RejectReason) - TRANSIENT_REASONS - REASONS_OUTSIDE_REJECT_FRACTION,
        RejectLimitExceeded, "were rejected", "fix the source or raise the limit",
    ),
)  # fmt: skip


def broken_limit(config: EtlConfig, rejections: Sequence[Rejection], num_listed: int) -> Limit | None:
    """The first limit that the rejections exceed. More rejections never heal it, so it may be asked half-way."""
    counts = Counter(rejection.reason for rejection in rejections)
    num_images = num_listed - sum(counts[reason] for reason in REASONS_OUTSIDE_REJECT_FRACTION)
    for limit in LIMITS:
        if sum(counts[reason] for reason in limit.reasons) > getattr(config, limit.key) * num_images:
            return limit
    return None


def limit_error(
    limit: Limit, config: EtlConfig, rejections: Sequence[Rejection], num_listed: int, ledger: str
) -> ShardmillError:
    """What a person is told: how many, why, three of them, and where the rest is."""
    counted = [rejection for rejection in rejections if rejection.reason in limit.reasons]
    top = ", ".join(f"{reason} {count}" for reason, count in Counter(each.reason for each in counted).most_common(3))
    examples = ", ".join(f"{printable(each.key)}: {each.reason}" for each in counted[:_NUM_EXAMPLES])
    return limit.kind(
        f"{len(counted)} of {num_listed} inputs {limit.verb} ({top}), such as {examples}",
        f"etl.{limit.key} allows {getattr(config, limit.key):g}; nothing was published",
        f"all of them: `shardmill inspect --rejects {shlex.quote(ledger)}`; {limit.fix}",
    )
