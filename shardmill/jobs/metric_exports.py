"""Sends the metrics of a run by OTLP, and writes them to a file for Prometheus, if the environment asks for it.

Neither can fail a run, or delay it by more than a moment: what goes wrong is one warning.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardmill.jobs.metrics import METRICS, Metric, Metrics
from shardmill.jobs.observer import FieldValue
from shardmill.registry import install_hint
from shardmill.version import __version__

if TYPE_CHECKING:
    import prometheus_client
    from opentelemetry.metrics import CallbackOptions, Observation
    from prometheus_client.samples import Sample

Warn = Callable[[str], None]
PROMETHEUS_FILE = "SHARDMILL_PROMETHEUS_FILE"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_METRICS_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
FILE_SECONDS = 15.0
"""Between two writes of the file during a stage."""
CLOSE_SECONDS = 2.0
"""How long the end of a run waits for a collector."""


class ExportedMetrics:
    """The observer of a run's events that exports their metrics; without the variables it does nothing."""

    def __init__(self, run_id: str, warn: Warn) -> None:
        self._metrics = Metrics()
        self.name_dataset = self._metrics.name_dataset
        self._exports: list[PrometheusFile | OtlpExport] = []
        if path := os.environ.get(PROMETHEUS_FILE):
            self._open(PROMETHEUS_FILE, "prometheus", warn, lambda: PrometheusFile(path, self._metrics, warn))
        asked = next(filter(os.environ.get, ENDPOINTS), "")
        if asked and "otlp" in os.environ.get("OTEL_METRICS_EXPORTER", "otlp").split(","):
            self._open(asked, "otel", warn, lambda: OtlpExport(asked, run_id, self._metrics, warn))

    def _open(self, variable: str, extra: str, warn: Warn, opened: Callable[[], PrometheusFile | OtlpExport]) -> None:
        try:
            self._exports.append(opened())
        except ImportError as error:
            warn(f"{variable} is set, but {error.name} is not installed, so no metrics go there: {install_hint(extra)}")
        except Exception as error:  # of whatever a library makes of the environment: no reason to fail a run
            warn(f"{variable} is set, but no metrics go there: {error}")

    def event(self, name: str, fields: Mapping[str, FieldValue]) -> None:
        if self._exports:
            self._metrics.event(name, fields)
            for export in self._exports:
                export.event(name)

    def close(self) -> None:
        """Export the last values."""
        for export in self._exports:
            export.close()


class PrometheusFile:
    """A text file for the textfile collector of Prometheus' node_exporter, which is replaced as a whole."""

    def __init__(self, path: str, metrics: Metrics, warn: Warn, clock: Callable[[], float] = time.monotonic) -> None:
        from prometheus_client import CollectorRegistry

        self._path, self._metrics, self._warn, self._clock = path, metrics, warn, clock
        self._next = clock() + FILE_SECONDS
        self._before = _gauges_in(path)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._is_warned = False

    def event(self, name: str) -> None:
        if name == "stage.ended" or self._clock() >= self._next:
            self._write()

    def close(self) -> None:
        self._write()

    def collect(self) -> Iterable[prometheus_client.Metric]:
        """What the registry asks of a collector."""
        from prometheus_client import Metric as Family

        for metric in METRICS:
            name = metric.prometheus_name
            family = Family(name.removesuffix("_total"), metric.meaning, metric.kind)
            for labels, value in self._metrics.of(metric):
                family.add_sample(name, labels, value)
            # What this run has not found out is as the last one left it: a run that fails early ends no alert about it.
            family.samples = family.samples or self._before.get(name, [])
            if family.samples:
                yield family

    def _write(self) -> None:
        from prometheus_client import write_to_textfile

        self._next = self._clock() + FILE_SECONDS
        try:
            write_to_textfile(self._path, self._registry)
        except OSError as error:
            if not self._is_warned:
                self._warn(f"{PROMETHEUS_FILE} = {self._path!r} cannot be written: {error.strerror}; the run continues")
            self._is_warned = True


