"""`shardmill.run` and its siblings: the commands as functions, and the page that shows them."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import shardmill
from pipeline.output.progress import RelayedBars
from shardmill.calls.calling import NotebookOutput, as_options
from shardmill.calls.results import Diagnosis, Finding
from shardmill.errors import DriftLimitExceeded, RejectLimitExceeded, TrainingError, UsageError
from shardmill.jobs.observer import Bar, as_bar
from tests.lab.commands import ENVIRONMENT, ROOT
from tests.lab.datasets import make_dataset, write_images

PAGE = (ROOT / "docs" / "get-started" / "from-python.md").read_text(encoding="utf-8")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with photos; what the calls start imports from this checkout."""
    write_images(tmp_path / "my_photos", num_images=100)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.drill
def test_the_page_does_what_it_says(here: Path, capsys: pytest.CaptureFixture[str]):
    first, *others = re.findall(r"^```python\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(first, names)
    shown, result = capsys.readouterr(), names["result"]
    assert "etl: inputs listed: 100" in shown.err and "\x1e" not in shown.err
    # The result is the value's to show.
    assert "accepted" not in shown.err and shown.out.count("100 accepted") == 1
    for block in others:
        exec(block, names)

    assert (result.dataset.pin.version, result.dataset.manifest.normalize.image_size) == (1, 32)
    assert len(result.epochs) == 3 and result.best_epoch in result.epochs
    assert (result.accuracy, result.loss) == (
        result.summary["evaluation"]["accuracy"],
        result.summary["evaluation"]["loss"],
    )
    assert result.decision == "promoted" and Path(result.export).is_dir() and Path(result.report).is_file()
    assert Path(result.folder, "events.jsonl").exists()

    # What it shows is what the command prints.
    text = (ROOT / "docs" / "get-started" / "from-python.md").read_text(encoding="utf-8")
    assert str(result).splitlines()[1] == "images      100 accepted, 0 rejected of 100 listed" in text
    assert (
        str(result).rstrip() in shown.out
        and repr(result) == f"<run {result.run_id}: ok, accuracy {result.accuracy:.4f}>"
    )
    assert "<table>" in result._repr_html_() and 'src="data:image/png;base64,' in result._repr_html_()
    refusal = capsys.readouterr().out.strip()
    assert f"```text\n{refusal}\n```" in text
    predictions, rows = names["predictions"], names["table"]
    # A wrong setting leaves no record.
    run_ids = {result.run_id, predictions.run_id, names["embedded"].run_id}
    assert {each.name for each in (here / "shardmill-work" / "runs").iterdir()} == run_ids

    assert (predictions.num_predicted, predictions.is_new, len(rows)) == (100, True, 100)
    assert set(rows["prediction"]) <= set(result.dataset.class_names)
    embeddings_ND = predictions.embeddings()
    assert embeddings_ND.shape[0] == 100 and embeddings_ND.std() > 0
    html = predictions._repr_html_()
    assert "100 images by " in repr(predictions) and "100 predicted, 0 rejected of 100 listed" in str(predictions)
    assert f">{rows['source'][0]}</td>" in html and "/models@1" in html
    chosen = shardmill.promote("shardmill-work/models@1", quiet=True)
    assert (chosen.decision, chosen.current) == ("already_current", 1) and "export 1" in chosen._repr_html_()

    wrong, lineage = names["wrong"], shardmill.lineage("shardmill-work/models@1", quiet=True)
    assert (here / "suspects.csv").exists() and wrong.num_judged == 100 and wrong.dataset == result.dataset.pin
    assert "num judged" in wrong._repr_html_() and len(wrong.suspects) == wrong.num_likely
    assert not names["quality"].near_duplicates
    assert (lineage.dataset.num_images, lineage.is_current) == (100, True) and "promoted" in lineage.decisions[0]
    assert "dataset source" in str(lineage)

    # The same training is found, not repeated.
    version = f"{result.dataset.pin.uri}@1"
    again = shardmill.train(version, train={"epochs": 3}, quiet=True)
    assert again.summary["stages"]["train"]["status"] == "skipped" and again.epochs == result.epochs
    assert again.export is None and again.decision is None and "<table>" in again._repr_html_()


@pytest.mark.starts("program")
def test_an_error_of_the_command_is_an_exception(here: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(UsageError, match=r"^nowhere does not exist; expected a folder of images"):
        shardmill.run("nowhere")
    for number in range(10):
        (here / "my_photos" / "class_0" / f"broken{number}.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    with pytest.raises(RejectLimitExceeded) as caught:
        shardmill.etl("my_photos", workdir="work", etl={"image_size": 16})
    [run_id] = os.listdir("work/runs")
    assert caught.value.detail["run_id"] == run_id and "etl.max_reject_fraction" in str(caught.value)
    # Progress was shown; the error is the exception's to tell.
    assert "etl: inputs listed" in (said := capsys.readouterr()).err and "ERROR" not in said.err and not said.out
    dataset = shardmill.etl("my_photos", workdir="work", etl={"image_size": 16, "max_reject_fraction": 0.2}, quiet=True)
    assert (dataset.manifest.counts.rejected, capsys.readouterr().err) == (10, "")
    assert "10 rejected (" in dataset._repr_html_()
    for image in (here / "my_photos" / "class_0").iterdir():
        image.unlink()
    with pytest.raises(DriftLimitExceeded) as drifted:
        shardmill.etl("my_photos", workdir="work", etl={"image_size": 16, "max_drift": 0.0}, quiet=True)
    assert drifted.value.detail["drift"]["against_version"] == 1


@pytest.mark.starts("program")
def test_a_process_that_is_killed_says_so(here: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHARDMILL_FAILPOINT", "manifest_put")
    with pytest.raises(TrainingError, match="the process of shardmill.etl ended by SIGKILL") as caught:
        shardmill.etl("my_photos", etl={"image_size": 16}, quiet=True)
    assert any("inputs listed" in note for note in caught.value.__notes__)


@pytest.mark.starts("program")
def test_ctrl_c_ends_the_command_in_order(here: Path):
    program = "import shardmill; shardmill.run('my_photos', run_id='mine', train={'epochs': 500})"
    # Ctrl-C comes to the caller alone: a notebook's kernel gets it so.
    caller = subprocess.Popen(
        [sys.executable, "-c", program], cwd=here, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    assert caller.stderr is not None
    next(line for line in caller.stderr if line.startswith("etl: inputs listed"))
    caller.send_signal(signal.SIGINT)
    _, said = caller.communicate(timeout=300)
    assert said.rstrip().endswith("KeyboardInterrupt")
    summary = json.loads((here / "shardmill-work/runs/mine/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 130)


def test_settings_are_those_of_the_command_line():
    settings = {
        "train": {"epochs": 3, "learning_rate": 1e-05, "memory": {"budget_bytes": 5}, "sample": {"a b": 2}},
        "etl.formats": ("parquet", "tfrecord"),
        "source": {"follow_symlinks": True, "uri": Path("photos"), "label_field": "\x7f"},
    }
    assert as_options(settings)[1::2] == [
        "train.epochs=3", "train.learning_rate=1e-05", "train.memory.budget_bytes=5", 'train.sample={"a b" = 2}',
        'etl.formats=["parquet", "tfrecord"]', "source.follow_symlinks=true", 'source.uri="photos"',
        'source.label_field="\\u007f"',
    ]  # fmt: skip
    for wrong, said in (
        ({"epochs": 3}, r"write SECTION=\{'epochs': 3\}"),
        ({"train.epochs": None}, "train.epochs = None"),
    ):
        with pytest.raises(UsageError, match=said):
            as_options(wrong)
    # Also where there are no settings.
    for call, wrong, said in (
        (shardmill.mislabels, "limt", "mislabels has no argument 'limt'; .* did you mean limit"),
        (shardmill.inspect, "near_duplicate", "did you mean near_duplicates"),
        (shardmill.lineage, "epochs", "expected some of quiet; correct its name"),
        (shardmill.report, "work_dir", "did you mean workdir"),
        (shardmill.run, "wrokdir", "did you mean workdir=3"),
    ):
        with pytest.raises(UsageError, match=said):
            call("place", **{wrong: 3})


def test_what_is_imported_late_is_listed_and_a_decision_is_printed_as_rows():
    assert set(shardmill.__all__) <= set(dir(shardmill))
    decided = shardmill.PromotionResult("r", "/models", "kept", "too few", None, None, None)
    assert str(decided).splitlines() == ["models   /models", "model    kept: too few", "current  none"]
    ok, wrong = Finding("ok", "python", "3", "", False), Finding("fail", "java", "none\x1b", "install it", False)
    found = Diagnosis((ok,) * 9 + (wrong,))
    assert (found.ok, found.problems, repr(found)) == (False, (wrong,), "<Diagnosis: problems: 1>")
    head, row = str(found).splitlines()[1:]
    assert row.split() == ["fail", "java", r"none\x1b", "install", "it", "no"]
    assert row.index("java") == head.index("subject")


# `verify_dataset` returns what `verify` finds; `init` and `config` print a file; `demo` is `run` on images of its own.
NO_CALL = {"verify", "init", "config", "demo"}
# A table for people, whole or as CSV; dry runs and memory tables of strategies; what `dataset.files` and DATASET@N say.
NO_KEYWORD = {
    "source_or_config", "dataset", "models", "model", "images", "overrides", "json", "debug", "dry_run", "as_csv",
    "memory", "predictions", "files", "version", "target", "config", "everything",
}  # fmt: skip


def test_each_command_with_a_result_is_a_function_with_its_options_and_their_defaults():
    from pipeline.cli import COMMANDS

    names = {name.replace("-", "_"): name for name in COMMANDS if name not in NO_CALL}
    assert set(names) <= set(shardmill.__all__)
    for name, command in names.items():
        parameters = inspect.signature(getattr(shardmill, name)).parameters.values()
        keywords = {each.name: each.default for each in parameters if each.kind is inspect.Parameter.KEYWORD_ONLY}
        shown = [option for option in COMMANDS[command].params if not getattr(option, "hidden", False)]
        options = {option.name for option in shown}
        defaults = {str(option.name): option.default or None for option in shown if option.name in keywords}
        assert defaults == {each: keywords[each] or None for each in defaults}, name
        if name == "inspect":
            # Only a config file has settings, and `shardmill.inspect` has as many keywords as are good.
            options -= {"workdir"}
        assert keywords.keys() - {"quiet", "spark"} == options - NO_KEYWORD, name


@pytest.mark.starts("program")
def test_what_a_command_finds_is_a_value_that_shows_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    uri = make_dataset(tmp_path, num_images=60)
    found = shardmill.inspect(uri, quality=True, quiet=True)
    assert (found.num_images, found.equal_bytes.num_images) == (60, 0) and isinstance(found.near_duplicates, tuple)
    assert [each.version for each in shardmill.inspect(uri, versions=True, quiet=True).versions] == [1]
    drifted = shardmill.drift(uri, against=uri, max_drift=0.0, quiet=True)
    assert drifted.ok and drifted.amount == 0 and "class shares" in drifted._repr_html_()
    assert capsys.readouterr() == ("", "")


@pytest.mark.starts("program")
def test_what_is_beyond_a_limit_is_found_and_not_raised(tmp_path: Path):
    write_images(tmp_path / "photos", num_images=20)
    (tmp_path / "photos" / "class_0" / "=<b>\n.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    found = shardmill.check_source(tmp_path / "photos", etl={"max_reject_fraction": 0.01}, quiet=True)
    assert (found.ok, found.broken_limit, found.num_rejected) == (False, "etl.max_reject_fraction", 1)
    [rejected] = found.rejections
    assert rejected.source == "class_0/=<b>\n.png" and "&lt;b&gt;\\n" in found._repr_html_()
    assert "\\n.png" in str(found) and repr(found) == "<SourceFindings: num listed 21, num accepted 20, num rejected 1>"


def test_a_bar_reaches_the_process_that_draws_it(capsys: pytest.CaptureFixture[str]):
    screen = RelayedBars()
    screen.say("a line")
    for num_done in range(1001):
        screen.advance(Bar("etl", num_done, 1000, "images"))
    screen.clear()
    # `splitlines` would split at the separator, too.
    lines = capsys.readouterr().err.split("\n")
    bars = [bar for line in lines if (bar := as_bar(line)) is not None]
    assert lines[0] == "a line" and bars[0] == Bar("etl", 0, 1000, "images") and len(bars) < 100
    assert bars[-2].num_done == 1000 and not bars[-1].label


def test_what_a_notebook_shows_is_escaped(monkeypatch: pytest.MonkeyPatch):
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, **_: shown.append(bundle))
    output = NotebookOutput("shardmill.etl <b>")
    output.line("etl: class <script>")
    output.end(has_failed=True)
    assert (
        "<script>" not in shown[-1]["text/html"] and "shardmill.etl &lt;b&gt;: failed after" in shown[-1]["text/html"]
    )


def test_a_dataset_whose_shards_are_gone_still_shows_its_table(tmp_path: Path):
    dataset = shardmill.open_dataset(make_dataset(tmp_path, num_images=60))
    assert 'src="data:image/png;base64,' in dataset._repr_html_()
    for uri in dataset.files("train"):
        Path(uri.removeprefix("file://")).unlink()
    html = shardmill.open_dataset(str(tmp_path / "dataset"))._repr_html_()
    assert "<table>" in html and "no images are shown: " in html
