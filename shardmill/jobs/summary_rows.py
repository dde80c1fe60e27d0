"""The rows in which people read the summary of a run, or of one stage: in a terminal, and in a notebook."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from shardmill.result import Rows
from shardmill.words import counted, reasons, rejected

if TYPE_CHECKING:
    from shardmill.jobs.run_files import StageRecord

# Less is printed as 0.00.
_DRIFT_SHOWN = 0.005
_JUDGED = {"promoted": "would be promoted", "kept": "would not be promoted"}
"""By the gate, which changes nothing."""


def summary_rows(summary: Mapping[str, Any]) -> Rows:
    """A whole run: the sections of its summary that people need first."""
    evaluation = _evaluation_rows(summary)
    if not evaluation and "evaluate" in summary["stages"]:
        evaluation = [("evaluation", "no split for it")]
    report = [("report", summary["report"]["path"])] if summary.get("report") else []
    is_old = summary["stages"].get("etl", {}).get("status") == "skipped"
    return [
        *_dataset_rows(summary, is_old=is_old),
        *_training_rows(summary),
        *evaluation,
        *_decision_rows(summary),
        *report,
    ]


def stage_rows(record: StageRecord) -> Rows:
    """Prints the result of a single stage in readable form; `--json` prints all values."""
    sections = record.sections
    is_old = record.stage == "etl" and record.status == "skipped"
    rows = [*_dataset_rows(sections, is_old=is_old), *_training_rows(sections), *_evaluation_rows(sections)]
    if sections.get("export"):
        export = sections["export"]
        rows += [
            ("export", export["path"]),
            ("differs by", f"{export['parity_max_abs_diff']:.2g} maximum difference from the training model"),
        ]
    rows += [*_decision_rows(sections), *_prediction_rows(sections)]
    if sections.get("report"):
        rows.append(("report", sections["report"]["path"]))
    return rows


def _dataset_rows(sections: Mapping[str, Any], *, is_old: bool) -> Rows:
    """`is_old`: nothing was new, so that nothing has drifted."""
    dataset = sections.get("dataset")
    if not dataset:
        return []
    counts = dataset["counts"]
    in_order = sorted(counts["by_split"].items(), key=lambda split: ("train", "validation", "test").index(split[0]))
    splits = ", ".join(f"{name} {count:,}" for name, count in in_order)
    return [
        ("images", f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"),
        *_rejected_rows(dataset),
        ("splits", splits),
        ("dataset", f"{dataset['uri']}@{dataset['version']}"),
        *([] if is_old else _drift_rows(sections)),
    ]


def _rejected_rows(dataset: Mapping[str, Any]) -> Rows:
    named = reasons(dataset["counts"].get("by_reason") or {})
    version = shlex.quote(f"{dataset['uri']}@{dataset['version']}")
    return [("rejected", f"{named}; `shardmill inspect {version} --rejects` lists them")] if named else []


def _drift_rows(sections: Mapping[str, Any]) -> Rows:
    from shardmill.data_quality.drift import Drift

    if not sections.get("drift"):
        return []
    drift = Drift.model_validate(sections["drift"])
    moved = drift.words_above(_DRIFT_SHOWN) or "hardly any"
    return [("drift", f"from version {drift.against_version}: {moved}")]


def weights_words(train: Mapping[str, Any]) -> str:
    """`epoch 3, the best, is evaluated and exported`: people count from 1."""
    return f"epoch {train['weights_epoch'] + 1}, the {train['exported']}, is evaluated and exported"


def _training_rows(sections: Mapping[str, Any]) -> Rows:
    train = sections.get("train")
    if not train:
        return []
    size = (counted(train["world_size"], "rank"), counted(train["epochs"], "epoch"), counted(train["steps"], "step"))
    rows: Rows = [("training", f"{', '.join((train['strategy'], *size))}; {weights_words(train)}")]
    if found := train.get("initialized"):
        fresh = "; ".join((*found["replaced"], *(f"{name}: not in the file" for name in found["missing"])))
        arrays = f"{found['num_loaded']:,} of {counted(found['num_weights'], 'array')} from {found['source']}"
        rows.append(("began with", f"{arrays}; fresh: {fresh}" if fresh else arrays))
    return rows


def _evaluation_rows(sections: Mapping[str, Any]) -> Rows:
    evaluation = sections.get("evaluation")
    if not evaluation:
        return []
    shown = ("accuracy", "mean_average_precision", "mean_absolute_error", "loss")
    known = [f"{name.replace('_', ' ')} {evaluation[name]:.4f}" for name in shown if evaluation.get(name) is not None]
    metrics = f"{evaluation['split']} {', '.join(known)}"
    return [("evaluation", f"{metrics}, on {counted(evaluation['num_samples'], 'sample')}")]


def _decision_rows(sections: Mapping[str, Any]) -> Rows:
    decided = sections.get("promotion")
    if not decided:
        judged = sections.get("gate")
        return (
            [("model", f"{_JUDGED.get(judged['decision'], judged['decision'])}: {judged['reason']}")] if judged else []
        )
    store = [("models", decided["models"])] if decided.get("models") else []
    registered = [("registered", decided["registered"])] if decided.get("registered") else []
    return [*store, ("model", f"{decided['decision']}: {decided['reason']}"), *registered]


def _prediction_rows(sections: Mapping[str, Any]) -> Rows:
    made = sections.get("predictions")
    if not made:
        return []
    counts = made["counts"]
    num_rejected = rejected(counts["rejected"], counts["by_reason"])
    return [
        ("images", f"{counts['accepted']:,} predicted, {num_rejected} of {counts['listed']:,} listed"),
        ("by this run", f"{made['num_predicted']:,} read, {made['images_per_second']:.1f} a second"),
        ("model", made["model"]),
        ("predictions", f"{made['uri']}@{made['version']}"),
    ]
