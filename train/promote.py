"""Which export is the current one: a gate that compares, and a numbered pointer that only one writer can set.

<models>/current/00000001.json      the highest number is the current one; older ones tell the history
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

import numpy as np

from shardmill.dataset import Dataset, open_pinned
from shardmill.errors import CommitConflict, GateNotPassed, UsageError
from shardmill.options import Section
from shardmill.storage import Store, open_store
from train.config import GateConfig
from train.evaluate import evaluate_predictions
from train.export import Export, load_exported, read_export
from train.records import put_record, read_record, record_numbers
from train.values import Evaluation

CURRENT = "current"

Decision = Literal["promoted", "kept", "already_current", "rolled_back"]


class Pointer(Section):
    """One change of the current export."""

    export: int
    previous: int | None
    """The export to which a rollback goes; None for the first."""
    decision: Decision
    reason: str
    accuracy: float | None
    """Top-1 of the export on the split by which it was judged."""
    run_id: str
    created_at: str
    """UTC, ISO 8601."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate says of a candidate."""

    decision: Decision
    reason: str
    candidate_accuracy: float | None
    current_accuracy: float | None


@dataclass(frozen=True, slots=True)
class Promotion:
    """What became of a candidate."""

    gate: GateDecision
    previous: int | None
    """The export that was current before."""
    current: int | None
    """The export that is current now."""


def decide(candidate: Evaluation | None, current: Evaluation | None, gate: GateConfig) -> GateDecision:
    """The gate's rule, on figures over the same split. `current` is None where no export is current yet."""
    if candidate is None:
        return GateDecision("kept", "there is no test or validation split to judge by", None, None)
    accuracy = candidate.accuracy
    before = current.accuracy if current is not None else None
    on = f"on {candidate.num_samples} {candidate.split} samples"
    if accuracy < gate.min_accuracy:
        reason = f"accuracy {accuracy:.4f} {on} is below gate.min_accuracy = {gate.min_accuracy:g}"
        return GateDecision("kept", reason, accuracy, before)
    if before is not None and accuracy < before - gate.max_regression:
        reason = (
            f"accuracy {accuracy:.4f} {on} falls behind the current model's {before:.4f} "
            f"by more than gate.max_regression = {gate.max_regression:g}"
        )
        return GateDecision("kept", reason, accuracy, before)
    than = "there was no current model" if before is None else f"the current model has {before:.4f}"
    reason = f"accuracy {accuracy:.4f} {on} reaches gate.min_accuracy = {gate.min_accuracy:g}; {than}"
    return GateDecision("promoted", reason, accuracy, before)


def judge(models_uri: str, candidate: Export, gate: GateConfig) -> tuple[GateDecision, Pointer | None]:
    """Compare an export with the one that is current now, on the candidate's own dataset version.

    -> the decision, and the pointer that it was made against.
    """
    store = open_store(models_uri)
    pointer = read_pointer(store)
    evaluation = candidate.record.evaluation
    accuracy = evaluation.accuracy if evaluation is not None else None
    if pointer is None:
        return decide(evaluation, None, gate), None
    if pointer.export == candidate.number:
        reason = f"export {candidate.number} is the current one"
        return GateDecision("already_current", reason, accuracy, accuracy), pointer
    if candidate.number in _rolled_back(store):
        reason = f"export {candidate.number} was promoted before and rolled back"
        return GateDecision("kept", reason, accuracy, None), pointer
    if evaluation is None:
        return decide(None, None, gate), pointer
    dataset = open_pinned(candidate.record.dataset)
    current = read_export(models_uri, pointer.export)
    if current.record.normalize.image_shape_HWC != candidate.record.normalize.image_shape_HWC:
        shapes = f"{current.record.normalize.image_shape_HWC}, not {candidate.record.normalize.image_shape_HWC}"
        reason = (
            f"the current export {current.number} takes images of {shapes}: the two cannot be compared on one split"
        )
        return GateDecision("kept", reason, accuracy, None), pointer
    return decide(evaluation, evaluate_export(models_uri, pointer.export, dataset, evaluation.split), gate), pointer


def evaluate_export(models_uri: str, number: int, dataset: Dataset, split: str) -> Evaluation:
    """Exact figures of an export on a split of a dataset whose images have its size."""
    model = load_exported(models_uri, number)
    names, wanted_names = model.export.record.class_names, dataset.manifest.class_names
    shape = model.export.record.normalize.image_shape_HWC
    if shape != dataset.manifest.normalize.image_shape_HWC:
        raise UsageError(
            f"export {number} takes images of {shape}",
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} holds {dataset.manifest.normalize.image_shape_HWC}",
        )
    return evaluate_predictions(_by_name(model.predict, names, wanted_names), dataset, split)


