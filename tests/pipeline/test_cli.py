"""The command line: help, words, languages, and what each command ends with."""

from __future__ import annotations

import ast
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
from typer.testing import CliRunner

import etl.job
import train.job
from pipeline.cli import COMMANDS, app
from pipeline.cli_options import Common
from pipeline.output.printing import print_table
from pipeline.output.progress import SENTENCES, RunProgress
from pipeline.running import SUMMARY_SECTIONS
from shardmill.data_quality.findings import EqualBytes, QualityFindings
from shardmill.data_quality.near_duplicates import SimilarImage, SimilarImages
from shardmill.data_quality.quality import Fault
from shardmill.dataset.dataset import open_dataset
from shardmill.jobs.run_record import RunRecord
from tests.lab.commands import BIN, BUILD_HERE, ENVIRONMENT, ROOT, in_process, last_line, shardmill
from tests.lab.datasets import make_dataset, write_images
from tests.lab.scale import exhaustive


def refused(done, code: int, *parts: str) -> str:
    """The last line, after checking that it is the only error, has the code, and holds every part."""
    line = last_line(done)
    assert done.returncode == code, done.stderr
    assert line.startswith(f"ERROR {code}: "), done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    for part in parts:
        assert part in line
    return line


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_dataset(tmp_path_factory.mktemp("dataset"), num_images=160, num_classes=3)


@pytest.fixture
def config(tmp_path: Path, dataset: str) -> Path:
    """A config for training on an own copy of the small dataset."""
    shutil.copytree(dataset, tmp_path / "dataset")
    file = tmp_path / "c.toml"
    file.write_text(f'[dataset]\nuri = "{tmp_path}/dataset"\n[train]\nepochs = 1\nglobal_batch_size = 16\n')
    return file


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["run"], "Missing argument 'SOURCE_OR_CONFIG'; see `shardmill run --help`"),
        (["run", ".", "--nope"], "No such option: --nope; see `shardmill run --help`"),
        (["rum"], "see `shardmill --help`"),
        (
            ["run", "nowhere"],
            "nowhere does not exist; expected a folder of images, an archive, a table or a .toml file; check",
        ),
        (["run", "nowhere.toml"], "no config file nowhere.toml; expected a TOML file; `shardmill init` writes one"),
        (["config", "show", "--set", "train.epoch=3"], "unknown config key train.epoch; did you mean train.epochs?"),
        (
            ["config", "show", "--set", "train.epochs=0"],
            "config key train.epochs = 0; expected greater than or equal to 1",
        ),
        (
            ["etl", "only-dataset.toml"],
            "config key source.uri is not set; expected a local path, or a URI (s3://bucket/prefix, gs://, az://, hdfs://)",
        ),
        (
            ["run", ".", "--epochs", "3"],
            "No such option: --epochs; config keys are set like this: --set train.epochs=3",
        ),
        (["etl", ".", "--image-size=32"], "--set etl.image_size=32"),
        (["train", ".", "--num-workers", "2"], "--set train.num_workers=2"),
        (["verify", "only-dataset.tml"], "does not exist; expected a dataset's folder or URI, or a .toml file"),
        (["inspect", "only-datasets"], "did you mean only-dataset.toml?"),
        (["plan", "only-dataset.toml"], "; run `shardmill etl only-dataset.toml` first, or check the path"),
        (["train", "only-dataset.toml"], "; run `shardmill etl only-dataset.toml` first, or check the path"),
        (["report", "--workdir", "nowhere"], "no run below nowhere"),
        (["run", ".", "--run-id", "../x"], "run id '../x'; expected a name of at most 255 bytes without '/'"),
        (["inspect", "gopher://host/d"], "no storage for gopher://"),
    ],
)
def test_wrong_words_are_refused(arguments: list[str], part: str, tmp_path: Path):
    (tmp_path / "only-dataset.toml").write_text('[dataset]\nuri = "d"\n')
    refused(in_process(*arguments, cwd=tmp_path), 2, part)
    if "nowhere" in part:
        assert not (tmp_path / "shardmill-work").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["run", "nowhere", "--json"],
        ["run", "--nope", "--json"],
        ["verify", "nowhere", "--json"],
        ["train", "c.toml", "--run-id", "r", "--json"],
    ],
)
def test_a_failure_is_one_json_object_too(arguments: list[str], tmp_path: Path):
    (tmp_path / "c.toml").write_text('[dataset]\nuri = "gone"\n')
    done = in_process(*arguments, cwd=tmp_path)
    told = json.loads(done.stdout)
    assert done.returncode == told["error"]["code"] > 0
    assert last_line(done) == f"ERROR {told['error']['code']}: {told['error']['message']}"
    assert told["run_id"] == ("r" if "r" in arguments else json.loads(done.stdout)["run_id"])
    if told["run_id"] is not None:
        summary = json.loads((tmp_path / f"shardmill-work/runs/{told['run_id']}/summary.json").read_text())
        assert summary["error"] == told["error"]["message"]


