"""The stages `gate` and `promote`: compares a candidate with the current export, decides, and makes it current."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from shardmill.dataset.dataset import Dataset, open_pinned
from shardmill.errors import IntegrityError
from shardmill.jobs.run_files import StageRecord
from shardmill.loader.reader import read_split
from shardmill.stores import open_store
from train.contracts.values import METRICS, Evaluation
from train.labels import check_gate
from train.published.evaluation import evaluate_export
from train.published.exported import EXPORTS, Export, ExportedModel, History, load_exported, read_history
from train.published.promote import Comparison, GateDecision, Incomparable, Promotion, promote_if_passed
from train.records import record_numbers
from train.settings import GateConfig

FEW_SAMPLES = 30


def decide(
    candidate: Evaluation | None,
    against: Comparison | Incomparable | None,
    gate: GateConfig,
    *,
    replace_current: bool = False,
) -> GateDecision:
    """The gate's rule. `against` is None if no export is current.

    `replace_current`: the user allows to replace a current export that cannot be compared.
    """
    problem = _floor_problem(candidate, gate)
    # The floor comes first: it holds also if there is no current export, or one that cannot be compared.
    if problem is not None:
        value = candidate.metric_value if candidate is not None else None
        return GateDecision("kept", problem, value, None, _metric_name(candidate), is_passed=False)
    assert candidate is not None
    metric, value, before = candidate.metric, candidate.metric_value, None
    num_samples = candidate.num_samples
    name, limit = _floor(gate, candidate)
    reached = f"{metric.words} {_measured(candidate)} reaches {name} = {limit:g}"
    if not limit and name == "gate.metric_limit":
        reached = f"{metric.words} {_measured(candidate)}, without a limit because {name} is not set"
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
            reason = f"{against.reason}; `shardmill promote MODELS --replace-current` promotes without a comparison"
    else:
        value, before = against.candidate_value, against.current_value
        num_samples = against.num_samples
        is_promoted = metric.reaches(value, metric.limit_after(before, gate.max_regression))
        compared = f"{metric.words} {value:.4f} on {num_samples} {candidate.split} samples{against.on}"
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
        reason += f"; caution: {num_samples} samples are too few to compare models"
    caution = _below_guessing(candidate)
    reason += f"; caution: {caution}" if caution else ""
    return GateDecision("promoted" if is_promoted else "kept", reason, value, before, metric.name, is_promoted, caution)


def _below_guessing(candidate: Evaluation) -> str:
    """That whoever always answers the most frequent class does better; empty if not, or if that is not known."""
    if candidate.label_kind != "class" or not candidate.per_class:
        return ""
    most = max(candidate.per_class, key=lambda each: each.num_samples)
    share = most.num_samples / candidate.num_samples
    if candidate.metric_value >= share:
        return ""
    return f"accuracy {_measured(candidate)} is below {share:.4f}, the share of the most frequent class, {most.name!r}"


def _judged(
    models_uri: str, candidate: Export, history: History, gate: GateConfig, *, replace_current: bool = False
) -> GateDecision:
    """Whether an export may follow what `history` says is current. The two are compared only if that depends on it."""
    evaluation = candidate.record.evaluation
    check_gate(gate, candidate.record.label_kind)
    value = evaluation.metric_value if evaluation is not None else None
    metric = _metric_name(evaluation)
    if history.current is not None and history.current.export == candidate.number:
        problem = _floor_problem(evaluation, gate)
        reason = f"export {candidate.number} is the current one" + (f", but {problem}" if problem else "")
        return GateDecision("already_current", reason, value, value, metric, is_passed=not problem)
    if history.was_rolled_back(candidate.number):
        # A person took it back. A scheduled run finds the same export again and must not undo that.
        doubt = f" ({history.damage})" if history.damage else ""
        reason = f"export {candidate.number} was promoted before and rolled back{doubt}; `shardmill promote "
        reason += f"{models_uri}@{candidate.number}` makes it current again"
        return GateDecision("kept", reason, value, None, metric, is_passed=False)
    if candidate.record.caution:
        reason = f"{candidate.record.caution}; `shardmill promote {models_uri}@{candidate.number}` promotes it anyway"
        return GateDecision("kept", reason, value, None, metric, is_passed=False)
    if _floor_problem(evaluation, gate):
        # Refused already; the current export need not be loaded and evaluated for it.
        return decide(evaluation, None, gate)
    against = compare_with_current(models_uri, candidate, history)
    return decide(evaluation, against, gate, replace_current=replace_current)


def _floor_problem(candidate: Evaluation | None, gate: GateConfig) -> str | None:
    """Why a candidate does not reach the floor; None if it does."""
    if candidate is None:
        return "there is no test or validation split to evaluate on"
    metric, (name, limit) = candidate.metric, _floor(gate, candidate)
    if limit and not metric.reaches(candidate.metric_value, limit):
        side = "below" if metric.higher_is_better else "above"
        return f"{metric.words} {_measured(candidate)} is {side} {name} = {limit:g}"
    return None


def _floor(gate: GateConfig, candidate: Evaluation) -> tuple[str, float]:
    """The setting that bounds the candidate's metric, and its value; 0 for no bound."""
    if candidate.label_kind == "class" and gate.min_accuracy >= gate.metric_limit:
        return "gate.min_accuracy", gate.min_accuracy
    return "gate.metric_limit", gate.metric_limit