def promote_export(
    models_uri: str, candidate: Export, gate: GateConfig, run_id: str, *, require: bool = False
) -> Promotion:
    """Make an export the current one if the gate lets it pass; a pointer that another run set meanwhile is judged anew.

    Raises GateNotPassed where it does not pass and `require` is set.
    """
    store = open_store(models_uri)
    while True:
        number = max(record_numbers(store, CURRENT), default=0) + 1
        decision, pointer = judge(models_uri, candidate, gate)
        before = pointer.export if pointer is not None else None
        if decision.decision != "promoted":
            if require and decision.decision == "kept":
                raise GateNotPassed(
                    f"export {candidate.number} was not promoted: {decision.reason}",
                    f"export {before} stays current" if before is not None else "there is no current export",
                )
            return Promotion(decision, before, before)
        new = Pointer(
            export=candidate.number,
            previous=before,
            decision="promoted",
            reason=decision.reason,
            accuracy=decision.candidate_accuracy,
            run_id=run_id,
            created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        )
        if put_record(store, CURRENT, number, new):
            return Promotion(decision, before, candidate.number)


def roll_back(models_uri: str, run_id: str) -> Promotion:
    """Make current again what was so before the current export was promoted.

    Raises UsageError where nothing was, and CommitConflict where another run changed the current export meanwhile: what
    somebody wanted to undo is no longer what is current, so a rollback is never made again against the winner.
    """
    store = open_store(models_uri)
    number = max(record_numbers(store, CURRENT), default=0) + 1
    history = read_history(store)
    if not history or history[-1].previous is None:
        raise UsageError(
            f"{models_uri} has nothing to roll back to",
            "expected an export that was current before",
            "`shardmill promote` makes an export current",
        )
    now, target = history[-1], history[-1].previous
    # What was current before the target: so a second rollback goes further back, not forth again.
    promoted = next(each for each in reversed(history[:-1]) if each.export == target)
    new = Pointer(
        export=target,
        previous=promoted.previous,
        decision="rolled_back",
        reason=f"export {now.export} was rolled back",
        accuracy=promoted.accuracy,
        run_id=run_id,
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    if not put_record(store, CURRENT, number, new):
        winner = read_record(store, CURRENT, number, Pointer)
        raise CommitConflict(
            f"run {winner.run_id} made export {winner.export} current ({winner.decision}) while run {run_id} "
            f"rolled back in {models_uri}",
            "expected no other writer; this run changed nothing",
            "look at what is current now; roll back again if that is still wanted",
        )
    return Promotion(GateDecision("rolled_back", new.reason, new.accuracy, now.accuracy), now.export, target)


def read_pointer(store: Store) -> Pointer | None:
    """Which export is current, or None."""
    numbers = record_numbers(store, CURRENT)
    return read_record(store, CURRENT, numbers[-1], Pointer) if numbers else None


def read_history(store: Store) -> list[Pointer]:
    """Every change of the current export, oldest first."""
    return [read_record(store, CURRENT, number, Pointer) for number in record_numbers(store, CURRENT)]


def current_export(models_uri: str) -> Export:
    """The current export. Raises UsageError where none was ever promoted."""
    pointer = read_pointer(open_store(models_uri))
    if pointer is None:
        raise UsageError(
            f"{models_uri} has no current model",
            "expected a promoted export",
            "`shardmill promote`, or name an export: URI@1",
        )
    return read_export(models_uri, pointer.export)


def _rolled_back(store: Store) -> set[int]:
    """Exports that a rollback has taken out, and that nobody has made current since."""
    taken_out: set[int] = set()
    before: Pointer | None = None
    for pointer in read_history(store):
        if pointer.decision == "rolled_back" and before is not None:
            taken_out.add(before.export)
        taken_out.discard(pointer.export)
        before = pointer
    return taken_out


def _by_name(
    predict: Callable[[np.ndarray], np.ndarray], names: tuple[str, ...], wanted_names: tuple[str, ...]
) -> Callable[[np.ndarray], np.ndarray]:
    """`predict` with its columns in the order of `wanted_names`: a class that the model never saw has probability 0."""
    if names == wanted_names:
        return predict
    columns = [names.index(name) if name in names else len(names) for name in wanted_names]

    def predict_wanted(images_NHWC: np.ndarray) -> np.ndarray:
        probabilities_NK = predict(images_NHWC)
        unseen_N1 = np.zeros((len(probabilities_NK), 1), probabilities_NK.dtype)
        return np.concatenate([probabilities_NK, unseen_N1], axis=1)[:, columns]

    return predict_wanted