@pytest.mark.starts("program")
def test_no_command_is_help_and_no_error(tmp_path: Path):
    for arguments in ([], ["config"]):
        done = in_process(*arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr) == (0, "") and "Usage" in done.stdout
    released = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert in_process("--version", cwd=tmp_path).stdout == f"shardmill {released}\n"
    # The command asks for the shell that it was started from; `exit` keeps that one from becoming the command itself.
    shown = ["bash", "-c", "shardmill --show-completion; exit"]
    done = subprocess.run(shown, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert "shardmill" in done.stdout, done.stderr


@pytest.mark.starts("command")
def test_commands_are_programs_of_a_shell(tmp_path: Path):
    """As are `run`, what interrupts it, and `predict`, in test_run.py; the other tests call what a command calls."""
    write_images(tmp_path / "images", num_images=60)
    assert "check-source" in shardmill("--help", cwd=tmp_path).stdout
    linear = ("--set", "train.model=tests.train.models_under_test:linear", "--set", "train.epochs=1")
    for command in (
        ("etl", "images", "--set", "etl.image_size=16"),
        ("verify", "shardmill-work/dataset", "--deep"),
        ("train", "shardmill-work/dataset", *linear),
    ):
        done = shardmill(*command, "--json", cwd=tmp_path)
        assert done.returncode == 0 and json.loads(done.stdout), done.stderr


def test_a_missing_and_an_empty_source(tmp_path: Path):
    (tmp_path / "c.toml").write_text(f'[source]\nuri = "{tmp_path}/gone"\n[dataset]\nuri = "d"\n')
    refused(in_process("etl", "c.toml", cwd=tmp_path), 2, f"{tmp_path}/gone")
    (tmp_path / "empty").mkdir()
    refused(in_process("run", "empty", *BUILD_HERE, cwd=tmp_path), 2, "empty")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(("progress", "table"), [(None, "made\nimages\t3\n"), ("json", ""), ("drawn", "")])
def test_a_caller_in_python_gets_the_document_and_no_table(progress, table, monkeypatch, capsys):
    if progress:
        monkeypatch.setenv("SHARDMILL_PROGRESS", progress)
    common = Common((), "w", "r", is_run_named=False, json=True, debug=False)
    print_table(common, {"images": 3}, [("images", "3")], title="made")
    assert tuple(capsys.readouterr()) == ('{\n  "images": 3\n}\n', table)


def test_too_many_rejects_publish_nothing(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20, num_classes=2)
    for name in ("bad0.jpg", "bad1.jpg", "bad2.jpg", "bad2_void.png", "bad3.jpg"):
        (tmp_path / "images" / "class_0" / name).write_text("<html>not found</html>" if "void" not in name else "")
    done = in_process("etl", "images", "--workdir", "w", "--run-id", "r", *BUILD_HERE, cwd=tmp_path)
    line = refused(done, 7, "5 of 25 inputs were rejected", "not_an_image 4", "empty_file 1", "allows 0.05")
    ledger = re.search(r"`shardmill (inspect --rejects \S+)`", line)
    assert ledger and line.count(".jpg: not_an_image") == 3
    listed = in_process(*ledger[1].split(), "--json", cwd=tmp_path)
    odd, void = "not_an_image", "empty_file"
    by_key, by_reason = [odd, odd, odd, void, odd], [f"{odd} 4, {void} 1", odd, odd, odd, odd, void]
    assert [entry["reason"] for entry in json.loads(listed.stdout)] == by_key
    assert [row.split("\t")[1] for row in listed.stderr.splitlines()[-6:]] == by_reason
    assert not list((tmp_path / "w" / "dataset").glob("manifests/*"))
    summary = json.loads((tmp_path / "w/runs/r/summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 7)
    assert f"ERROR 7: {summary['error']}" == line
    assert in_process("report", "--run-id", "r", "--workdir", "w", cwd=tmp_path).returncode == 0
    page = (tmp_path / "w/runs/r/report.html").read_text()
    assert "Rejected inputs" in page and "5 of 25 listed inputs" in page and "class_0/bad3.jpg" in page


def test_a_flat_folder_cannot_be_trained_on(tmp_path: Path):
    write_images(tmp_path / "images", num_images=30, num_classes=1)
    flat = make_flat(tmp_path)
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{flat}"\n')
    refused(in_process("train", "c.toml", cwd=tmp_path), 2, "has no labels", "one folder per class")


def make_flat(folder: Path) -> str:
    from etl.config import EtlConfig
    from tests.lab.datasets import build_here

    return build_here(str(folder / "images" / "class_0"), str(folder / "dataset"), EtlConfig(image_size=16))


def test_a_missing_shard_is_named_by_verify_and_by_training(config: Path):
    shard = Path(open_dataset(f"{config.parent}/dataset").files("train")[0])
    shard.unlink()
    done = in_process("verify", f"{config.parent}/dataset", cwd=config.parent)
    assert done.returncode == 3 and shard.name in last_line(done)
    # The table comes all the same: it shows what still holds, and what was not looked at.
    assert "ok\tlisted == accepted + rejected" in done.stdout
    assert "-\tthe bytes of the shards\tnot read; --deep reads them" in done.stdout
    assert re.search(rf"^FAILED\t.*{re.escape(shard.name)}", done.stdout, re.MULTILINE)
    refused(in_process("train", config, cwd=config.parent), 3, shard.name)


@pytest.mark.drill
def test_a_flipped_byte_is_named_by_verify_and_on_every_rank(config: Path):
    shard = Path(open_dataset(f"{config.parent}/dataset").files("train")[0])
    data = bytearray(shard.read_bytes())
    data[len(data) // 3] ^= 1
    shard.write_bytes(data)
    done = in_process("verify", f"{config.parent}/dataset", "--deep", cwd=config.parent)
    assert done.returncode == 3 and shard.name in last_line(done)
    two_ranks = ("train.strategy=horovod", "train.launcher=local", "train.num_workers=2")
    options = [word for key in two_ranks for word in ("--set", key)]
    refused(in_process("train", config, *options, cwd=config.parent), 3, shard.name)


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.model=nowhere:build"], ["nowhere:build", "there is no module 'nowhere'"]),
        (["train.model=small_cmm"], ["small_cmm", "small_cnn"]),
        (["train.num_streams=6"], ["train.global_batch_size = 16", "train.num_streams = 6", "nearest: 18"]),
        (["train.num_workers=9", "train.num_streams=8"], ["train.num_workers = 9", "train.num_streams = 8"]),
        (["train.num_workers=17"], ["train.num_workers = 17", "train.global_batch_size = 16"]),
        (["train.strategy=horovodd"], ["horovodd", "horovod"]),
    ],
)
def test_what_cannot_be_trained_is_refused_with_the_numbers(overrides: list[str], parts: list[str], config: Path):
    options = [word for override in overrides for word in ("--set", override)]
    refused(in_process("train", config, *options, cwd=config.parent), 2, *parts)


@pytest.mark.drill
def test_a_full_disk_is_reported_with_path_and_bytes(config: Path):
    # A limit on the size of files fails a write just as a full disk does, and needs no disk.
    def limit_file_size() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    done = shardmill(
        "train", config, "--set", f"models.uri={config.parent}/models", cwd=config.parent, preexec=limit_file_size
    )
    line = refused(done, 4, "no space to write", f"{config.parent}/models", "free space")
    assert re.search(r"\(\d+ bytes\)", line)


def test_a_folder_that_was_never_committed_is_not_a_dataset(tmp_path: Path):
    for mistyped in (tmp_path, tmp_path / "nothing", f"{tmp_path}@4", f"{tmp_path}@\N{SUPERSCRIPT TWO}"):
        refused(in_process("inspect", mistyped, cwd=tmp_path), 2, str(tmp_path))
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "left.parquet").write_bytes(b"")
    refused(in_process("verify", tmp_path, cwd=tmp_path), 3, f"{tmp_path} is not a committed dataset")


def test_inspect_lists_files_for_other_tools(dataset: str, tmp_path: Path):
    done = in_process("inspect", dataset, "--files", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout)
    assert {(each["split"], each["format"]) for each in files} >= {("train", "parquet"), ("train", "tfrecord")}
    assert all(Path(each["uri"]).is_file() for each in files)
    plain = in_process("inspect", dataset, "--files", cwd=tmp_path)
    assert plain.stdout.splitlines() == [each["uri"] for each in files]


def test_a_failed_verify_is_what_the_summary_says(dataset: str, tmp_path: Path):
    shutil.copytree(dataset, tmp_path / "dataset")
    next(path for path in (tmp_path / "dataset" / "shards").rglob("*.parquet")).unlink()
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{tmp_path}/dataset"\n')
    done = in_process("verify", "c.toml", "--workdir", "work", "--run-id", "r", cwd=tmp_path)
    summary = json.loads((tmp_path / "work/runs/r/summary.json").read_text())
    assert (done.returncode, summary["exit_code"], summary["status"]) == (3, 3, "failed"), done.stderr
    assert summary["stages"]["verify"]["status"] == "failed" and ".parquet" in summary["error"]


def test_json_output_is_all_of_stdout(dataset: str, tmp_path: Path):
    done = in_process("verify", f"{dataset}@1", "--json", cwd=tmp_path)
    report = json.loads(done.stdout)
    assert (done.returncode, report["ok"], report["version"]) == (0, True, 1)
    assert all(check["rule"] in done.stderr for check in report["checks"])


def test_init_writes_a_config_once(tmp_path: Path):
    assert in_process("init", cwd=tmp_path).returncode == 0
    assert "# epochs = 10" in (tmp_path / "shardmill.toml").read_text()
    assert in_process("init", "all.toml", "--all", cwd=tmp_path).returncode == 0
    assert "# prefetch_bytes = " in (tmp_path / "all.toml").read_text()
    refused(in_process("init", cwd=tmp_path), 2, "shardmill.toml exists already", "expected a new name")
    shown = in_process("config", "show", "shardmill.toml", "--set", "train.epochs=4", cwd=tmp_path)
    assert shown.returncode == 0 and "\nepochs = 4\n" in shown.stdout


def test_options_without_effect_are_hidden(tmp_path: Path):
    for command, without in (("init", "--workdir"), ("export-tar", "--run-id"), ("config show", "--run-id")):
        shown = in_process(*command.split(), "--help", cwd=tmp_path).stdout
        assert "--json" in shown and without not in shown
    assert "--run-id" in in_process("run", "--help", cwd=tmp_path).stdout
    # They are still taken: scripts give every command the same ones.
    assert in_process("init", "--run-id", "r", cwd=tmp_path).returncode == 0


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("options", "unbuffered"), [([], ""), exhaustive([], "1"), exhaustive(["--json"], ""), exhaustive(["--json"], "1")]
)
def test_a_full_disk_behind_stdout_is_a_storage_error(options: list[str], unbuffered: str):
    command = [str(BIN / "shardmill"), "config", "show", *options]
    with open("/dev/full", "w") as full:
        environment = {**ENVIRONMENT, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 4 and line.startswith("ERROR 4: ") and "No space left" in line and "free space" in line


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("error", "text"), [("RuntimeError", "a\nb"), exhaustive("KeyError", "x"), exhaustive("RecursionError", "deep")]
)
def test_an_unexpected_error_is_one_line_too(error: str, text: str, tmp_path: Path):
    command = [sys.executable, "-m", "tests.programs.fail_unexpectedly", error, text]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True)
    [line] = done.stderr.splitlines()
    assert done.returncode == 1 and line.startswith(f"ERROR 1: {error}") and "--debug" in line


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("predict", "predict [OPTIONS] MODEL IMAGE..."),
        ("train", "train [OPTIONS] DATASET[@N]"),
        ("report", "report [OPTIONS] [SOURCE_OR_CONFIG]"),
        ("init", "init [OPTIONS] [FILE]"),
    ],
)
def test_help_names_arguments_without_braces(command: str, usage: str):
    shown = CliRunner().invoke(app, [command, "--help"]).output
    assert f"{usage} " in shown and "{" not in shown, shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_loads_and_shows_the_help_of_its_entry(name: str):
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"])
    assert shown.exit_code == 0, shown.output
    assert " ".join(COMMANDS.entry(name).help.split()) in " ".join(shown.output.split())
    listed = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["--help"]).output
    assert f" {name} " in listed


