"""Renders gathered values as one HTML file: no script, nothing fetched; the templates escape every label and path."""

from __future__ import annotations

import base64
import json
import math
from functools import cache
from typing import TYPE_CHECKING, Any

from pipeline.report.charts import (
    MAX_BARS,
    Bar,
    Line,
    bar_chart,
    confusion_chart,
    empty,
    line_chart,
    share_bar,
    side_by_side_chart,
)
from shardmill.dataset.statistics import ASPECT_NAMES, SIDE_NAMES
from shardmill.ids import format_sample_id
from shardmill.words import counted, without_surrogates
from train.contracts.values import METRICS

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

    from pipeline.report.data import ReportData
    from shardmill.dataset.statistics import ImageSizes
    from train.contracts.values import Confusion, Evaluation, MetricsOfClass

MAX_CONFUSION_CLASSES = 50
NUM_CONFUSED_PAIRS = 25
NUM_WEAKEST_CLASSES = 12
ANOTHER_CLASS = "a class that is not in the dataset"
SHARE_NAMES = {
    "compute": "compute",
    "input_wait": "waiting for input",
    "allreduce": "exchange, including waiting",
    "checkpoint": "checkpoint",
    "other": "other",
}


def render(data: ReportData) -> str:
    """The whole page. A section whose stage never ran is left out."""
    summary = data.summary
    sections = {name: summary.get(name) or {} for name in ("dataset", "etl", "train", "export", "promotion")}
    by_split = sections["dataset"].get("counts", {}).get("by_split", {})
    page = (
        environment()
        .get_template("page.html")
        .render(
            data=data,
            summary=summary,
            summary_json=json.dumps(summary, indent=2),
            status=str(summary.get("status", "unknown")),
            cards=_cards(data),
            charts=_charts(data),
            share_names=SHARE_NAMES,
            by_split=by_split,
            num_samples=sum(by_split.values()),
            weakest_classes=_weakest_classes(data.evaluation),
            confused_pairs=_confused_pairs(data.evaluation),
            num_mistakes=_num_mistakes(data.evaluation),
            **sections,
        )
    )
    return as_html_file(page)


def as_html_file(page: str) -> str:
    """What HTML has no form for, escaped: bytes of names that are not UTF-8, and the NUL between an archive and its
    member.
    """
    return without_surrogates(page).replace("\0", r"\0")


@cache
def environment() -> Environment:
    """The templates, and what they call."""
    from jinja2 import Environment, PackageLoader

    environment = Environment(
        loader=PackageLoader("pipeline.report"), autoescape=True, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "base64": lambda png: base64.b64encode(png).decode(),
        "counted": counted,
        "duration": duration,
        "metric_of": metric_of,
        "hex_loss": hex_loss,
        "number": number,
        "sample_id": format_sample_id,
        "size": size,
    }
    return environment


def _cards(data: ReportData) -> list[tuple[str, str]]:
    """Names and values of the metrics that people look for first."""
    summary = data.summary
    counts = (summary.get("dataset") or {}).get("counts", {})
    num_refused = sum(group.count for group in data.rejected) if data.rejected else counts.get("rejected")
    cards = [("images accepted", number(counts.get("accepted"))), ("images rejected", number(num_refused))]
    if train := summary.get("train"):
        size = train.get("world_size") or 1
        cards.append((f"rank{'s' * (size > 1)}, {train.get('strategy', '')}", number(size)))
    if data.evaluation is not None:
        cards.append((f"{data.evaluation.metric.words} on {data.evaluation.split}", metric_of(data.evaluation)))
    if promotion := summary.get("promotion"):
        cards.append(("decision", str(promotion.get("decision", "-")).replace("_", " ")))
    cards.append(("all stages together", duration(sum(record.seconds for record in data.stages))))
    return cards


def _charts(data: ReportData) -> dict[str, Markup]:
    """Every chart of the page, by the name that the templates use."""
    rejects = [Bar(group.reason, (float(group.count),)) for group in data.rejected]
    charts = {
        "class_balance": _class_balance(data),
        "rejects": bar_chart(rejects, part_names=["inputs"], title="rejects by reason"),
        "time_shares": _time_shares((data.summary.get("train") or {}).get("time_shares") or {}),
        **_size_charts(data.sizes),
        **_training_charts(data),
    }
    evaluation = data.evaluation
    if evaluation is not None and evaluation.confused and len(evaluation.per_class) <= MAX_CONFUSION_CLASSES:
        names = answers(evaluation, evaluation.confused)
        charts["confusion"] = confusion_chart(names, _confusion_matrix(evaluation.confused, len(names)))
    return charts