def _metric_name(evaluation: Evaluation | None) -> str:
    return (evaluation.metric if evaluation is not None else METRICS["class"]).name


def _measured(evaluation: Evaluation) -> str:
    return f"{evaluation.metric_value:.4f} on {evaluation.num_samples} {evaluation.split} samples"


@dataclass(frozen=True, slots=True)
class Judgement:
    """The gate's current judgement of a candidate."""

    candidate: int
    current: int | None
    gate: GateDecision


def judge_export(models_uri: str, candidate: Export, gate: GateConfig) -> Judgement:
    """Return the decision that `promote_export` would make now; nothing is promoted."""
    history = read_history(open_store(models_uri))
    current = history.current.export if history.current is not None else None
    return Judgement(candidate.number, current, _judged(models_uri, candidate, history, gate))


def promote_export(
    models_uri: str,
    candidate: Export,
    gate: GateConfig,
    run_id: str,
    *,
    require: bool = False,
    replace_current: bool = False,
) -> Promotion:
    """Make an export the current one if the gate lets it pass.

    `replace_current`: the user allows to replace a current export that cannot be compared. Raises GateNotPassed if it
    does not pass and `require` is set, IntegrityError if its files are damaged.
    """
    decide_at = partial(_judged, models_uri, candidate, gate=gate, replace_current=replace_current)
    return promote_if_passed(models_uri, candidate, decide_at, run_id, require=require)


def gate_record(judgement: Judgement) -> StageRecord:
    """Return the gate's part of a run's summary."""
    section = {
        "decision": judgement.gate.decision,
        "reason": judgement.gate.reason,
        "current": judgement.current,
        "candidate": judgement.candidate,
    }
    return StageRecord(stage="gate", sections={"gate": section})


def promotion_record(promotion: Promotion) -> StageRecord:
    """Return the promotion's part of a run's summary."""
    section = {
        "models": promotion.models_uri,
        "decision": promotion.gate.decision,
        "reason": promotion.gate.reason,
        "previous": promotion.previous,
        "current": promotion.current,
        "published": promotion.is_published,
        "registered": promotion.registered,
        "metric": promotion.gate.metric,
        "candidate_value": promotion.gate.candidate_value,
        "current_value": promotion.gate.current_value,
    }
    status = "skipped" if promotion.gate.decision == "already_current" else "done"
    return StageRecord(stage="promote", status=status, sections={"promotion": section})


def compare_with_current(models_uri: str, candidate: Export, history: History) -> Comparison | Incomparable | None:
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
    (theirs, ours) = (each.record.labels for each in (current.export, candidate))
    if (theirs.kind, theirs.vector_size) != (ours.kind, ours.vector_size):
        return Incomparable(f"the current export {number} was trained on {theirs}, not {ours}")
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
    # Numbers have no names: two empty sets are equal.
    if set(names) == set(current.export.record.class_names):
        # The candidate's own metrics are of this split already, measured when it was exported.
        measured = _evaluated(current, dataset, evaluation.split)
        return Comparison(evaluation.metric_value, measured.metric_value, evaluation.num_samples)
    common = [name for name in names if name in current.export.record.class_names]
    num_samples = sum(dataset.manifest.splits[evaluation.split].class_counts[names.index(name)] for name in common)
    if not num_samples:
        return Incomparable(
            f"the current export {current.export.number} has none of the classes of the {evaluation.split} split"
        )
    candidate_value, current_value = (
        _metric_among(common, _evaluated(model, dataset, evaluation.split, common))
        for model in (load_exported(models_uri, candidate.number), current)
    )
    on = f" of the {len(common)} classes that both know (of {len(names)})"
    return Comparison(candidate_value, current_value, num_samples, on)


def _metric_among(names: list[str], evaluation: Evaluation) -> float:
    """Top-1 over the samples of these classes; of several classes an image, the mean average precision over these."""
    classes = [each for each in evaluation.per_class if each.name in names]
    if evaluation.label_kind == "multi_label":
        known = [each.average_precision for each in classes if each.average_precision is not None]
        return sum(known) / len(known)
    # A recall times its samples is the whole number that it was made from.
    num_right = sum(round(each.recall * each.num_samples) for each in classes)
    return num_right / sum(each.num_samples for each in classes)


def _evaluated(model: ExportedModel, dataset: Dataset, split: str, among: Sequence[str] = ()) -> Evaluation:
    with read_split(dataset, split, augment=model.export.record.unchanged) as batches:
        return evaluate_export(model, dataset, split, batches, among)
