"""Bad input: the exit code, and one last line with the input, the expectation and the fix."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardmill.dataset.open import open_dataset
from tests.lab.commands import BIN, BUILD_HERE, ENVIRONMENT, in_process, last_line, shardmill
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
            "config key source.uri is not set; expected a local path, s3://bucket/prefix or hdfs://host:port/path",
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
    assert re.fullmatch(r"shardmill \d+\.\d+\.\d+\n", in_process("--version", cwd=tmp_path).stdout)
    # The command asks for the shell that it was started from; `exit` keeps that one from becoming the command itself.
    shown = ["bash", "-c", "shardmill --show-completion; exit"]
    done = subprocess.run(shown, env=ENVIRONMENT, cwd=tmp_path, capture_output=True, text=True, timeout=60)
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
    # The table comes all the same: it shows what still holds.
    assert "ok\tlisted == accepted + rejected" in done.stdout
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
