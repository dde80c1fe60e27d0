"""Curves and settings at an MLflow server, by MLflow's own client; one that is away never ends a training."""

from __future__ import annotations

import json
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from shardmill.stores import open_store
from train.contracts.values import StepReport
from train.identity import fields_of_settings
from train.reporting.observer import GlobalStep
from train.reporting.trackers import sent
from train.reporting.trackers.mlflow import MlflowTracker
from train.reporting.trackers.tracker import TrackedRun
from train.tree import TrainTree

FIELDS = {
    "experiments/create": {"name"},
    "runs/create": {"experiment_id", "run_name", "start_time", "user_id"},
    "runs/update": {"run_id", "run_uuid", "status", "end_time"},
    "runs/log-batch": {"run_id", "metrics", "params"},
}
MISSING = 404, {"error_code": "RESOURCE_DOES_NOT_EXIST"}


class TrackingApi:
    """What mlflow.org/docs/latest/rest-api.html says of the requests that MLflow's client makes for us."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: list[dict[str, Any]] = []
        self.params: defaultdict[str, dict[str, str]] = defaultdict(dict)
        self.metrics: defaultdict[str, list[tuple[str, float | str, int]]] = defaultdict(list)
        self.statuses: defaultdict[str, list[str]] = defaultdict(list)
        self.num_unavailable = 0
        """So many of the next requests are answered with 503."""
        self.authorizations: set[str | None] = set()

    def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if self.num_unavailable:
            self.num_unavailable -= 1
            return 503, {}
        if path == "experiments/get-by-name":
            name = query["experiment_name"][0]
            known = name in self.experiments
            return (200, {"experiment": {"experiment_id": self.experiments[name]}}) if known else MISSING
        if not body.keys() <= FIELDS.get(path, set()):
            return 400, {"message": f"unknown fields {body.keys() - FIELDS[path]}"}
        if path == "experiments/create":
            self.experiments[body["name"]] = "7"
            return 200, {"experiment_id": "7"}
        if path == "runs/create":
            run_id = f"run-{len(self.runs)}"
            self.runs.append({**body, "run_id": run_id})
            return 200, {"run": {"info": self.info(run_id)}}
        run_id = query["run_id"][0] if path == "runs/get" else body["run_id"]
        if run_id not in {run["run_id"] for run in self.runs}:
            return MISSING
        if path == "runs/get":
            return 200, {"run": {"info": self.info(run_id)}}
        if path == "runs/update":
            self.statuses[run_id].append(body["status"])
            return 200, {"run_info": self.info(run_id)}
        metrics, params = body.get("metrics", []), body.get("params", [])
        if len(metrics) > 1000 or len(params) > 100 or any(len(each["value"]) > 6000 for each in params):
            return 400, {"message": "too many"}
        self.params[run_id] |= {each["key"]: each["value"] for each in params}
        self.metrics[run_id] += [(each["key"], each["value"], each["step"]) for each in metrics]
        return 200, {}

    def info(self, run_id: str) -> dict[str, Any]:
        return {
            "run_id": run_id,
            "run_uuid": run_id,
            "experiment_id": "7",
            "status": "RUNNING",
            "artifact_uri": "s3://a",
        }


@contextmanager
def serving(api: TrackingApi) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            api.authorizations.add(self.headers["Authorization"])
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or b"{}")
            code, answer = api.answer(parts.path.removeprefix("/api/2.0/mlflow/"), parse_qs(parts.query), body)
            data = json.dumps(answer).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_GET

        def log_message(self, format: str, *args: object) -> None:
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def step(number: int) -> GlobalStep:
    report = StepReport(0, 0, number, 10_000, (1.0).hex(), (), {"compute": 0.5})
    return GlobalStep(0, number, 10_000, (1.0 / (1 + number)).hex(), (), (report,))


def train(uri: str, dataset: str, folder: Path, *options: str, run_id: str = "one") -> dict[str, Any]:
    sets = {"epochs": 1, "global_batch_size": 24, "model": "tests.train.torch_models:linear"}
    sets |= {"log.mlflow_uri": uri}
    places = [f"--set=models.uri={folder}/models", f"--workdir={folder}/work", f"--run-id={run_id}", "--json"]
    given = [f"--set=train.{name}={value}" for name, value in sets.items()]
    done = CliRunner().invoke(app, ["train", dataset, *given, *places, *options])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["sections"]["train"]


def test_a_run_has_its_curves_and_settings_there(tiny_uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret")
    api = TrackingApi()
    with serving(api) as uri:
        assert train(f"{uri}/", tiny_uri, tmp_path)["mlflow_run_id"] == "run-0"
        # It is done: another run has nothing to tell. Another training in the same run goes on with the same curves.
        assert train(uri, tiny_uri, tmp_path, run_id="two")["mlflow_run_id"] == ""
        assert train(uri, tiny_uri, tmp_path, "--fresh")["mlflow_run_id"] == "run-0"
    assert [run["run_name"] for run in api.runs] == ["one"] and api.experiments == {"shardmill": "7"}
    assert api.statuses["run-0"] == ["FINISHED", "RUNNING", "FINISHED"] and api.authorizations == {"Bearer secret"}
    params = api.params["run-0"]
    assert params["train.epochs"] == "1" and params["train.optimizer"] == "auto"
    assert params["train.attach.port"] == "29610"
    assert params.keys() == {f"train.{name}" for name in fields_of_settings() if name != "log.mlflow_uri"}
    found = {name: [at for key, _, at in api.metrics["run-0"] if key == name] for name, _, _ in api.metrics["run-0"]}
    assert found["step/loss"] == [0, 1, 2, 3] * 2 and found["epoch/validation_accuracy"] == [0, 0]
    events = (tmp_path / "work/runs/one/events.jsonl").read_text()
    assert "train.log_refused" not in events, "no warning"


def test_a_server_that_lost_the_run_gets_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "FLUSH_SECONDS", 0.05)
    open_store(tmp_path).put("runs/r/mlflow.run", b"forgotten")
    api = TrackingApi()
    with serving(api) as uri:
        log, told = log_to(uri, tmp_path)
        log.step(step(0))
        log.close()
    assert (log.run_id, told, api.statuses["run-0"]) == ("run-0", [], ["FAILED"])


def test_what_a_server_refuses_is_dropped_and_the_rest_is_sent(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "FLUSH_SECONDS", 0.05)
    monkeypatch.setattr(sent, "MAX_SENT", 1)

    class Strict(TrackingApi):
        def answer(self, path: str, query: dict[str, list[str]], body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
            if any(each["step"] == 1 for each in body.get("metrics", [])):
                return 400, {"error_code": "INVALID_PARAMETER_VALUE", "message": "no such step"}
            return super().answer(path, query, body)

    api = Strict()
    with serving(api) as uri:
        log, told = log_to(uri, tmp_path)
        for number in range(3):
            log.step(step(number))
        log.finish()
        log.close()
    assert [at for key, _, at in api.metrics["run-0"] if key == "step/loss"] == [0, 2]
    assert "5 metric values were not delivered" in told[-1] and "no such step" in told[-1]


def test_a_server_that_is_away_is_a_warning(tiny_uri, tmp_path):
    with serving(TrackingApi()) as uri:
        pass
    assert train(uri, tiny_uri, tmp_path)["mlflow_run_id"] == ""
    events = [json.loads(line) for line in (tmp_path / "work/runs/one/events.jsonl").read_text().splitlines()]
    said = [each["warning"] for each in events if each.get("event", each.get("name")) == "train.log_refused"]
    assert re.match("train.log.trackers = 'mlflow': \\d+ metric values were not delivered: ", said[-1])
    assert "Connection refused" in said[-1]


def log_to(uri: str, folder: Path) -> tuple[MlflowTracker, list[str]]:
    told: list[str] = []
    return MlflowTracker(TrackedRun("r", {"log.mlflow_uri": uri}, open_store(folder), "runs/r", told.append)), told


def test_nothing_is_lost_or_doubled_by_a_server_that_comes_back(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "FLUSH_SECONDS", 0.05)
    api = TrackingApi()
    with serving(api) as uri:
        log, told = log_to(uri, tmp_path)
        log.step(step(0))
        while not api.metrics:
            time.sleep(0.01)
        api.num_unavailable = 3
        for number in range(1, 900):
            log.step(step(number))
        log.finish()
        log.close()
    losses = [(value, at) for key, value, at in api.metrics["run-0"] if key == "step/loss"]
    assert losses == [(1.0 / (1 + number), number) for number in range(900)]
    assert len(told) <= 1 and api.statuses["run-0"] == ["FINISHED"]


def test_a_server_that_never_answers_delays_the_end_by_no_more_than_it_may(tmp_path, monkeypatch):
    monkeypatch.setattr(sent, "CLOSE_SECONDS", 0.5)
    hung = threading.Event()

    class Hung(TrackingApi):
        def answer(self, *request: Any) -> tuple[int, dict[str, Any]]:
            hung.wait(30)
            return 503, {}

    with serving(Hung()) as uri:
        log, told = log_to(uri, tmp_path)
        log.step(step(0))
        log.finish()
        log.close()
        assert not hung.is_set() and told and "5 metric values" in told[-1] and log.run_id == ""
        hung.set()


@pytest.mark.parametrize("uri", ["file:/tmp/x", "mlruns", "http://me:secret@host", "http://"])
def test_other_addresses_are_refused(uri: str):
    with pytest.raises(UsageError, match="mlflow_uri = .*; expected (an address that MLflow takes|no user in it)"):
        load_tree(TrainTree, None, (f"train.log.mlflow_uri={uri}",))
