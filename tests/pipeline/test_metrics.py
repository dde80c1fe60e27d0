"""Metrics of real runs, in the file for Prometheus and at a receiver of OTLP; none of both can fail or delay a run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from prometheus_client.parser import text_string_to_metric_families

from etl.job import BuildOutcome, build_dataset, stage_record
from scripts.docs_site.markdown import table
from shardmill import __version__
from shardmill.dataset.index import read_shards
from shardmill.errors import StorageError
from shardmill.jobs import metric_exports
from shardmill.jobs.config import SparkConfig
from shardmill.jobs.metric_exports import PrometheusFile
from shardmill.jobs.metrics import METRICS, Metric, Metrics
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.run_record import RunRecord, recording
from shardmill.stores import open_store
from shardmill.stores.retries import count_retry
from tests.etl.building import tree_for
from tests.lab.datasets import write_images
from tests.train.training import tree_of
from train.config import TrainConfig
from train.contracts.values import StepReport, TrainResult
from train.launching.rank_failures import RankLost
from train.planning.plan import TrainingPlan
from train.planning.resume import DEFAULT_RESUME
from train.planning.setup import resolve
from train.reporting.observer import GlobalStep
from train.reporting.rank_times import MIN_STEPS, StragglerWatch
from train.reporting.run_log import RunLog
from train.restarts import launch_until_done
from train.stage_record import train_record
from train.training import TrainOutcome, train_in_run

PAGE = Path(__file__).resolve().parents[2] / "docs" / "observability.md"
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def in_file(path: Path) -> Samples:
    families = text_string_to_metric_families(path.read_text(encoding="utf-8"))
    samples = [sample for family in families for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


class Receiver:
    """The last request that a collector has received, if it answers."""

    def __init__(self) -> None:
        self.last, self.resource = ExportMetricsServiceRequest(), dict[str, str]()
        self.may_answer = threading.Event()
        self.may_answer.set()

    def samples(self) -> Samples:
        """By the names that Prometheus gives them."""
        [of_resource] = self.last.resource_metrics
        self.resource = {each.key: each.value.string_value for each in of_resource.resource.attributes}
        names = {metric.name: metric for metric in METRICS}
        found: Samples = {}
        for received in of_resource.scope_metrics[0].metrics:
            metric, data = names[received.name], getattr(received, str(received.WhichOneof("data")))
            assert (received.unit, received.description) == (metric.unit, metric.meaning)
            if metric.kind == "counter":
                assert data.is_monotonic
                assert data.aggregation_temporality == AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
            for point in data.data_points:
                labels = frozenset((each.key, each.value.string_value) for each in point.attributes)
                found[metric.prometheus_name, labels] = point.as_double or point.as_int
        return found


@contextmanager
def receiving(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    # Whoever answers is waited for.
    monkeypatch.setattr(metric_exports, "CLOSE_SECONDS", 60.0)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.may_answer.wait()
            assert self.path == "/v1/metrics"
            receiver.last = ExportMetricsServiceRequest.FromString(data)
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    try:
        yield receiver
    finally:
        receiver.may_answer.set()
        monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT")
        server.shutdown()
        server.socket.close()


def of_ranks(log: RunLog, watch: StragglerWatch) -> None:
    """A rank that is late in each step, and then lost: the events are those of the code that looks for it."""
    for step in range(MIN_STEPS + 2):
        spent = ({"compute": 0.5, "allreduce": 0.5}, {"compute": 1.0, "input_wait": 0.25})
        reports = tuple(StepReport(rank, 0, step, 1000, (0.5).hex(), seconds=each) for rank, each in enumerate(spent))
        watch.step(GlobalStep(0, step, 1000, (0.5).hex(), (), reports))
    lost = RankLost("rank 1 was killed")
    lost.ranks = frozenset({1})

    def launch(plan: TrainingPlan) -> TrainResult:
        raise lost

    asked = TrainConfig(num_workers=2, strategy="torch_ddp", launcher="local", max_restarts=1)
    with pytest.raises(RankLost):
        launch_until_done(launch, TrainingPlan(resolve(asked, SparkConfig())), log, check=lambda plan: None)


def test_a_run_in_the_file_and_at_a_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=60)
    (tmp_path / "images" / "class_0" / "broken.jpg").write_bytes(b"<html>not found</html>")
    (tmp_path / "images" / "class_0" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "node").mkdir()
    file, built, trained = tmp_path / "node" / "shardmill.prom", list[BuildOutcome](), list[TrainOutcome]()
    monkeypatch.setenv("SHARDMILL_PROMETHEUS_FILE", str(file))
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=lab")
    tree, uri = tree_for(tmp_path, "dataset"), str(tmp_path / "dataset")

    def build() -> BuildOutcome:
        count_retry()
        built.append(build_dataset(tree, run_id="r1", observer=record))
        return built[-1]

    def train() -> TrainOutcome:
        trained.append(train_in_run(tree_of(uri, tmp_path / "models"), record, record, None, DEFAULT_RESUME))
        return trained[0]

    with receiving(monkeypatch) as receiver:
        with recording(RunRecord(str(tmp_path), "r1", command="etl")) as record:
            record.stage("etl", build, lambda outcome: stage_record(outcome, tree))
            of_etl = in_file(file)
            record.stage("train", train, train_record)
            of_ranks(RunLog(record), StragglerWatch(record.event, "", 0.0))
        found = in_file(file)
        assert receiver.samples() == pytest.approx(found)
    attributes = {"service.name": "shardmill", "service.version": __version__, "service.instance.id": "r1"}
    assert (attributes | {"deployment.environment.name": "lab"}).items() <= receiver.resource.items()
    assert [path.name for path in file.parent.iterdir()] == ["shardmill.prom"]

    def value(name: str, samples: Samples = found, **labels: str) -> float:
        return samples[f"shardmill_{name}", frozenset({"dataset": uri, **labels}.items())]

    manifest, result = built[0].manifest, trained[0].result
    for samples in (of_etl, found):
        assert value("etl_images_total", samples, outcome="accepted") == manifest.counts.accepted == 60
        for reason, number in manifest.counts.by_reason.items():
            assert value("etl_images_total", samples, outcome="rejected", reason=reason) == number
    assert sum(manifest.counts.by_reason.values()) == 2 and value("etl_images_total", outcome="unchanged") == 0
    shards = read_shards(open_store(uri), manifest)
    assert value("etl_written_bytes_total") == sum(shard.size_bytes for shard in shards) > 0
    assert (value("dataset_version"), value("dataset_images")) == (1, 60)
    assert 0 <= time.time() - value("dataset_commit_time_seconds") < 600
    assert value("storage_retries_total", stage="etl") == 1 and value("storage_retries_total", stage="train") == 0
    assert value("stage_duration_seconds", stage="train", status="done") > 0
    assert value("train_steps_total") == result.num_steps
    spent = [value("train_time_seconds_total", part=part) for part in ("input_wait", "compute", "allreduce")]
    assert 0 < sum(spent) <= value("stage_duration_seconds", stage="train", status="done")
    assert value("train_loss", split="train") == pytest.approx(trained[0].result.history[-1].train_loss)
    assert (value("train_restarts_total"), value("train_stragglers_total")) == (1, 1)
    # No metric that nothing emits.
    assert {name for name, _ in found} == {metric.prometheus_name for metric in METRICS}
    assert value("run_exit_code", command="etl", status="partial") == 0

    # A run that has nothing to do tells of the version all the same.
    with recording(RunRecord(str(tmp_path), "r2", command="etl")) as record:
        record.stage(
            "etl", lambda: build_dataset(tree, run_id="r2", observer=record), lambda done: stage_record(done, tree)
        )
    assert value("dataset_version", in_file(file)) == 1

    # One that finds its store down says so, and what is known of the version stays.
    with pytest.raises(StorageError), recording(RunRecord(str(tmp_path), "r3", command="etl")) as record:
        record.name_dataset(uri)
        raise StorageError("no answer")
    failed = in_file(file)
    assert value("run_exit_code", failed, command="etl", status="failed") == 4
    assert 0 <= time.time() - value("run_end_time_seconds", failed, command="etl") < 60
    gauges = {metric.prometheus_name for metric in METRICS if metric.kind == "gauge"}
    kept = {name for name in gauges if not name.startswith(("shardmill_run", "shardmill_stage"))}
    assert {key: failed[key] for key in found if key[0] in kept} == {key: found[key] for key in found if key[0] in kept}
    assert value("stage_duration_seconds", failed, stage="etl", status="skipped") > 0
    assert {name for name, _ in failed} == gauges and len([key for key in failed if "run_exit" in key[0]]) == 1


def test_a_file_is_written_now_and_then_during_a_stage(tmp_path: Path):
    now, file, metrics = [0.0], tmp_path / "a.prom", Metrics()
    (tmp_path / "damaged.prom").write_text("shardmill_train_loss{ 3")
    file = (tmp_path / "damaged.prom").rename(file)
    export = PrometheusFile(str(file), metrics, pytest.fail, clock=lambda: now[0])
    file.unlink()

    def written(name: str, fields: Mapping[str, int | str]) -> Samples | None:
        metrics.event(name, fields)
        export.event(name)
        return in_file(file) if file.exists() else None

    assert written("train.plan", {"dataset": "s3://key:hunter2hunter2@host/d"}) is None
    now[0] = 20.0
    secret = written("train.progress", {"steps": 7})
    assert secret is not None and sorted(secret.values()) == [0, 0, 7] and "hunter2" not in file.read_text()
    now[0] = 30.0
    assert written("train.progress", {"steps": 9}) == secret
    assert written("stage.ended", {"stage": "train", "status": "failed", "seconds": 3, "retries": 0}) != secret


def ended(workdir: Path) -> tuple[float, RunRecord]:
    """-> seconds of a run's end, and the run."""
    record = RunRecord(str(workdir), "r1")
    record.stage("etl", lambda: None, lambda _: StageRecord(stage="etl"))
    began = time.monotonic()
    assert record.close()["status"] == "partial"
    return time.monotonic() - began, record


