"""The three ways to change which export is the current one: through the gate, by name, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from shardmill.errors import CommitConflict, GateNotPassed, UsageError
from shardmill.stores import open_store
from train.contracts.values import METRICS
from train.published.exported import (
    CURRENT,
    Export,
    History,
    Pointer,
    now,
    read_export,
    read_history,
    set_current,
    unknown_current,
    verify_export,
)
from train.records import read_record


def promote_if_passed(
    models_uri: str,
    candidate: Export,
    decide: Callable[[History], GateDecision],
    run_id: str,
    *,
    require: bool = False,
) -> Promotion:
    """Make an export the current one if `decide` lets it pass; a pointer that another run set meanwhile is judged anew.

    Raises GateNotPassed if it does not pass and `require` is set, IntegrityError if its files are damaged.
    """
    verify_export(models_uri, candidate)
    store = open_store(models_uri)
    # Optimistic: judge against the history as read, then publish behind exactly that history. A writer that loses the
    # race judges again, against the winner. Each extra round means that another writer won.
    while True:
        history = read_history(store)
        decision = decide(history)
        before = history.current.export if history.current is not None else None
        if require and not decision.is_passed:
            raise GateNotPassed(
                f"export {candidate.number} was not promoted: {decision.reason}",
                f"export {before} stays current" if before is not None else "there is no current export",
            )
        if decision.decision != "promoted":
            # `already_current` may be this run's own work: an earlier try set the pointer and died before its record.
            return Promotion(models_uri, decision, before, before, _was_promoted(history, candidate.number, run_id))
        if _publish(models_uri, history, candidate.number, decision, run_id):
            return Promotion(models_uri, decision, before, candidate.number, True)


def choose_export(models_uri: str, number: int, run_id: str) -> Promotion:
    """Make export `number` the current one on the user's request, without the gate; also undoes a rollback.

    Raises UsageError if there is no such export, IntegrityError if it is damaged.
    """
    export = read_export(models_uri, number)
    verify_export(models_uri, export)
    evaluation = export.record.evaluation
    value = evaluation.metric_value if evaluation is not None else None
    metric = METRICS[export.record.label_kind].name
    while True:
        # Naming an export is the way out of a damaged or foreign newest record, so neither may be an error here.
        history = read_history(open_store(models_uri), is_layout_free=True)
        before = history.current.export if history.current is not None else None
        if before == number:
            decision = GateDecision("already_current", f"export {number} is the current one", value, value, metric)
            return Promotion(models_uri, decision, before, before)
        decision = GateDecision("chosen", f"export {number} was chosen by name, without the gate", value, None, metric)
        if _publish(models_uri, history, number, decision, run_id):
            return Promotion(models_uri, decision, before, number)


def roll_back(models_uri: str, run_id: str) -> Promotion:
    """Make current again what was so before the current export was promoted.

    Raises UsageError if nothing was, IntegrityError if that export is damaged, and CommitConflict if another run
    changed the current export meanwhile: what was to be undone is no longer what is current, so
    a rollback is never retried against the winner.
    """
    store = open_store(models_uri)
    history = read_history(store)
    if history.damage:
        raise unknown_current(models_uri, history)
    current, earlier = history.current, history.stack[:-1]
    if current is None or not earlier:
        raise UsageError(
            f"{models_uri} has nothing to roll back to",
            "expected an export that was current before",
            f"run `shardmill promote {models_uri}@N` to make any export current",
        )
    target = earlier.pop()
    restored = read_export(models_uri, target)
    verify_export(models_uri, restored)
    promoted = next((each for each in reversed(history.readable[:-1]) if each.export == target), None)
    new = Pointer(
        export=target,
        previous=earlier[-1] if earlier else None,
        replaced=current.export,
        decision="rolled_back",
        reason=f"export {target} is current again; export {current.export} was rolled back",
        accuracy=promoted.accuracy if promoted is not None else None,
        run_id=run_id,
        created_at=now(),
    )
    if not set_current(store, history, new):
        winner = read_record(store, CURRENT, history.next_number, Pointer)
        raise CommitConflict(
            f"run {winner.run_id} made export {winner.export} current ({winner.decision}) while run {run_id} "
            f"rolled back in {models_uri}",
            "expected no other writer; this run changed nothing",
            "check which export is current now; roll back again if you still want to",
        )
    metric = METRICS[restored.record.label_kind].name
    decision = GateDecision("rolled_back", new.reason, new.accuracy, current.accuracy, metric)
    return Promotion(models_uri, decision, current.export, target)


def _was_promoted(history: History, number: int, run_id: str) -> bool:
    current = history.current
    return current is not None and (current.export, current.decision, current.run_id) == (number, "promoted", run_id)


def _publish(models_uri: str, history: History, number: int, decision: GateDecision, run_id: str) -> bool:
    assert decision.decision in ("promoted", "chosen")
    before = history.current.export if history.current is not None else None
    pointer = Pointer(
        export=number,
        previous=before,
        replaced=before,
        decision=decision.decision,
        reason=decision.reason,
        accuracy=decision.candidate_value,
        run_id=run_id,
        created_at=now(),
    )
    return set_current(open_store(models_uri), history, pointer)


Decision = Literal["promoted", "kept", "already_current", "chosen", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate and current export on the same samples."""

    candidate_value: float
    current_value: float
    """Value of the labels' metric (train/labels.py)."""
    num_samples: int
    on: str = ""
    """The samples, if not all of the candidate's evaluation."""


@dataclass(frozen=True, slots=True)
class Incomparable:
    """Why the two cannot be compared."""

    reason: str
    is_damaged: bool = False
    """No machine can load the current export, so replacing it loses nothing."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision on a candidate by the gate, or by a person."""

    decision: Decision
    reason: str
    candidate_value: float | None = None
    current_value: float | None = None
    metric: str = METRICS["class"].name
    """Name of the metric: a field of `Evaluation`."""
    is_passed: bool = True
    """Whether the gate is passed; with `--require`, False is an error."""
    caution: str = ""
    """Why the candidate is hardly of use although nothing forbids it; most often empty."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The outcome of a candidate."""

    models_uri: str
    gate: GateDecision
    previous: int | None
    """The export that was current before."""
    current: int | None
    """The export that is current now."""
    is_published: bool = False
    """The gate let it pass in this run: in this call, or in an earlier try of the same run."""
    registered: str | None = None
    """The current export at the model registry, `models:/NAME/VERSION`; empty if that failed, None without one."""
