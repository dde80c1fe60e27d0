"""The gate: is this export good enough to become the current one? docs/promotion.md is its decision table.

Shape legend: N batch, H height, W width, C channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from shardmill.dataset.dataset import Dataset
from shardmill.dataset.open import open_pinned
from shardmill.errors import IntegrityError, UsageError
from shardmill.stores import open_store
from train.config import GateConfig
from train.evaluate import evaluate_predictions
from train.published.current import History, read_history
from train.published.exported import EXPORTS, Export, ExportedModel, load_exported
from train.records import record_numbers
from train.values import Evaluation

FEW_SAMPLES = 30

Decision = Literal["promoted", "kept", "already_current", "chosen", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate and current export on the same samples."""

    candidate_accuracy: float
    current_accuracy: float
    num_samples: int
    on: str = ""
    """Which samples, if not all of the candidate's evaluation."""


@dataclass(frozen=True, slots=True)
class Incomparable:
    """Why the two cannot be compared."""

    reason: str
    is_damaged: bool = False
    """No machine can load the current export: nothing is lost when it is replaced."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """What the gate says of a candidate, or a person instead of it."""

    decision: Decision
    reason: str
    candidate_accuracy: float | None = None
    current_accuracy: float | None = None
    is_passed: bool = True
    """With `--require`, False is an error."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A decision, and the history that it was made against."""

    gate: GateDecision
    history: History


def decide(
    candidate: Evaluation | None,
    against: Comparison | Incomparable | None,
    gate: GateConfig,
    *,
    replace_current: bool = False,
) -> GateDecision:
    """The gate's rule. `against` is None if no export is current.

    `replace_current`: a person has decided that a current export with which nothing can be compared may go.
    """
    below = _below_floor(candidate, gate)
    # The floor comes first: it holds also if there is no current export, or one that cannot be compared.
    if candidate is None or below:
        return GateDecision("kept", below, candidate.accuracy if candidate else None, is_passed=False)
    accuracy, before = candidate.accuracy, None
    num_samples = candidate.num_samples
    reached = f"accuracy {_on(candidate)} reaches gate.min_accuracy = {gate.min_accuracy:g}"
    is_promoted = True
    if against is None:
        reason = f"{reached}; there was no current model"
    elif isinstance(against, Incomparable):
        is_promoted = replace_current or against.is_damaged
        if against.is_damaged:
            reason = f"{reached}; {against.reason}, so nothing was compared"
        elif replace_current:
            reason = f"{reached}; replaced by --replace-current, because {against.reason}"
        else:
            reason = f"{against.reason}; `shardmill promote --replace-current` promotes without a comparison"
    else:
        accuracy, before = against.candidate_accuracy, against.current_accuracy
        num_samples = against.num_samples
        is_promoted = accuracy >= before - gate.max_regression
        compared = f"accuracy {accuracy:.4f} on {num_samples} {candidate.split} samples{against.on}"
        if not is_promoted:
            reason = (
                f"{compared} falls behind the current model's {before:.4f} "
                f"by more than gate.max_regression = {gate.max_regression:g}"
            )
        elif against.on:
            reason = f"{reached}; {compared} against the current model's {before:.4f}"
        else:
            reason = f"{reached}; the current model has {before:.4f}"
    if num_samples < FEW_SAMPLES:
        reason += f"; caution: {num_samples} samples are too few to tell models apart"
    return GateDecision("promoted" if is_promoted else "kept", reason, accuracy, before, is_promoted)


def judge(models_uri: str, candidate: Export, gate: GateConfig, *, replace_current: bool = False) -> Judgement:
    """Compare an export with the one that is current now, on the candidate's own dataset version."""
    history = read_history(open_store(models_uri))
    evaluation = candidate.record.evaluation
    accuracy = evaluation.accuracy if evaluation is not None else None
    if history.current is not None and history.current.export == candidate.number:
        below = _below_floor(evaluation, gate)
        reason = f"export {candidate.number} is the current one" + (f", but {below}" if below else "")
        decision = GateDecision("already_current", reason, accuracy, accuracy, is_passed=not below)
    elif history.was_rolled_back(candidate.number):
        # A person took it back. A scheduled run finds the same export again and must not undo that.
        doubt = f" ({history.damage})" if history.damage else ""
        reason = f"export {candidate.number} was promoted before and rolled back{doubt}; `shardmill promote "
        reason += f"{models_uri}@{candidate.number}` makes it current again"
        decision = GateDecision("kept", reason, accuracy, is_passed=False)
    elif _below_floor(evaluation, gate):
        # Refused already; the current export need not be loaded and evaluated for it.
        decision = decide(evaluation, None, gate)
    else:
        decision = decide(evaluation, _compare(models_uri, candidate, history), gate, replace_current=replace_current)
    return Judgement(decision, history)