def _class_balance(data: ReportData) -> Markup:
    splits = list(data.class_counts)
    if data.class_names:
        bars = [
            Bar(name, tuple(float(data.class_counts[split][label]) for split in splits))
            for label, name in enumerate(data.class_names)
        ]
        if len(bars) <= MAX_BARS:
            return bar_chart(bars, part_names=splits, title="class balance")
        # Of many classes the largest and the smallest show the balance, not the first by name.
        bars.sort(key=lambda bar: -sum(bar.parts))
        return bar_chart(bars, part_names=splits, title="class balance", num_last=MAX_BARS // 2 - 1)
    by_split = (data.summary.get("dataset") or {}).get("counts", {}).get("by_split", {})
    bars = [Bar(split, (float(by_split.get(split, 0)),)) for split in splits]
    return bar_chart(bars, part_names=["images"], title="class balance")


def _size_charts(sizes: ImageSizes | None) -> dict[str, Markup]:
    if sizes is None:
        return {}
    before, after = sizes.source, sizes.stored
    return {
        "longer_side": _before_and_after(SIDE_NAMES, before.by_longer_side, after.by_longer_side, "longer side"),
        "aspect_ratio": _before_and_after(ASPECT_NAMES, before.by_aspect_ratio, after.by_aspect_ratio, "aspect ratio"),
    }


def _before_and_after(names: tuple[str, ...], before: tuple[int, ...], after: tuple[int, ...], title: str) -> Markup:
    """The buckets from the first to the last that has an image."""
    bars = [Bar(*each) for each in zip(names, zip(map(float, before), map(float, after), strict=True), strict=True)]
    filled = [place for place, bar in enumerate(bars) if any(bar.parts)]
    shown = bars[filled[0] : filled[-1] + 1] if filled else []
    return side_by_side_chart(shown, part_names=["before", "after"], title=title)


def _training_charts(data: ReportData) -> dict[str, Markup]:
    history = data.history
    epochs = tuple(float(record.epoch + 1) for record in history)
    validation = [record.validation for record in history]
    losses = [Line("train", epochs, tuple(record.train_loss for record in history))]
    metric = next((each.metric for each in validation if each), METRICS["class"])
    scale, y_format = (100.0, "{:.1f}%") if metric.higher_is_better else (1.0, "{:.3g}")
    accuracies = [record.train_accuracy for record in history]
    metrics = []
    if any(each is not None for each in accuracies) and metric == METRICS["class"]:
        metrics.append(Line("train", epochs, tuple(math.nan if each is None else scale * each for each in accuracies)))
    if any(validation):
        # NaN leaves a gap at an epoch without validation.
        losses.append(Line("validation", epochs, tuple(each.loss if each else math.nan for each in validation)))
        metrics.append(
            Line("validation", epochs, tuple(scale * each.metric_value if each else math.nan for each in validation))
        )
    counts = (data.summary.get("dataset") or {}).get("counts", {})
    num_train = counts.get("by_split", {}).get("train", 0)
    rates = Line("training", epochs, tuple(num_train / max(record.seconds, 1e-9) for record in history))
    learning = Line("rate", epochs, tuple(record.learning_rate for record in history))
    x_label = "epoch"
    return {
        "loss": line_chart(losses, y_label="loss", x_label=x_label),
        "metric": line_chart(metrics, y_label=metric.words, x_label=x_label, y_format=y_format),
        "throughput": line_chart(
            [rates], y_label="images a second", x_label=x_label, y_format="{:,.0f}", from_zero=True
        ),
        "learning_rate": line_chart([learning], y_label="learning rate", x_label=x_label, y_format="{:.2g}"),
    }


def _time_shares(shares: dict[str, float]) -> Markup:
    if not any(shares.values()):
        return empty("no step was timed")
    return share_bar([(label, shares.get(name, 0.0)) for name, label in SHARE_NAMES.items()], title="time shares")


def _weakest_classes(evaluation: Evaluation | None) -> list[Any]:
    if evaluation is None:
        return []

    def weakness(metrics: MetricsOfClass) -> tuple[bool, float]:
        # Classes without samples come last: their recall is unknown, not 0.
        return (
            metrics.num_samples == 0,
            metrics.recall if metrics.average_precision is None else metrics.average_precision,
        )

    return sorted(evaluation.per_class, key=weakness)[:NUM_WEAKEST_CLASSES]


def answers(evaluation: Evaluation, confused: Confusion) -> list[str]:
    """The classes, and what a model may answer beside them."""
    names = [metrics.name for metrics in evaluation.per_class]
    predicted = {*confused.predicted, *(each.predicted for each in confused.mistakes)}
    return [*names, ANOTHER_CLASS] if len(names) in predicted else names


def _confusion_matrix(confused: Confusion, num_classes: int) -> list[list[int]]:
    matrix = [[0] * num_classes for _ in range(num_classes)]
    for true, predicted, count in zip(confused.true, confused.predicted, confused.num_samples, strict=True):
        matrix[true][predicted] = count
    return matrix


def _num_mistakes(evaluation: Evaluation | None) -> int:
    """Of all classes, also those whose pairs are too rare to be kept."""
    if evaluation is None or evaluation.metric.name != "accuracy":
        return 0
    return evaluation.num_samples - round(evaluation.metric_value * evaluation.num_samples)


def _confused_pairs(evaluation: Evaluation | None) -> list[tuple[str, str, int]]:
    """The most frequent mistakes as (true class, predicted class, samples)."""
    if evaluation is None or evaluation.confused is None:
        return []
    cells = evaluation.confused
    names = answers(evaluation, cells)
    mistakes = [
        (names[true], names[predicted], count)
        for true, predicted, count in zip(cells.true, cells.predicted, cells.num_samples, strict=True)
        if true != predicted
    ]
    return sorted(mistakes, key=lambda mistake: mistake[2], reverse=True)[:NUM_CONFUSED_PAIRS]


def metric_of(evaluation: Evaluation) -> str:
    """The metric by which models are compared: a share in percent, an error as it is."""
    return f"{evaluation.metric_value:.2%}" if evaluation.metric.higher_is_better else f"{evaluation.metric_value:.4g}"


def hex_loss(loss_hex: str | None) -> str | None:
    """A loss for people, and its exact bits."""
    return f"{float.fromhex(loss_hex):.6f} ({loss_hex})" if loss_hex else None


def number(value: Any) -> str:
    """Format a number with thousands separators; `-` for None."""
    return f"{value:,}" if isinstance(value, int) else "-"


def size(num_bytes: int) -> str:
    """Bytes as people write them."""
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:,.1f} MB"


def duration(seconds: float) -> str:
    """Seconds as people write them."""
    return f"{seconds:.1f} s" if seconds < 100 else f"{int(seconds // 60)} min {int(seconds % 60):02d} s"