def test_a_collector_that_is_away_costs_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    # The first try is before the stage ends.
    monkeypatch.setenv("OTEL_METRIC_EXPORT_INTERVAL", "50")
    monkeypatch.setattr(metric_exports, "CLOSE_SECONDS", 60.0)
    record = RunRecord(str(tmp_path), "r0")

    def work() -> None:
        deadline = time.monotonic() + 120
        while not capsys.readouterr().err and time.monotonic() < deadline:
            record.event("etl.progress", {"accepted": 1})
            time.sleep(0.02)

    record.stage("etl", work, lambda _: StageRecord(stage="etl"))
    assert record.close()["warnings"]["etl"][0].startswith(
        "metrics do not reach http://127.0.0.1:9 (OTEL_EXPORTER_OTLP_ENDPOINT): "
    )
    monkeypatch.delenv("OTEL_METRIC_EXPORT_INTERVAL")
    ended(tmp_path)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("WARNING: metrics do not reach http://127.0.0.1:9") and "refused" in line


def test_a_collector_that_does_not_answer_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    with receiving(monkeypatch) as receiver:
        monkeypatch.setattr(metric_exports, "CLOSE_SECONDS", 0.2)
        receiver.may_answer.clear()
        seconds, _ = ended(tmp_path)
    # OpenTelemetry's own limit is 30 s, whatever one request may take.
    assert 0.2 <= seconds < 25
    assert capsys.readouterr().err.endswith("(OTEL_EXPORTER_OTLP_ENDPOINT): no answer within 0.2 s\n")