def evaluate_export(model: ExportedModel, dataset: Dataset, split: str, among: Sequence[str] = ()) -> Evaluation:
    """Exact figures of an export on a split of a dataset whose images have its size.

    A class of the dataset that the export does not know gets probability 0. `among` limits its answers to these
    classes.
    """
    record, manifest = model.export.record, dataset.manifest
    if record.normalize.image_shape_HWC != manifest.normalize.image_shape_HWC:
        raise UsageError(
            f"export {model.export.number} takes images of {record.normalize.image_shape_HWC}",
            f"the dataset {dataset.pin.uri}@{dataset.pin.version} holds {manifest.normalize.image_shape_HWC}",
        )
    answers = by_name(model.predict, record.class_names, manifest.class_names, among)
    return evaluate_predictions(answers, dataset, split)


def by_name(
    predict: Callable[[np.ndarray], np.ndarray],
    names: Sequence[str],
    wanted_names: Sequence[str],
    among: Sequence[str] = (),
) -> Callable[[np.ndarray], np.ndarray]:
    """`predict` with its columns in the order of `wanted_names`; those not in `names`, or not in `among`, are 0."""
    given = {name: column for column, name in enumerate(names) if not among or name in among}
    # A wanted class without a column takes the column of zeros that is appended behind the last one.
    columns_K = [given.get(name, len(names)) for name in wanted_names]
    if columns_K == list(range(len(names))):
        return predict

    def predict_wanted(images_NHWC: np.ndarray) -> np.ndarray:
        probabilities_NK = predict(images_NHWC)
        zero_N1 = np.zeros((len(probabilities_NK), 1), probabilities_NK.dtype)
        return np.concatenate([probabilities_NK, zero_N1], axis=1)[:, columns_K]

    return predict_wanted


def _below_floor(candidate: Evaluation | None, gate: GateConfig) -> str:
    """Why a candidate does not reach the floor; empty if it does."""
    if candidate is None:
        return "there is no test or validation split to judge by"
    if candidate.accuracy < gate.min_accuracy:
        return f"accuracy {_on(candidate)} is below gate.min_accuracy = {gate.min_accuracy:g}"
    return ""


def _on(evaluation: Evaluation) -> str:
    return f"{evaluation.accuracy:.4f} on {evaluation.num_samples} {evaluation.split} samples"


def _compare(models_uri: str, candidate: Export, history: History) -> Comparison | Incomparable | None:
    """The candidate and the current export, on the split by which the candidate is judged."""
    if history.damage:
        return Incomparable(f"it is unknown which export is current ({history.damage})", is_damaged=True)
    if history.current is None:
        return None
    number = history.current.export
    # Damage of the current export must not block every later promotion: it is replaced without a comparison.
    if number not in record_numbers(open_store(models_uri), EXPORTS):
        return Incomparable(f"the record of the current export {number} is missing", is_damaged=True)
    try:
        current = load_exported(models_uri, number)
    except IntegrityError as error:
        return Incomparable(f"the current export {number} is damaged ({error.what})", is_damaged=True)
    if current.export.record.normalize.image_shape_HWC != candidate.record.normalize.image_shape_HWC:
        shape, other = (each.record.normalize.image_shape_HWC for each in (current.export, candidate))
        return Incomparable(f"the current export {number} takes images of {shape}, not {other}")
    return _compare_models(models_uri, candidate, current)


def _compare_models(models_uri: str, candidate: Export, current: ExportedModel) -> Comparison | Incomparable:
    """On the whole split if both know the same classes; else on the samples of the classes that both know, each model
    answering among those."""
    evaluation, names = candidate.record.evaluation, candidate.record.class_names
    assert evaluation is not None
    dataset = open_pinned(candidate.record.dataset)
    if set(names) == set(current.export.record.class_names):
        # The candidate's own figures are of this split already, measured when it was exported.
        figures = evaluate_export(current, dataset, evaluation.split)
        return Comparison(evaluation.accuracy, figures.accuracy, evaluation.num_samples)
    common = [name for name in names if name in current.export.record.class_names]
    num_samples = sum(dataset.manifest.splits[evaluation.split].class_counts[names.index(name)] for name in common)
    if not num_samples:
        return Incomparable(
            f"the current export {current.export.number} knows none of the classes of the {evaluation.split} split"
        )
    candidate_accuracy, current_accuracy = (
        _accuracy_among(common, evaluate_export(model, dataset, evaluation.split, common))
        for model in (load_exported(models_uri, candidate.number), current)
    )
    on = f" of the {len(common)} classes that both know (of {len(names)})"
    return Comparison(candidate_accuracy, current_accuracy, num_samples, on)


def _accuracy_among(names: list[str], evaluation: Evaluation) -> float:
    """Top-1 over the samples of these classes."""
    rows = [row for row, figures in enumerate(evaluation.per_class) if figures.name in names]
    return sum(evaluation.confusion[row][row] for row in rows) / sum(sum(evaluation.confusion[row]) for row in rows)