def _gauges_in(path: str) -> dict[str, list[Sample]]:
    """What a run before this one has left there, by name; counters begin anew with each process."""
    from prometheus_client.parser import text_string_to_metric_families

    gauges = {metric.prometheus_name for metric in METRICS if metric.kind == "gauge"}
    try:
        families = list(text_string_to_metric_families(Path(path).read_text(encoding="utf-8")))
    except (OSError, ValueError):  # none yet, or not of ours
        return {}
    return {family.name: family.samples for family in families if family.name in gauges}


class _Heard(logging.Handler):
    """Passes on what a library logs, in any thread."""

    def __init__(self, hear: Callable[[logging.LogRecord], None]) -> None:
        super().__init__(logging.WARNING)
        self._hear = hear

    def emit(self, record: logging.LogRecord) -> None:
        self._hear(record)


class OtlpExport:
    """A thread of OpenTelemetry's SDK that sends to a collector, as its own variables say. What it logs, which is about
    failures, becomes one warning."""

    def __init__(self, asked: str, run_id: str, metrics: Metrics, warn: Warn) -> None:
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource

        protocol = next(filter(None, map(os.environ.get, PROTOCOLS)), "http/protobuf")
        if protocol != "http/protobuf":
            raise ValueError(f"{PROTOCOLS[1]} is {protocol!r}, expected http/protobuf (port 4318 of a collector)")
        self._asked, self._metrics, self._warn = asked, metrics, warn
        self._thread: int | None = None
        """The SDK's, once it has asked for values."""
        self._failing, self._is_warned, self._is_over = "", False, threading.Event()
        self._logger, self._handler = logging.getLogger("opentelemetry"), _Heard(self._fail)
        self._logger.addHandler(self._handler)
        # What the environment says of this process precedes.
        who = {"service.name": "shardmill", "service.version": __version__, "service.instance.id": run_id}
        own = Resource.create(who)
        resource = own.merge(OTELResourceDetector().detect())
        self._exporter = OTLPMetricExporter()
        reader = PeriodicExportingMetricReader(self._exporter)
        self._provider = MeterProvider([reader], resource, shutdown_on_exit=False)
        meter = self._provider.get_meter("shardmill")
        create = {"counter": meter.create_observable_counter, "gauge": meter.create_observable_gauge}
        for metric in METRICS:
            create[metric.kind](metric.name, [partial(self._observe, metric)], metric.unit, metric.meaning)

    def event(self, name: str) -> None:
        if self._failing and not self._is_warned:
            self._is_warned = True
            self._warn(f"metrics do not reach {os.environ[self._asked]} ({self._asked}): {self._failing}")

    def close(self) -> None:
        # The newest values are sent once more, whatever became of earlier ones.
        self._failing = ""
        self._is_over.clear()
        threading.Thread(target=self._shut_down, name="metrics", daemon=True).start()
        if not self._is_over.wait(CLOSE_SECONDS):
            self._failing = f"no answer within {CLOSE_SECONDS:g} s"
        self.event("")
        if self._failing:
            # No more tries of what nobody waits for.
            self._exporter.shutdown()

    def _fail(self, record: logging.LogRecord) -> None:
        # The export of an earlier run of this process may log, too.
        if record.thread == self._thread:
            # Whether the library will try again is no matter of the run's.
            words = record.getMessage().partition(" encountered while exporting")[0]
            self._failing = self._failing or " ".join(words.split())
            self._is_over.set()

    def _shut_down(self) -> None:
        with suppress(Exception):
            self._provider.shutdown()
        self._logger.removeHandler(self._handler)
        self._is_over.set()

    def _observe(self, metric: Metric, options: CallbackOptions) -> Iterable[Observation]:
        from opentelemetry.metrics import Observation

        self._thread = threading.get_ident()
        return [Observation(value, labels) for labels, value in self._metrics.of(metric)]
