"""Curves, settings and the registry at an MLflow server, by MLflow's own client; one that is away ends no training."""

from __future__ import annotations

import json
import logging
import re
import shutil
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.dataset.card import CARD
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.jobs.config import load_tree
from shardmill.stores import open_store
from tests.etl.building import Recorder
from tests.train.exports import put_export
from train.contracts.values import StepReport
from train.identity import fields_of_settings
from train.published.announce import announce, card_of, model_card, refresh_model_card
from train.published.exported import Export, read_history
from train.published.gate import promote_export
from train.published.mlflow_registry import register_current, resolve_registered
from train.published.promote import Promotion, choose_export, roll_back
from train.reporting.mlflow_client import connect, experiment_id
from train.reporting.observer import GlobalStep
from train.reporting.trackers import sent
from train.reporting.trackers.mlflow import MlflowTracker
from train.reporting.trackers.tracker import TrackedRun
from train.settings import GateConfig, RegistryConfig
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
        return {"run_id": run_id, "run_uuid": run_id, "experiment_id": "7", "status": "RUNNING",
                "artifact_uri": "s3://a"}  # fmt: skip


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


GATE = GateConfig(registry=RegistryConfig(name="photos"))
NOWHERE = "http://127.0.0.1:1"


@pytest.fixture(scope="module")
def tracking(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A registry without a server, whose tables are made once."""
    uri = f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"
    connect(uri).create_registered_model("made-by-others")
    return uri


@pytest.fixture
def exports(
    tiny_uri: str, tmp_path: Path, tracking: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Export, Export]:
    """A models' root, the export of a model that has learned nothing, and that of one that has."""
    # A copy: each test has a registry of its own.
    shutil.copy(tracking.removeprefix("sqlite:///"), tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    root = str(tmp_path / "models")
    return root, put_export(root, tiny_uri, is_good=False), put_export(root, tiny_uri)


def promoted(root: str, export: Export, run_id: str, gate: GateConfig = GATE) -> tuple[Promotion, Recorder]:
    recorder = Recorder()
    return announce(promote_export(root, export, gate, run_id), gate, recorder), recorder


def champion() -> Any:
    return connect("").get_model_version_by_alias("photos", "champion")


def runs() -> list[Any]:
    client = connect("")
    return list(client.search_runs([experiment_id(client)]))


def num_versions() -> int:
    return len(connect("").search_model_versions("name = 'photos'"))


def test_the_alias_names_what_is_current_and_each_export_is_one_version(exports: tuple[str, Export, Export]):
    root, bad, good = exports
    assert promoted(root, bad, "run-1")[0].registered == "models:/photos/1"
    # It would write about its tables between our lines.
    assert not logging.getLogger("mlflow.store.db.utils").isEnabledFor(logging.INFO)
    assert promoted(root, good, "run-2")[0].registered == "models:/photos/2"
    assert resolve_registered("models:/photos@champion") == f"{root}@{good.number}"
    tags = champion().tags
    assert tags["shardmill.dataset"] == f"{good.record.dataset.uri}@{good.record.dataset.version}"
    assert tags["shardmill.dataset.content_digest"] == good.record.content_digest
    run = connect("").get_run(champion().run_id)
    [of_run] = run.inputs.dataset_inputs
    assert good.record.content_digest.startswith(of_run.dataset.digest)
    assert run.data.metrics["test/accuracy"] == pytest.approx(good.record.evaluation.accuracy)

    # Again, and a worse one that is kept out: nothing moves. Back, and by name: no version is made twice.
    assert promoted(root, good, "run-3")[0].registered == "models:/photos/2"
    assert promoted(root, bad, "run-4")[0].gate.decision == "kept"
    assert (str(champion().version), num_versions()) == ("2", 2)
    assert announce(roll_back(root, "run-5"), GATE, Recorder()).registered == "models:/photos/1"
    assert resolve_registered("models:/photos@champion") == f"{root}@{bad.number}"
    announce(choose_export(root, good.number, "run-6"), GATE, Recorder())
    assert (str(champion().version), num_versions()) == ("2", 2)
    assert resolve_registered("models:/photos/1") == f"{root}@{bad.number}"


def test_a_description_fits_into_mlflows_column(exports: tuple[str, Export, Export]):
    """SQLite, here, would take more; MySQL and PostgreSQL refuse it."""
    root, _, good = exports
    promoted(root, good, "run-1", GateConfig())
    assert register_current(root, GATE.registry, lambda _: "x" * 9_000) == "models:/photos/1"
    description = str(champion().description)
    assert len(description) == 5_000 and description.endswith(f"{root}/README.md has the rest\n")


def test_a_registration_that_fails_is_a_warning_and_the_next_promotion_makes_up_for_it(
    exports: tuple[str, Export, Export],
):
    root, _, good = exports
    away = GateConfig(registry=RegistryConfig(name="photos", uri=NOWHERE))
    promotion, told = promoted(root, good, "run-1", away)
    assert (promotion.gate.decision, promotion.current, promotion.registered) == ("promoted", good.number, "")
    warning = str(told.events["promote.warning"]["warning"])
    assert (
        "was not registered as models:/photos" in warning
        and f"`shardmill promote {root}@{good.number}` tries again" in warning
    )
    again, told = promoted(root, good, "run-2")
    assert (again.gate.decision, again.registered, told.events) == ("already_current", "models:/photos/1", {})


def test_a_lost_race_gives_each_version_the_card_of_its_own_export(exports: tuple[str, Export, Export]):
    root, bad, good = exports
    promote_export(root, bad, GATE, "run-1")

    def card_while_another_is_promoted(export: Export) -> str:
        if export.number == bad.number:
            promote_export(root, good, GATE, "run-2")
        return card_of(open_store(root), export)

    assert register_current(root, GATE.registry, card_while_another_is_promoted) == "models:/photos/2"
    for number, export, run_id in (("1", bad, "run-1"), ("2", good, "run-2")):
        card = str(connect("").get_model_version("photos", number).description)
        assert f"# models, export {export.number}\n" in card and f"by run `{run_id}`" in card


@pytest.mark.parametrize(("table", "status"), [("metrics", "FAILED"), ("model_versions", "FINISHED")])
def test_a_registration_that_fails_midway_leaves_one_run_that_the_next_one_completes(
    exports: tuple[str, Export, Export], tmp_path: Path, table: str, status: str
):
    root, _, good = exports
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute(f"CREATE TRIGGER full BEFORE INSERT ON {table} BEGIN SELECT RAISE(ABORT, 'full'); END")
    assert [promoted(root, good, run_id)[0].registered for run_id in ("run-1", "run-2")] == ["", ""]
    assert [run.info.status for run in runs()] == [status]
    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        database.execute("DROP TRIGGER full")
    assert promoted(root, good, "run-3")[0].registered == "models:/photos/1"
    [run] = runs()
    assert (run.info.run_id, run.info.status) == (champion().run_id, "FINISHED")
    assert run.data.metrics["test/accuracy"] == pytest.approx(good.record.evaluation.accuracy)


def test_the_commands_take_what_the_registry_names(
    exports: tuple[str, Export, Export], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root, _, _ = exports

    def run(*arguments: str, code: int = 0) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--workdir", str(tmp_path / "work"), "--json"])
        assert done.exit_code == code, done.output
        return json.loads(done.stdout)

    made = run("promote", root, "--set", "gate.registry.name=photos")
    assert made["sections"]["promotion"]["registered"] == "models:/photos/1"
    found = run("lineage", "models:/photos@champion")
    assert (found["model"], found["is_current"]) == (f"{root}@2", True)
    assert found["dataset"]["source"] and "promoted by run" in found["decisions"][0]
    assert run("lineage", f"{root}@1")["decisions"] == []
    open_store(root).put("current/00000002.json", b"{")
    found = run("lineage", f"{root}@2")
    assert found["is_current"] is None and "current/00000002.json" in found["damage"]
    assert run("lineage", f"{root}@1")["is_current"] is None
    assert "expected the models folder" in run("promote", "models:/photos/1", code=2)["error"]["message"]
    refused = run("predict", "models:/photos@challenger", str(tmp_path), code=2)
    assert "the model registry has no models:/photos@challenger" in refused["error"]["message"]

    # These name no registry: it is the one of the promotion above.
    assert run("promote", f"{root}@1")["sections"]["promotion"]["registered"] == "models:/photos/2"
    assert run("promote", f"{root}@2")["sections"]["promotion"]["registered"] == "models:/photos/1"
    assert run("promote", root, "--rollback")["sections"]["promotion"]["registered"] == "models:/photos/2"
    assert resolve_registered("models:/photos@champion") == f"{root}@1"

    # What reads makes no database, and says what names one.
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for address, said in (("sqlite:///none.db", "does not exist"), ("", "MLFLOW_TRACKING_URI is not set")):
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        assert said in run("lineage", "models:/photos@champion", code=2)["error"]["message"]
    assert (
        "MLFLOW_TRACKING_URI is not set"
        in run("promote", root, "--set", "gate.registry.name=photos", code=2)["error"]["message"]
    )
    assert not list(Path().iterdir())


def test_what_is_no_export_or_not_the_same_is_refused(
    exports: tuple[str, Export, Export], monkeypatch: pytest.MonkeyPatch
):
    root, bad, _ = exports
    client = connect("")
    client.create_model_version("made-by-others", "s3://bucket/model")
    with pytest.raises(UsageError, match="is no export of shardmill"):
        resolve_registered("models:/made-by-others/1")
    with pytest.raises(UsageError, match=r"the model registry has no models:/photos\b.*expected models:/NAME@ALIAS"):
        resolve_registered("models:/photos")
    promoted(root, bad, "run-1")
    client.set_model_version_tag("photos", "1", "shardmill.weights_sha256", "f" * 64)
    with pytest.raises(IntegrityError, match="its models folder was made anew"):
        resolve_registered("models:/photos@champion")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", NOWHERE)
    with pytest.raises(StorageError, match="check MLFLOW_TRACKING_URI"):
        resolve_registered("models:/photos@champion")


def test_the_model_card_is_about_the_current_export_unless_a_person_wrote_it(exports: tuple[str, Export, Export]):
    root, bad, good = exports
    store = open_store(root)
    promoted(root, bad, "run-1", GateConfig())
    promoted(root, good, "run-2", GateConfig())
    _, front, text = store.read(CARD).decode().split("---\n", 2)
    [model] = yaml.safe_load(front)["model-index"]
    [metric] = model["results"][0]["metrics"]
    assert metric == {"type": "accuracy", "value": pytest.approx(good.record.evaluation.accuracy, abs=1e-6)}
    assert f"# models, export {good.number}" in text and good.record.content_digest in text
    assert "promoted" in text and "run `run-2`" in text and "class_0, class_1" in text
    roll_back(root, "run-3")
    _, told = promoted(root, good, "run-4", GateConfig())
    assert f"# models, export {bad.number}" in store.read(CARD).decode() and not told.events

    store.put(CARD, b"# Ours\n")
    promoted(root, good, "run-5", GateConfig())
    assert store.read(CARD) == b"# Ours\n"


def test_of_two_promotions_the_later_one_has_the_card(
    exports: tuple[str, Export, Export], monkeypatch: pytest.MonkeyPatch
):
    root, bad, good = exports
    promoted(root, bad, "run-1", GateConfig())
    store = open_store(root)
    (Path(root) / CARD).unlink()
    put = type(store).put

    def promote_meanwhile(self: object, path: str, data: bytes) -> None:
        monkeypatch.undo()
        promoted(root, good, "run-2", GateConfig())
        put(store, path, data)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(store), "put", promote_meanwhile)
    assert refresh_model_card(store) == ()
    assert f"# models, export {good.number}" in store.read(CARD).decode()


def test_names_of_classes_are_text_in_the_card(exports: tuple[str, Export, Export]):
    root, _, good = exports
    promotion = promoted(root, good, "run-1", GateConfig())[0]
    assert promotion.current == good.number
    names = ("<script>x</script>", "[a](javascript:x)", "a\\|b", "`c`")
    named = replace(good, record=good.record.model_copy(update={"class_names": names}))
    pointer = read_history(open_store(root)).current
    assert pointer is not None
    [row] = [line for line in model_card(root, named, pointer, 1).splitlines() if line.startswith("| answers")]
    for text in (r"\<script\>x", r"\[a\](javascript:x)", r"a\\\|b", r"\`c\`"):
        assert text in row


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("name", "a/b", "a name without '/', ':' and quotes"),
        ("alias", "latest", "such as champion; not latest"),
        ("alias", "v3", "not v1"),
        ("uri", "photos.example.com", "an address that MLflow takes"),
        ("uri", "postgresql://me:secret@host/mlflow", "set MLFLOW_TRACKING_URI in the environment"),
    ],
)
def test_names_that_mlflow_would_refuse_are_refused_before_any_work(key: str, value: str, expected: str):
    with pytest.raises(UsageError, match=expected):
        load_tree(TrainTree, None, (f"gate.registry.{key}={value}",))
