"""The registry follows what is current, whatever made it so; a server that is away costs a warning."""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.cli import app
from shardmill.errors import IntegrityError, StorageError, UsageError
from shardmill.jobs.config import load_tree
from shardmill.own_card import CARD
from shardmill.stores import open_store
from tests.etl.building import Recorder
from tests.train.exports import put_export
from train.published.announce import announce, card_of, model_card, refresh_model_card
from train.published.current import read_history
from train.published.decision import Promotion
from train.published.exported import Export
from train.published.gate import promote_export
from train.published.mlflow_registry import register_current, resolve_registered
from train.published.promote import choose_export, roll_back
from train.reporting.mlflow_client import connect, experiment_id
from train.settings.gate import GateConfig, RegistryConfig
from train.tree import TrainTree

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
    refused = run("predict", "models:/photos@challenger", "x.png", code=2)
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
