"""`shardmill doctor` on a committed dataset, and what a stage by itself says of its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config import load_for_dataset
from pipeline.doctor import Finding, diagnose, examine
from pipeline.printing import stage_rows, stage_title
from pipeline.tree import PipelineTree
from shardmill.jobs.config import load_tree
from shardmill.jobs.run_files import StageRecord
from shardmill.registry import Entry
from tests.support import make_dataset
from train.backends import BACKENDS


def test_doctor_shows_the_window_budget_of_the_committed_dataset(tmp_path: Path):
    uri, workdir = make_dataset(tmp_path, num_images=60, num_classes=3), str(tmp_path / "work")

    def window(*overrides: str) -> tuple[str, str]:
        findings = examine(load_for_dataset(uri, overrides, workdir), workdir)
        [found] = [each for each in findings if each.subject == "train.window_budget_bytes"]
        return found.status, found.found + found.fix

    status, text = window()
    assert status == "ok" and "of 256,000,000 bytes on each rank" in text and f"{uri}@1" in text
    # A warning: the next ETL may commit a version with smaller chunks.
    status, text = window("train.window_budget_bytes=1000")
    assert status == "warn" and "expected at most train.window_budget_bytes = 1000" in text and "num_workers" in text


@pytest.mark.parametrize(("engine", "status"), [("spark", "fail"), ("tests.extending_entries:NEW_ENGINE", "warn")])
def test_java_is_needed_only_by_what_needs_spark(
    engine: str, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    tree = load_tree(PipelineTree, None, (f"etl.engine={engine}",))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    assert rows["java"].status == status and rows["java"].fix


def test_the_kernel_has_a_row_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def row(kernel: str) -> Finding:
        tree = load_tree(PipelineTree, None, (f"etl.kernel={kernel}",))
        [found] = [each for each in examine(tree, str(tmp_path / "work")) if each.subject == "etl.kernel"]
        return found

    for name in ("shardmill.images.kernel.NATIVE_ID", "pipeline.doctor.NATIVE_ID"):
        monkeypatch.setattr(name, "native-7")
    assert (row("auto").status, row("wheels").status) == ("ok", "ok")
    assert row("auto").found == "native; native-7 is installed" and row("wheels").found.startswith("wheels; ")
    for name in ("shardmill.images.kernel.NATIVE_ID", "pipeline.doctor.NATIVE_ID"):
        monkeypatch.setattr(name, "")
    assert [row(kernel).status for kernel in ("auto", "wheels", "native")] == ["warn", "warn", "fail"]
    assert "pip install ./native" in row("auto").fix and "etl.kernel = wheels" in row("native").fix


@pytest.mark.parametrize("model", ["small_cnn", "mine:build"])
def test_a_model_needs_the_packages_of_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text("import keras\n\n\ndef build(image_shape, num_classes): ...\n")
    (tmp_path / "images").mkdir()
    (tmp_path / "c.toml").write_text('source.uri = "images"\n')
    gone = Entry("no_such_package:X", "", extra="tensorflow", packages=("no_such_package",))
    monkeypatch.setitem(BACKENDS.entries, "keras", gone)
    rows = {each.subject: each for each in diagnose("c.toml", (f"train.model={model}",), str(tmp_path / "work"))}
    assert rows["train.num_workers"].status == "fail"
    assert "train.backend = 'keras' needs no_such_package" in rows["train.num_workers"].found
    assert rows["train.num_workers"].fix == "pip install '.[tensorflow]'"


def test_doctor_without_a_config_misses_no_key_of_it(tmp_path: Path):
    workdir = str(tmp_path / "work")
    for config, is_warned in ("", False), (str(tmp_path / "c.toml"), True):
        (tmp_path / "c.toml").touch()
        rows = {each.subject: each for each in diagnose(config, (), workdir)}
        assert ("source.uri" in rows, "dataset.uri" in rows) == (is_warned, is_warned)
        assert rows["--workdir"].status == "ok" and "second writer" in rows["--workdir"].found


def test_a_config_that_cannot_run_fails_and_one_that_can_train_is_warned_of(tmp_path: Path):
    def unset(uri: str) -> dict[str, str]:
        found = diagnose(str(config), (f"dataset.uri={uri}",), str(tmp_path / "work"))
        return {each.subject: each.status for each in found if each.found.startswith("not set")}

    config = tmp_path / "c.toml"
    config.touch()
    assert unset("") == {"source.uri": "fail", "dataset.uri": "fail"}
    assert unset(str(tmp_path / "none")) == {"source.uri": "fail"}
    assert unset(make_dataset(tmp_path, num_images=20)) == {"source.uri": "warn"}


def test_the_models_of_a_promotion_are_named_once():
    promotion = {"decision": "promoted", "reason": "better", "models": "/models"}
    rows = stage_rows(StageRecord(stage="promote", sections={"promotion": promotion}))
    assert rows == [("models", "/models"), ("model", "promoted: better")]


def test_a_skipped_stage_says_what_it_shows():
    # That it is done was reported on stderr already, with its seconds.
    assert stage_title(StageRecord(stage="evaluate")) == "evaluate"
    assert "figures that the training recorded" in stage_title(StageRecord(stage="evaluate", status="skipped"))
    assert (
        stage_title(StageRecord(stage="export", status="skipped"))
        == "export: skipped; the result that is already there"
    )
