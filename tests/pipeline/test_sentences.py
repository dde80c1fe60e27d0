"""What a person reads of a stage's events: each sentence is of an event that the sources report."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from string import Formatter

import pytest

import etl.job
import train.job
from pipeline.output.data_faults import quality_rows
from pipeline.output.progress import SENTENCES, RunProgress
from pipeline.running import SUMMARY_SECTIONS
from shardmill.jobs.run_record import RunRecord
from tests.lab.commands import ROOT


@pytest.mark.parametrize("name", ["etl.listed", "etl.units_kept"])
def test_no_sentence_counts_one_thing_in_the_plural(name: str):
    sentence = SENTENCES[name].format(listed=1, images=1, units=1, kept=1, missing=1)
    assert not re.search(r"\b1 \w+ ?\w*s\b", sentence)


def test_an_event_without_a_field_of_its_sentence_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    progress = RunProgress(RunRecord(str(tmp_path), "r"), 3)
    progress.event("etl.rebased", {"num_lost": 2})
    progress.event("etl.comparing", {"inputs": "some"})
    assert "etl.rebased: num_lost 2" in capsys.readouterr().err


def test_sections_of_a_summary_are_those_of_its_applications():
    assert set(SUMMARY_SECTIONS) == {*etl.job.SUMMARY_SECTIONS, *train.job.SUMMARY_SECTIONS}


def events_in(application: str) -> Iterator[tuple[str, Path, ast.Call]]:
    """Each `….event("name", fields)` of an application's sources, with the file that it is in."""
    for file in (ROOT / application).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Attribute(attr="event"), args=[ast.Constant(value=str(name)), _]):
                    yield f"{application}.{name.removeprefix(f'{application}.')}", file, node


def keys_near(file: Path, call: ast.Call) -> set[str]:
    """The keys of all dictionaries in the file of a call, and in those from which it imports what the call names."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    named = {node.id for node in ast.walk(call) if isinstance(node, ast.Name)}
    files = [
        ROOT / f"{node.module.replace('.', '/')}.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and named & {each.name for each in node.names}
    ]
    trees = [tree, *(ast.parse(each.read_text(encoding="utf-8")) for each in files if each.is_file())]
    keys = (key for each in trees for node in ast.walk(each) if isinstance(node, ast.Dict) for key in node.keys)
    return {key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)}


@pytest.fixture(scope="module")
def reported() -> dict[str, list[set[str]]]:
    """The fields of each event that has a sentence, wherever a source reports it."""
    found: dict[str, list[set[str]]] = {}
    for application in ("etl", "train"):
        for name, file, call in events_in(application):
            if name in SENTENCES:
                found.setdefault(name, []).append(keys_near(file, call))
    return found


def test_every_sentence_is_of_an_event_that_the_sources_report_with_its_fields(reported: dict[str, list[set[str]]]):
    assert set(reported) == set(SENTENCES)
    for name, sentence in SENTENCES.items():
        fields = {field for _, field, _, _ in Formatter().parse(sentence) if field}
        # What counts from 0 there is counted from 1 for people: `RunProgress` adds these two.
        assert all(fields - {"epoch", "step"} <= keys for keys in reported[name]), name


def test_copies_under_several_classes_are_counted():
    group = {"crosses_splits": False, "conflicting_label": True, "images": []}
    found = {"faults": {}, "num_images": 9, "telltales": [], "equal_bytes": {"groups": []}, "near_duplicates": [group]}
    found["near_duplicates_left_out"] = 1200
    exact, near, _, how, left_out = (row[1] for row in quality_rows(found))
    assert exact == "none"
    assert near == "1 group with 0 images; 0 groups in several splits, 1 of several classes"
    assert how == "at most 3 of 64 bits differ: inspect DATASET --near-duplicates 3"
    assert left_out.startswith("1,200 images look too alike")
