"""The gate: is this export good enough to become the current one? docs/promotion.md is its decision table."""

from __future__ import annotations

from collections.abc import Callable

from train.contracts.values import METRICS, Evaluation
from train.labels import check_gate
from train.published.current import History
from train.published.decision import Comparison, GateDecision, Incomparable
from train.published.exported import Export
from train.settings.gate import GateConfig

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
    below = _below_floor(candidate, gate)
    # The floor comes first: it holds also if there is no current export, or one that cannot be compared.
    if candidate is None or below:
        return GateDecision("kept", below, candidate.figure if candidate else None, None, _metric(candidate), False)
    metric, figure, before = candidate.metric, candidate.figure, None
    num_samples = candidate.num_samples
    name, limit = _limit(gate, candidate)
    reached = f"{metric.words} {_on(candidate)} reaches {name} = {limit:g}"
    if not limit and name == "gate.metric_limit":
        reached = f"{metric.words} {_on(candidate)}, without a limit because {name} is not set"
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
        figure, before = against.candidate_figure, against.current_figure
        num_samples = against.num_samples
        is_promoted = metric.reaches(figure, metric.limit_after(before, gate.max_regression))
        compared = f"{metric.words} {figure:.4f} on {num_samples} {candidate.split} samples{against.on}"
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
    return GateDecision("promoted" if is_promoted else "kept", reason, figure, before, metric.name, is_promoted)


def judge(
    models_uri: str,
    candidate: Export,
    history: History,
    gate: GateConfig,
    compare: Callable[[], Comparison | Incomparable | None],
    *,
    replace_current: bool = False,
) -> GateDecision:
    """Whether an export may follow what `history` says is current. `compare` is called only if that depends on it."""
    evaluation = candidate.record.evaluation
    check_gate(gate, candidate.record.label_kind)
    figure = evaluation.figure if evaluation is not None else None
    metric = _metric(evaluation)
    if history.current is not None and history.current.export == candidate.number:
        below = _below_floor(evaluation, gate)
        reason = f"export {candidate.number} is the current one" + (f", but {below}" if below else "")
        return GateDecision("already_current", reason, figure, figure, metric, is_passed=not below)
    if history.was_rolled_back(candidate.number):
        # A person took it back. A scheduled run finds the same export again and must not undo that.
        doubt = f" ({history.damage})" if history.damage else ""
        reason = f"export {candidate.number} was promoted before and rolled back{doubt}; `shardmill promote "
        reason += f"{models_uri}@{candidate.number}` makes it current again"
        return GateDecision("kept", reason, figure, None, metric, is_passed=False)
    if candidate.record.caution:
        reason = f"{candidate.record.caution}; `shardmill promote {models_uri}@{candidate.number}` promotes it anyway"
        return GateDecision("kept", reason, figure, None, metric, is_passed=False)
    if _below_floor(evaluation, gate):
        # Refused already; the current export need not be loaded and evaluated for it.
        return decide(evaluation, None, gate)
    return decide(evaluation, compare(), gate, replace_current=replace_current)


def _below_floor(candidate: Evaluation | None, gate: GateConfig) -> str:
    """Why a candidate does not reach the floor; empty if it does."""
    if candidate is None:
        return "there is no test or validation split to evaluate on"
    metric, (name, limit) = candidate.metric, _limit(gate, candidate)
    if limit and not metric.reaches(candidate.figure, limit):
        return (
            f"{metric.words} {_on(candidate)} is {'below' if metric.higher_is_better else 'above'} {name} = {limit:g}"
        )
    return ""


def _limit(gate: GateConfig, candidate: Evaluation) -> tuple[str, float]:
    """The setting that bounds the candidate's figure, and its value; 0 for no bound."""
    if candidate.label_kind == "class" and gate.min_accuracy >= gate.metric_limit:
        return "gate.min_accuracy", gate.min_accuracy
    return "gate.metric_limit", gate.metric_limit


def _metric(evaluation: Evaluation | None) -> str:
    return (evaluation.metric if evaluation is not None else METRICS["class"]).name


def _on(evaluation: Evaluation) -> str:
    return f"{evaluation.figure:.4f} on {evaluation.num_samples} {evaluation.split} samples"
