"""Faults of ranks: selects the cause among several faults, and builds the error that reports it; pure."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from shardmill.errors import ShardmillError, TrainingError
from shardmill.registry import line_of_user, message_of
from shardmill.values import Cursor
from train.launching.messages import Failure

FIX = "fix the cause, then run the same command again: it resumes from the last complete checkpoint"
NUM_TRACEBACK_LINES = 30


class FaultKind(StrEnum):
    """The way in which a fault appears to the driver."""

    FAILED = "failed"
    """The rank's function raised, and the rank reported it."""
    KILLED = "killed"
    """Its process ended without a report."""
    SILENT = "silent"
    STALLED = "stalled"
    """It is alive, but its main thread makes no progress."""
    ABSENT = "absent"
    """Ranks did not start in time."""
    LAUNCHER = "launcher"
    """The program that started the ranks reports a failure, usually without its cause."""
    COLLECTIVE = "collective"
    """A survivor's "connection closed": a secondary error of another rank's fault."""


# A rank that ended like this is lost; the work can continue without it.
LOSSES = {FaultKind.KILLED, FaultKind.SILENT, FaultKind.STALLED}

# Of several faults the one with the lowest number is the cause, the earliest of equals.
RANK_OF_KIND = dict.fromkeys(FaultKind, 0) | {FaultKind.LAUNCHER: 1, FaultKind.COLLECTIVE: 2}

# The first fault need not be the cause. Other faults of the same cause arrive within this time. If so far only
# secondary errors ("connection closed") have arrived, the cause arrives within the longer one.
GRACE_SECONDS = 1.0
SECONDARY_GRACE_SECONDS = 4.0


@dataclass(frozen=True, slots=True)
class RankFault:
    """One thing that went wrong with one rank."""

    kind: FaultKind
    rank: int
    """-1 if it is not one rank's."""
    where: str
    """Host and process; empty before the rank has said hello."""
    seen_seconds: float
    """Time on the driver's monotonic clock."""
    what: str = ""
    last_step: Cursor | None = None
    failure: Failure | None = None
    returncode: int | None = None
    output_tail: str = ""


class RankLost(TrainingError):
    """Ranks were killed from outside, fell silent or stood still: no error of the user's, and no bad input."""

    ranks: frozenset[int] = frozenset()
    """Empty if only the connection between ranks was lost."""
    last_step: Cursor | None = None
    """Last step of the rank that was the cause."""


def failure_of(error: BaseException, secondary: re.Pattern[str] | None = None) -> Failure:
    """Build the message that a rank sends to its driver when its function raises. `secondary`:
    `Strategy.secondary_error`.
    """
    text = "".join(traceback.format_exception(error))
    tail = "\n".join(text.rstrip().splitlines()[-NUM_TRACEBACK_LINES:])
    last = traceback.extract_tb(error.__traceback__)[-1:]
    place = line_of_user(error) or "".join(f"{frame.filename}:{frame.lineno}" for frame in last)
    if isinstance(error, ShardmillError):
        # Other errors of ours are about data or config: a store's "connection reset" says nothing of another rank.
        collective = isinstance(error, TrainingError) and _is_secondary(error, secondary)
        return Failure(
            type(error).__name__, error.what, error.expected, error.fix, error.exit_code, collective, tail, place
        )
    what, code = message_of(error), TrainingError.exit_code
    return Failure(type(error).__name__, what, "", "", code, _is_secondary(error, secondary), tail, place)


def merged(older: RankFault | None, newer: RankFault) -> RankFault:
    """Two observations of one rank's end as one: its own report counts more than its exit; the time is the earlier."""
    if older is None:
        return newer
    reported, other = (newer, older) if newer.failure is not None and older.failure is None else (older, newer)
    return replace(
        reported,
        seen_seconds=min(older.seen_seconds, newer.seen_seconds),
        where=reported.where or other.where,
        last_step=reported.last_step or other.last_step,
        returncode=reported.returncode if reported.returncode is not None else other.returncode,
        output_tail=reported.output_tail or other.output_tail,
    )


def is_cause_known(faults: Collection[RankFault], now: float) -> bool:
    """Whether all that could be the cause of the others, of which there is one, has been seen by `now`."""
    first_seconds = min(fault.seen_seconds for fault in faults)
    has_cause = any(RANK_OF_KIND[fault.kind] == 0 for fault in faults)
    return now - first_seconds > (GRACE_SECONDS if has_cause else SECONDARY_GRACE_SECONDS)


