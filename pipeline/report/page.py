"""From gathered figures to one HTML file: no script, nothing fetched, every label and path escaped."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.printing import counted
from pipeline.report.charts import Bar, Line, bar_chart, confusion_chart, empty, line_chart, share_bar
from pipeline.report.data import ReportData
from pipeline.report.html import duration, facts_table, figure, hex_loss, number, section, text, thumb
from train.values import ClassFigures

MAX_CONFUSION_CLASSES = 50
SHARE_NAMES = {
    "compute": "compute",
    "input_wait": "waiting for input",
    "allreduce": "allreduce",
    "checkpoint": "checkpoint",
    "other": "other",
}


def render(data: ReportData) -> str:
    """The whole page. A section whose stage never ran is left out."""
    style = (Path(__file__).parent / "report.css").read_text(encoding="utf-8")
    sections = "".join(
        part(data) for part in (_data, _rejected, _training, _evaluation, _decision, _how) if _has(part, data)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        # Whatever a label or a path holds, this page may load and run nothing.
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; img-src data:; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>shardmill run {text(data.run_id)}</title><style>{style}</style></head><body>"
        f'{_header(data)}<main class="page">{_cards(data)}{sections}'
        f"<footer>shardmill · run {text(data.run_id)} · made from summary.json and the stage records beside this file"
        "</footer></main></body></html>\n"
    )


def _has(part: Any, data: ReportData) -> bool:
    needed = {_data: data.class_counts, _rejected: data.class_counts, _training: data.history}
    needed |= {_evaluation: data.evaluation, _decision: data.summary.get("promotion")}
    return bool(needed.get(part, True))


def _header(data: ReportData) -> str:
    status = str(data.summary.get("status", "unknown"))
    kind = {"ok": "good", "failed": "bad"}.get(status, "plain")
    dataset = _part(data, "dataset")
    named = f"{dataset['uri']}@{dataset['version']}" if dataset.get("version") else "no dataset version"
    return (
        f'<header><div class="page"><h1>shardmill run <span class="pill {kind}">{text(status)}</span></h1>'
        f"<p>{text(data.run_id)} &nbsp;·&nbsp; {text(named)}</p></div></header>"
    )


def _cards(data: ReportData) -> str:
    summary = data.summary
    counts = _part(data, "dataset").get("counts", {})
    seconds = sum(record.seconds for record in data.stages)
    cards = [("images accepted", number(counts.get("accepted"))), ("images refused", number(counts.get("rejected")))]
    if summary.get("train"):
        size = summary["train"].get("world_size") or 1
        cards.append((f"rank{'s' * (size > 1)}, {summary['train'].get('strategy', '')}", number(size)))
    if data.evaluation is not None:
        cards.append((f"accuracy on {data.evaluation.split}", f"{data.evaluation.accuracy:.2%}"))
    if summary.get("promotion"):
        cards.append(("decision", str(summary["promotion"].get("decision", "-")).replace("_", " ")))
    cards.append(("all stages together", duration(seconds)))
    shown = "".join(f'<div class="card"><b>{text(value)}</b><span>{text(name)}</span></div>' for name, value in cards)
    error = data.summary.get("error")
    line = f'<p class="error"><b>ERROR {data.summary.get("exit_code")}</b> {text(error)}</p>' if error else ""
    warned = [(stage, each) for stage, messages in (summary.get("warnings") or {}).items() for each in messages]
    items = "".join(f"<li><b>{text(stage)}</b> {text(each)}</li>" for stage, each in warned)
    warnings = f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>' if warned else ""
    return f'<div class="cards">{shown}</div>{line}{warnings}'


def _data(data: ReportData) -> str:
    splits = list(data.class_counts)
    names = data.class_names or ("all images",)
    counts = _part(data, "dataset").get("counts", {}).get("by_split", {})
    bars = [
        Bar(name, tuple(float(data.class_counts[split][number]) for split in splits))
        for number, name in enumerate(names)
        if data.class_names
    ] or [Bar(split, (float(counts.get(split, 0)),)) for split in splits]
    part_names = splits if data.class_names else ["images"]
    etl = _part(data, "etl")
    notes = ", ".join(f"{text(name)} {count:,}" for name, count in sorted(data.notes.items()))
    return section(
        "The images",
        f"{number(counts and sum(counts.values()))} samples in "
        + text(", ".join(f"{split} {counts.get(split, 0):,}" for split in splits))
        + (f"; engine {text(etl.get('engine', ''))}" if etl.get("engine") else "")
        + (f", {etl['images_per_second']:,.0f} images a second." if etl.get("images_per_second") else "."),
        f'<div class="grid">{"".join(map(figure, data.samples))}</div>'
        f'<div class="two"><div><h3>Class balance per split</h3>'
        f"{bar_chart(bars, part_names=part_names, title='class balance')}</div>"
        f"<div><h3>Accepted with care</h3>"
        f'<p class="caption">{notes or "No sample needed more than decoding and resizing."}</p>'
        f"<h3>Time of each stage</h3>{_stage_bars(data)}</div></div>",
    )


def _stage_bars(data: ReportData) -> str:
    longest = max((record.seconds for record in data.stages), default=0) or 1
    rows = "".join(
        f"<tr><td>{text(record.stage)}</td><td>{text(record.status)}</td>"
        f'<td class="bar"><i style="width:{100 * record.seconds / longest:.1f}%"></i></td>'
        f'<td class="number">{text(duration(record.seconds))}</td></tr>'
        for record in data.stages
    )
    return f'<table><tr><th>stage</th><th>status</th><th></th><th class="number">time</th></tr>{rows}</table>'


def _rejected(data: ReportData) -> str:
    if not data.rejected:
        return section("What was refused", "Every listed input became a sample.", "")
    bars = [Bar(group.reason, (float(group.count),)) for group in data.rejected]
    rows = "".join(
        f"<tr><td>{thumb(picture)}</td><td><code>{text(group.reason)}</code></td><td>{text(rejection.key)}</td>"
        f'<td>{text(rejection.detail)}</td><td class="number">{rejection.size_bytes:,} B</td></tr>'
        for group in data.rejected
        for picture, rejection in group.examples
    )
    counts = _part(data, "dataset").get("counts", {})
    total = sum(group.count for group in data.rejected)
    return section(
        "What was refused",
        f"{total:,} of {number(counts.get('listed'))} listed inputs are in the rejects ledger, each with its reason. "
        "None is uncounted: listed = accepted + rejected.",
        f"{bar_chart(bars, part_names=['inputs'], title='rejects by reason')}<h3>A few of each</h3>"
        '<table><tr><th></th><th>reason</th><th>path</th><th>detail</th><th class="number">size</th></tr>'
        f"{rows}</table>",
    )


def _training(data: ReportData) -> str:
    history = data.history
    epochs = tuple(float(record.epoch + 1) for record in history)
    validation = [record.validation for record in history]
    losses = [Line("train", epochs, tuple(record.train_loss for record in history))]
    accuracies = [Line("train", epochs, tuple(100 * record.train_accuracy for record in history))]
    if any(validation):
        losses.append(Line("validation", epochs, tuple(each.loss if each else math.nan for each in validation)))
        accuracies.append(
            Line("validation", epochs, tuple(100 * each.accuracy if each else math.nan for each in validation))
        )
    train = _part(data, "train")
    num_train = _part(data, "dataset").get("counts", {}).get("by_split", {}).get("train", 0)
    rates = Line("training", epochs, tuple(num_train / max(record.seconds, 1e-9) for record in history))
    learning = Line("rate", epochs, tuple(record.learning_rate for record in history))
    return section(
        "Training",
        f"{text(train.get('strategy', ''))} on {counted(train.get('world_size') or 1, 'rank')}, "
        f"{counted(len(history), 'epoch')}, {counted(train.get('steps') or 0, 'step')} in "
        f"{text(duration(train.get('seconds', 0)))}, {train.get('images_per_second', 0):,.0f} images a second. "
        "Every sample counts once per epoch.",
        f'<div class="two"><div><h3>Loss</h3>{line_chart(losses, y_label="loss", x_label="epoch")}</div>'
        f"<div><h3>Accuracy</h3>"
        f"{line_chart(accuracies, y_label='accuracy', x_label='epoch', y_format='{:.1f}%')}</div>"
        f"<div><h3>Throughput, images a second</h3>"
        f"{line_chart([rates], y_label='images a second', x_label='epoch', y_format='{:,.0f}', from_zero=True)}</div>"
        f"<div><h3>Learning rate at the epoch's end</h3>"
        f"{line_chart([learning], y_label='learning rate', x_label='epoch', y_format='{:.2g}')}</div></div>"
        f"<h3>Where a step's time went (rank 0)</h3>" + _share_bar(train.get("time_shares") or {}),
    )


def _share_bar(shares: dict[str, float]) -> str:
    if not any(shares.values()):
        return empty("no step was timed")
    return share_bar([(label, shares.get(name, 0.0)) for name, label in SHARE_NAMES.items()], title="time shares")


def _evaluation(data: ReportData) -> str:
    evaluation = data.evaluation
    assert evaluation is not None
    names, top5 = [figures.name for figures in evaluation.per_class], evaluation.top5_accuracy
    worst = sorted(evaluation.per_class, key=lambda figures: (figures.num_samples == 0, figures.recall))[:12]
    rows = "".join(
        f'<tr><td>{text(figures.name)}</td><td class="number">{figures.num_samples:,}</td>'
        f'<td class="number">{_share(figures.precision, figures)}</td>'
        f'<td class="number">{_share(figures.recall, figures)}</td></tr>'
        for figures in worst
    )
    table = (
        '<table><tr><th>class</th><th class="number">samples</th><th class="number">precision</th>'
        f'<th class="number">recall</th></tr>{rows}</table>'
    )
    chart = (
        confusion_chart(names, evaluation.confusion)
        if len(names) <= MAX_CONFUSION_CLASSES
        else _confused_pairs(names, evaluation.confusion)
    )
    return section(
        f"On the {evaluation.split} split",
        f"{evaluation.num_samples:,} samples, each counted once: loss {evaluation.loss:.4f}, accuracy "
        f"{evaluation.accuracy:.2%}" + (f", in the first five {top5:.2%}." if top5 is not None else "."),
        f'<div class="two"><div><h3>Confusion matrix</h3>{chart}</div>'
        f"<div><h3>{'Classes' if len(names) <= 12 else 'The twelve weakest classes'}</h3>{table}</div></div>",
    )


def _share(value: float, figures: ClassFigures) -> str:
    """Of a class without samples nothing is known."""
    return f"{value:.1%}" if figures.num_samples else "-"


def _confused_pairs(names: list[str], confusion: Iterable[Iterable[int]]) -> str:
    pairs = sorted(
        ((count, true, predicted) for true, row in enumerate(confusion) for predicted, count in enumerate(row)),
        reverse=True,
    )
    rows = "".join(
        f'<tr><td>{text(names[true])}</td><td>{text(names[predicted])}</td><td class="number">{count:,}</td></tr>'
        for count, true, predicted in [pair for pair in pairs if pair[0] and pair[1] != pair[2]][:25]
    )
    return f'<table><tr><th>true</th><th>predicted</th><th class="number">samples</th></tr>{rows}</table>'


def _decision(data: ReportData) -> str:
    promotion = data.summary["promotion"]
    export = data.summary.get("export") or {}
    decision = str(promotion.get("decision"))
    kind = "good" if decision == "promoted" else "plain"
    facts = [
        ("previous model", promotion.get("previous")),
        ("current model", promotion.get("current")),
        ("export", export.get("path")),
        ("largest difference to the training model", export.get("parity_max_abs_diff")),
    ]
    return section(
        "The gate's decision",
        "",
        f'<p class="decision"><span class="pill {kind}" style="margin-left:0">{text(decision)}</span>'
        f"&ensp;{text(promotion.get('reason') or '')}</p>{facts_table(facts)}",
    )


def _how(data: ReportData) -> str:
    dataset, train = _part(data, "dataset"), _part(data, "train")
    facts = [
        ("dataset", dataset.get("uri")),
        ("version", dataset.get("version")),
        ("content digest", dataset.get("content_digest")),
        ("layout digest", dataset.get("layout_digest")),
        ("weights SHA-256", train.get("weights_sha256")),
        ("final loss", hex_loss(train.get("final_loss_hex"))),
        ("strategy chosen because", train.get("strategy_reason")),
    ]
    config = f"<details><summary>The resolved config</summary><pre>{text(data.config_toml)}</pre></details>"
    raw = json.dumps(data.summary, indent=2)
    return section(
        "How it was run",
        "",
        f"{facts_table(facts)}<h3></h3>{config if data.config_toml else ''}"
        f"<details><summary>summary.json</summary><pre>{text(raw)}</pre></details>",
    )


def _part(data: ReportData, name: str) -> dict[str, Any]:
    return data.summary.get(name) or {}
