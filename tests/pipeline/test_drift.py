"""The command `drift`: what it prints, how it ends, and the record and the report of a run with it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import jsonschema
import pytest

from shardmill.dataset.maintenance.compact import compact_dataset
from shardmill.dataset.open import open_dataset
from tests.etl.pixels import predict_pixels
from tests.lab.commands import SUMMARY_SCHEMA, in_process, last_line
from tests.lab.datasets import make_dataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two versions, the second without one of the three classes; and a third one with the rows of the second."""
    folder = tmp_path_factory.mktemp("drift")
    make_dataset(folder, num_images=90)
    shutil.rmtree(folder / "images" / "class_1")
    make_dataset(folder, num_images=0)
    compact_dataset(open_dataset(str(folder / "dataset")), "r")
    (folder / "c.toml").write_text(f'[dataset]\nuri = "{folder}/dataset"\n[etl]\nmax_drift = 0.2\n')
    return folder


def test_a_version_is_shown_beside_the_one_before_or_any_other(folder: Path):
    done = in_process("drift", folder / "dataset@2", "--json", cwd=folder)
    found = json.loads(done.stdout)
    assert done.returncode == 0 and (found["version"], found["against_version"], found["ok"]) == (2, 1, True)
    assert found["amount"] == max(each["amount"] for each in found["aspects"])
    [shares] = [each for each in found["aspects"] if each["aspect"] == "class_shares"]
    assert shares["amount"] == pytest.approx(1 / 3)
    assert shares["figures"][0] == {"name": "class_1", "before": pytest.approx(1 / 3), "after": 0.0}
    # The third holds the second's rows; nothing is before the first.
    third = json.loads(in_process("drift", folder / "dataset", "--json", cwd=folder).stdout)
    assert (third["version"], third["against_version"], third["aspects"]) == (3, 1, found["aspects"])
    assert "version 1 is the first" in in_process("drift", folder / "dataset@1", cwd=folder).stdout
    back = in_process("drift", folder / "dataset@1", "--against", "2", cwd=folder).stdout
    assert "dataset@1 against @2" in back and "class_1 0.0% -> 33.3%" in back
    shutil.copytree(folder / "dataset", folder / "other", dirs_exist_ok=True)
    other = in_process("drift", folder / "dataset@1", "--against", folder / "other@1", cwd=folder).stdout
    assert f"against {folder}/other@1" in other and "class shares\t0.000" in other


def test_a_limit_ends_with_7_behind_the_table(folder: Path):
    done = in_process("drift", folder / "dataset@2", "--max-drift", "0.1", cwd=folder)
    assert done.returncode == 7 and "class shares\t0.333" in done.stdout
    assert last_line(done).startswith("ERROR 7: ") and "class_1 33.3% -> 0.0%" in last_line(done)
    assert "--diff 1` lists the rows" in last_line(done)
    as_document = in_process("drift", folder / "dataset@2", "--max-drift", "0.1", "--json", cwd=folder)
    assert as_document.returncode == 7 and not json.loads(as_document.stdout)["ok"]
    absent = in_process("drift", folder / "dataset", "--against", "7", cwd=folder)
    assert absent.returncode == 2 and "has no version 7" in last_line(absent)
    assert in_process("drift", folder / "dataset", "--max-drift", "2", cwd=folder).returncode == 2


def test_predictions_have_no_drift(folder: Path):
    predict_pixels(open_dataset(str(folder / "dataset@1")), folder / "predictions")
    for arguments in ((folder / "predictions",), (folder / "dataset", "--against", folder / "predictions")):
        refused = in_process("drift", *arguments, cwd=folder)
        assert refused.returncode == 2 and not refused.stdout
        assert "predictions@1 holds predictions" in last_line(refused)
        assert "compare the datasets that were predicted" in last_line(refused)


def test_with_a_config_it_is_a_stage_of_the_run(folder: Path):
    arguments = ["c.toml", "--workdir", "work", "--run-id", "r"]
    refused = in_process("drift", *arguments, "--dataset-version", "2", cwd=folder)
    summary = json.loads((folder / "work/runs/r/summary.json").read_text())
    assert (refused.returncode, summary["exit_code"], summary["stages"]["drift"]["status"]) == (7, 7, "failed")
    assert "class shares 0.333 (class_1 33.3% -> 0.0%" in summary["error"]
    assert in_process("report", *arguments, cwd=folder).returncode == 0
    assert "class_1 33.3% -&gt; 0.0%" in (folder / "work/runs/r/report.html").read_text()

    passed = in_process("drift", *arguments, "--dataset-version", "2", "--set=etl.max_drift=1", cwd=folder)
    summary = json.loads((folder / "work/runs/r/summary.json").read_text())
    assert passed.returncode == 0 and summary["drift"]["amount"] > 0.3
    jsonschema.validate(summary, SUMMARY_SCHEMA)
    # A version that is named in the config, in place of the one before.
    same = in_process("drift", *arguments, "--dataset-version", "2", "--set=etl.drift_baseline=2", cwd=folder)
    assert same.returncode == 0 and "against @2" in same.stdout
