"""Predictions as CSV and as an exit code."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipeline.cli import app
from pipeline.commands.predict import check_any_predicted, prediction_csv, prediction_rows
from shardmill.errors import UsageError
from train.published.predict import Guess, Prediction

GOOD = Prediction("a.png", "cat", 0.75, "", (Guess("cat", 0.75), Guess("dog", 0.25)))
HOSTILE = Prediction("=cmd|' /C calc'!A0.png", "@SUM(1)", 0.5, "", (Guess("@SUM(1)", 0.5), Guess("+1", 0.5)))
BAD = Prediction("-b,\n.png", "", 0.0, "missing: no such file")


def test_no_cell_of_the_csv_is_a_formula():
    header, *rows = csv.reader(io.StringIO(prediction_csv([GOOD, HOSTILE, BAD])))
    assert header == ["path", "rejection", "label", "probability", "label_2", "probability_2"]
    assert rows[0] == ["a.png", "", "cat", "0.750000", "dog", "0.250000"]
    assert rows[1] == ["'=cmd|' /C calc'!A0.png", "", "'@SUM(1)", "0.500000", "'+1", "0.500000"]
    assert rows[2] == ["'-b,\n.png", "missing: no such file", "", "", "", ""]


def test_a_path_that_is_not_utf8_is_shown_by_its_bytes():
    unreadable = Prediction("bad\udcff.png", "", 0.0, "missing: no such file")
    assert r"bad\xff.png" in prediction_csv([unreadable])
    with pytest.raises(UsageError, match=r"bad\\xff\.png"):
        check_any_predicted([unreadable])


def test_people_see_one_row_a_file():
    assert prediction_rows([GOOD, BAD]) == [
        ("a.png", "cat", "0.7500", "dog", "0.2500"),
        ("-b,\n.png", "missing: no such file", "", "", ""),
    ]
    assert prediction_rows([BAD]) == [("-b,\n.png", "missing: no such file", "")]


def test_nothing_but_rejections_is_an_error():
    check_any_predicted([BAD, GOOD])
    with pytest.raises(UsageError, match=r"none of 2 file\(s\) .* missing: no such file"):
        check_any_predicted([BAD, BAD])


def test_a_batch_job_prints_no_csv(tmp_path: Path):
    job = ("predict", str(tmp_path), "images", "--out", "folder", "--csv", "--json")
    refused = CliRunner().invoke(app, job)
    assert refused.exit_code == 2 and "--csv with --out" in json.loads(refused.stdout)["error"]["message"]