@pytest.mark.parametrize(
    ("variables", "missing", "warning"),
    [
        ({"SHARDMILL_PROMETHEUS_FILE": "/no/a.prom"}, "",
         "SHARDMILL_PROMETHEUS_FILE = '/no/a.prom' cannot be written: No such file or directory; the run continues"),
        ({"SHARDMILL_PROMETHEUS_FILE": "a.prom"}, "prometheus_client",
         "SHARDMILL_PROMETHEUS_FILE is set, but prometheus_client is not installed, so no metrics go there: "),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}, "opentelemetry.sdk.metrics",
         "OTEL_EXPORTER_OTLP_ENDPOINT is set, but opentelemetry.sdk.metrics is not installed, so no metrics go there"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://127.0.0.1:9", "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "",
         "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is set, but no metrics go there: OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc', "
         "expected http/protobuf (port 4318 of a collector)"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "OTEL_METRICS_EXPORTER": "none"}, "", ""),
    ],
)  # fmt: skip
def test_what_cannot_be_exported_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], variables, missing, warning
):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    if missing:
        monkeypatch.setitem(sys.modules, missing, None)
    ended(tmp_path)
    hint = ".[prometheus]" if missing == "prometheus_client" else ".[otel]" if missing else ""
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(warning) and all(f"WARNING: {warning}" in line and hint in line for line in lines)


def test_the_documentation_has_each_metric():
    def row(metric: Metric) -> list[str]:
        labels = ", ".join(f"`{label}`" for label in metric.all_labels)
        return [f"`{metric.name}`", f"`{metric.prometheus_name}`", metric.kind, f"`{metric.unit}`" * bool(metric.unit),
                labels, metric.meaning]  # fmt: skip

    head = ["OpenTelemetry", "Prometheus", "type", "unit", "labels", "what"]
    expected = "\n".join(table(head, [row(metric) for metric in METRICS]))
    assert expected in PAGE.read_text(encoding="utf-8"), expected