# Python turns its UTF-8 mode on by itself in the locale C, unless it is told not to.
IN_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0"}
ETL = ["shardmill", "etl"]
OTHERS = [["shardmill", "run"], [sys.executable, str(ROOT / "etl" / "job.py"), "--config"]]


def run(arguments: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [str(BIN / "shardmill") if arguments[0] == "shardmill" else arguments[0], *arguments[1:]],
        cwd=folder,
        env={**ENVIRONMENT, "PYTHONIOENCODING": "", **environment},
        capture_output=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("locale") / "sp äce"
    write_images(folder / "bil der", num_images=40, num_classes=2)
    os.rename(folder / "bil der" / "class_0", folder / "bil der" / "kätzchen")
    (folder / "bil der" / "kätzchen" / "größe.jpg").write_bytes(b"no image")
    (folder / "fö.toml").write_text(
        '[source]\nuri = "bil der"\n[dataset]\nuri = "dö"\n[models]\nuri = "mö"\n'
        "[etl]\nimage_size = 16\n[train]\nepochs = 1\n",
        encoding="utf-8",
    )
    return folder


def run_in(workdir: str, command: list[str], folder: Path, **environment: str) -> dict[str, Any]:
    """The summary of a command on the folder's images, with its dataset in `workdir`."""
    done = run(
        [*command, "fö.toml", "--workdir", workdir, "--run-id", "rün", "--set", f"dataset.uri={workdir}/dä"],
        folder, **environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    assert "\\x" not in done.stderr.decode() and "\\udc" not in done.stderr.decode()
    return json.loads((folder / workdir / "runs/rün/summary.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def digest_under_utf_8(folder: Path) -> str:
    """Of the dataset, which is the same whatever builds it."""
    return run_in("wö rk utf-8", ETL, folder, LC_ALL="C.UTF-8")["dataset"]["content_digest"]


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    "command", [ETL, *(pytest.param(each, marks=pytest.mark.drill) for each in OTHERS)], ids=["etl", "run", "job"]
)
def test_a_locale_without_umlauts_changes_nothing(folder: Path, command: list[str], request, digest_under_utf_8: str):
    """Dataset, summary, events, report, console: as under UTF-8."""
    workdir = f"wö rk {request.node.callspec.id} ascii"
    summary = run_in(workdir, command, folder, **IN_ASCII)
    assert summary["dataset"]["content_digest"] == digest_under_utf_8
    assert summary["dataset"]["counts"]["rejected"] == 1
    assert summary["dataset"]["uri"] == str(folder / workdir / "dä")
    events = (folder / workdir / "runs/rün/events.jsonl").read_text("utf-8").splitlines()
    assert any(event.get("dataset") == summary["dataset"]["uri"] for event in map(json.loads, events))
    if "run" in command:
        assert "kätzchen" in (folder / workdir / "runs/rün/report.html").read_text("utf-8")
    shown = run(["shardmill", "inspect", f"{workdir}/dä", "--rejects"], folder, **IN_ASCII)
    assert "kätzchen/größe.jpg" in shown.stdout.decode("utf-8")


@pytest.mark.starts("program")
def test_a_failure_names_its_path(folder: Path):
    done = run(["shardmill", "etl", "nirgendwö.toml"], folder, **IN_ASCII)
    assert done.returncode == 2 and "nirgendwö.toml" in done.stderr.decode("utf-8").splitlines()[-1]


@pytest.mark.starts("program")
def test_a_stream_of_another_encoding_gets_escapes(folder: Path):
    done = run(["shardmill", "etl", "nirgendwö.toml"], folder, PYTHONIOENCODING="ascii")
    assert done.returncode == 2 and b"nirgendw\\xf6.toml" in done.stderr
    done = run(["shardmill", "check-source", "bil der"], folder, PYTHONIOENCODING="ascii:strict")
    assert b"k\\xe4tzchen" in done.stdout + done.stderr and b"ERROR 1" not in done.stderr


@pytest.mark.starts("program")
def test_python_that_does_not_take_utf_8_is_one_line(folder: Path):
    command = [sys.executable, "-X", "utf8=0", "-m", "pipeline.cli", "inspect", "nö"]
    done = run(command, folder, LC_ALL="C")
    [line] = done.stderr.decode().splitlines()
    assert (
        done.returncode == 2 and line.startswith("ERROR 2: Python decodes file names as ") and "LC_ALL=C.UTF-8" in line
    )


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
    group = SimilarImages(tuple(SimilarImage(name, "train", name) for name in "ab"))
    found = QualityFindings(9, (), (), EqualBytes(0, 0, 0, 0, ()), (group,), 1200)
    exact, near, _, how, left_out = (value for name, value in found.table() if name not in set(Fault))
    assert exact == "none"
    assert near == "1 group with 2 images; 0 groups in several splits, 1 of several classes"
    assert how == "at most 3 of 64 bits differ: inspect DATASET --near-duplicates 3"
    assert left_out.startswith("1,200 images look too alike")


def test_the_demo_has_a_folder_of_its_own_and_keeps_off_that_of_another_dataset(tmp_path: Path):
    assert "[default: demo-work]" in in_process("demo", "--help", cwd=tmp_path).stdout
    (tmp_path / "work" / "dataset").mkdir(parents=True)
    refused(in_process("demo", "--workdir", "work", cwd=tmp_path), 2, "work holds a dataset that is not the demo's")
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["dataset"]
