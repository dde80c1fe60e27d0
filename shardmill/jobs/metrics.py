"""Turns the events of a run into metrics: one table says which field of which event is which metric.

Where they go, `metric_exports.py` says; the table of docs/observability.md is this one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shardmill.jobs.observer import FieldValue
from shardmill.jobs.redact import redacted_text

_PROMETHEUS_UNITS = {"s": "_seconds", "By": "_bytes"}
# Events that name the dataset of all that follows. One of a stage comes before the stage's first metric.
_NAMING = frozenset({"etl.listed", "train.plan"})


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric, whose value is that of a field in the newest event, or the number of events."""

    name: str
    """As OpenTelemetry's conventions have it: https://opentelemetry.io/docs/specs/semconv/general/naming/."""
    kind: Literal["counter", "gauge"]
    unit: str
    """In UCUM, where braces enclose what is counted; empty for a number without a unit."""
    meaning: str
    events: tuple[str, ...]
    field: str = ""
    """A regular expression for the name of the field, whose groups become labels; empty to count the events."""
    labels: tuple[str, ...] = ()
    """Other fields of the event that become labels."""

    @property
    def prometheus_name(self) -> str:
        """As OpenTelemetry's rules translate it for Prometheus, which ends names with the unit and counters with
        `_total`."""
        unit = _PROMETHEUS_UNITS.get(self.unit, "")
        return f"{self.name.replace('.', '_')}{unit}{'_total' if self.kind == 'counter' else ''}"

    @property
    def all_labels(self) -> tuple[str, ...]:
        """Labels of its values, apart from `dataset`, which all have."""
        return (*self.labels, *re.compile(self.field).groupindex)

    def readings(self, fields: Mapping[str, FieldValue]) -> dict[tuple[tuple[str, str], ...], float]:
        """Labels -> value, of all fields of an event that it takes."""
        found: dict[tuple[tuple[str, str], ...], float] = {}
        labels = {label: str(fields[label]) for label in self.labels}
        for name, value in fields.items():
            if isinstance(value, int | float) and (match := re.fullmatch(self.field, name)):
                groups = {label: text for label, text in match.groupdict().items() if text}
                found[tuple((labels | groups).items())] = value
        return found


_VERSION = ("etl.committed", "etl.nothing_new", "etl.unchanged")
_STEPS = ("train.progress", "train.steps")
METRICS = (
    Metric(
        "shardmill.etl.images", "counter", "{image}",
        "Inputs of the build so far, by `outcome` (`accepted`, `unchanged`, `rejected`); rejected ones by `reason`",
        ("etl.listed", "etl.progress"), "(?P<outcome>accepted|unchanged|rejected)(_(?P<reason>.+))?",
    ),
    Metric("shardmill.etl.written", "counter", "By", "Shards of the build's finished work units", ("etl.progress",),
           "written_bytes"),
    Metric("shardmill.dataset.version", "gauge", "", "Number of the latest version", _VERSION, "version"),
    Metric("shardmill.dataset.images", "gauge", "{image}", "Images of the latest version", _VERSION, "images"),
    Metric("shardmill.dataset.commit_time", "gauge", "s", "Unix time at which the latest version was committed",
           _VERSION, "committed"),
    Metric("shardmill.run.exit_code", "gauge", "", "Exit code of the last run, by `status` (`ok`, `partial`, `failed`)",
           ("run.ended",), "exit_code", ("command", "status")),
    Metric("shardmill.run.end_time", "gauge", "s", "Unix time at which the last run ended", ("run.ended",), "time",
           ("command",)),
    Metric("shardmill.storage.retries", "counter", "{request}", "Requests to storage that were sent again, by stage",
           ("stage.ended",), "retries", ("stage",)),
    Metric("shardmill.stage.duration", "gauge", "s", "Wall time of a stage, by `status` (`done`, `skipped`, `failed`)",
           ("stage.ended",), "seconds", ("stage", "status")),
    Metric("shardmill.train.steps", "counter", "{step}", "Global steps, repeated ones of a restart included", _STEPS,
           "steps"),
    Metric(
        "shardmill.train.time", "counter", "s",
        "Time of the steps, mean of the ranks, by part (`input_wait`, `compute`, `allreduce`, `checkpoint`)",
        _STEPS, "seconds_(?P<part>.+)",
    ),
    Metric("shardmill.train.loss", "gauge", "", "Loss of the last whole epoch, by `split` (`train`, `validation`)",
           ("train.epoch",), "(?P<split>train|validation)_loss"),
    Metric("shardmill.train.restarts", "counter", "{restart}", "Restarts without the ranks that were lost",
           ("train.restarted",)),
    Metric("shardmill.train.stragglers", "counter", "{straggler}", "How often a rank began to hold the others up",
           ("train.straggler",)),
)  # fmt: skip


class Metrics:
    """An observer that keeps the present value of each metric, for exports in this thread and others."""

    def __init__(self) -> None:
        self._values: dict[Metric, dict[tuple[tuple[str, str], ...], float]] = {metric: {} for metric in METRICS}
        self._dataset: tuple[tuple[str, str], ...] = ()

    def name_dataset(self, uri: str) -> None:
        """All values from now on are of this dataset."""
        self._dataset = (("dataset", redacted_text(uri)),)

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if name in _NAMING:
            self.name_dataset(str(fields["dataset"]))
            for metric, values in self._values.items():
                # Prometheus sees the first restart as an increase only if there was a 0 before it.
                if not metric.field and metric.events[0].partition(".")[0] == name.partition(".")[0]:
                    values.setdefault(self._dataset, 0)
        for metric, values in self._values.items():
            if name not in metric.events:
                continue
            if metric.field:
                values.update({self._dataset + labels: value for labels, value in metric.readings(fields).items()})
            else:
                values[self._dataset] = values.get(self._dataset, 0) + 1

    def of(self, metric: Metric) -> list[tuple[dict[str, str], float]]:
        """Labels and value of all that is known of a metric; from any thread."""
        return [(dict(labels), value) for labels, value in list(self._values[metric].items())]