def root_cause(faults: Iterable[RankFault], secondary: re.Pattern[str]) -> RankFault:
    """The earliest fault that can be a cause; else what the launcher reports; else the earliest secondary error.

    `secondary`: `Strategy.secondary_error`, which matches the errors of ranks that only lost a peer.
    """
    return min(
        (_reclassified(fault, secondary) for fault in faults),
        key=lambda fault: (RANK_OF_KIND[fault.kind], fault.seen_seconds),
    )


def error_of_all(faults: Collection[RankFault], secondary: re.Pattern[str]) -> ShardmillError:
    """The error of the root cause; a RankLost if the remaining ranks could continue."""
    cause = root_cause(faults, secondary)
    error = error_of(cause)
    if not _is_loss(cause) and cause.kind is not FaultKind.COLLECTIVE:
        return error
    lost = RankLost(*(getattr(error, part) for part in ("what", "expected", "fix")))
    for note in getattr(error, "__notes__", ()):
        lost.add_note(note)
    lost.ranks = frozenset(each.rank for each in faults if each.rank >= 0 and _is_loss(_reclassified(each, secondary)))
    lost.last_step = cause.last_step
    return lost


def error_of(fault: RankFault) -> ShardmillError:
    """One line for the person who reads it; the traceback or the last output of the rank are its notes."""
    failure = fault.failure
    if failure is not None and failure.is_ours:
        error = failure.as_raised(f" (rank {fault.rank}, {fault.where})")
    else:
        error = TrainingError(_sentence(fault), fix=FIX)
    if failure is not None:
        error.add_note(f"traceback of rank {fault.rank}:\n{failure.traceback}")
    if fault.output_tail:
        whose = f"rank {fault.rank}" if fault.rank >= 0 else "the ranks"
        error.add_note(f"last output of {whose}:\n{fault.output_tail}")
    return error


def _is_loss(fault: RankFault) -> bool:
    """Whether something from outside took the rank away; one that ended itself would do so again."""
    ended_itself = fault.kind is FaultKind.KILLED and fault.returncode is not None and fault.returncode >= 0
    return fault.kind in LOSSES and not ended_itself


def _reclassified(fault: RankFault, secondary: re.Pattern[str]) -> RankFault:
    # Gloo may also end a survivor with an uncaught C++ exception: it dies of SIGABRT, and stderr holds the text.
    if fault.kind is FaultKind.KILLED and secondary.search(fault.output_tail) and fault.returncode == -signal.SIGABRT:
        return replace(fault, kind=FaultKind.COLLECTIVE)
    return fault


def _is_secondary(error: BaseException | None, secondary: re.Pattern[str] | None) -> bool:
    while secondary is not None and error is not None:
        if secondary.search(f"{type(error).__name__}: {error}"):
            return True
        error = error.__cause__ or error.__context__
    return False


def _sentence(fault: RankFault) -> str:
    rank = f"rank {fault.rank} ({fault.where})" if fault.where else f"rank {fault.rank}"
    after = "before its first step"
    if fault.last_step is not None:
        after = f"after step {fault.last_step.step} of epoch {fault.last_step.epoch}"
    said = last_line(fault.output_tail)
    match fault.kind:
        case FaultKind.FAILED | FaultKind.COLLECTIVE if fault.failure is not None:
            return f"{rank} failed {after}: {fault.failure}"
        case FaultKind.SILENT:
            return f"{rank} stopped sending heartbeats {after}: {fault.what}"
        case FaultKind.STALLED if fault.rank >= 0:
            return f"{rank} hangs {after}: {fault.what}"
        case FaultKind.KILLED | FaultKind.COLLECTIVE:
            return f"{rank} {how_it_ended(fault.returncode)} {after}{f': {said}' if said else ''}"
        case _:
            return f"{fault.what}{f': {said}' if said else ''}"


def how_it_ended(returncode: int | None) -> str:
    """Describe the end of a process that reported nothing."""
    if returncode is None:
        return "was killed by an unknown signal"
    if returncode < 0:
        try:
            return f"was killed by {signal.Signals(-returncode).name}"
        except ValueError:
            return f"was killed by signal {-returncode}"
    return f"exited with code {returncode}"


def last_line(text: str) -> str:
    """Return the last line of an ended process's output, shortened to fit into a sentence."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
