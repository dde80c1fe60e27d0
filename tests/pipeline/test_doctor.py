"""`shardmill doctor`: what it checks of the machine and of a dataset."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from etl.config import EtlConfig
from pipeline.config import load_for_dataset, load_pipeline
from pipeline.doctor.doctor import diagnose, examine, rehearsed
from pipeline.output.printing import outcome_words, stage_title
from pipeline.tree import PipelineTree
from shardmill.calls.results import Finding
from shardmill.dataset.dataset import open_dataset
from shardmill.errors import StorageError, UsageError
from shardmill.failpoints import VARIABLE
from shardmill.jobs.config import SparkConfig, load_tree
from shardmill.jobs.run_files import StageRecord
from shardmill.jobs.summary_rows import stage_rows
from shardmill.registry import Entry, install_hint
from shardmill.stores import open_store
from shardmill.words import size_of
from tests.lab.commands import ENVIRONMENT, in_process, start
from tests.lab.datasets import build_here, make_dataset, write_images
from tests.processes import is_stopped
from tests.services.faulty_store import FaultyStore
from tests.train.training import check_trainable
from train.backends import BACKENDS
from train.config import TrainConfig
from train.planning.checks import row_shares
from train.planning.setup import resolve


@pytest.mark.starts("program")
@pytest.mark.parametrize(("engine", "status"), [("spark", "fail"), ("tests.extending_entries:NEW_ENGINE", "ok")])
def test_java_is_needed_only_by_what_needs_spark(engine: str, status: str, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "no-java"))
    tree = load_tree(PipelineTree, None, (f"etl.engine={engine}",))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    assert rows["java"].status == status and rows["java"].fix


@pytest.mark.starts("program")
def test_the_kernel_has_a_row_with_its_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def row(kernel: str) -> Finding:
        tree = load_tree(PipelineTree, None, (f"etl.kernel={kernel}",))
        [found] = [each for each in examine(tree, str(tmp_path / "work")) if each.subject == "etl.kernel"]
        return found

    for name in ("shardmill.kernel.NATIVE_ID", "pipeline.doctor.doctor.NATIVE_ID"):
        monkeypatch.setattr(name, "native-7")
    assert (row("auto").status, row("wheels").status) == ("ok", "ok")
    assert row("auto").found == "native; native-7 is installed" and row("wheels").found.startswith("wheels; ")
    for name in ("shardmill.kernel.NATIVE_ID", "pipeline.doctor.doctor.NATIVE_ID"):
        monkeypatch.setattr(name, "")
    assert [row(kernel).status for kernel in ("auto", "wheels", "native")] == ["warn", "warn", "fail"]
    assert "pip install ./native" in row("auto").fix and "etl.kernel = wheels" in row("native").fix


@pytest.mark.starts("program")
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
    assert rows["train.num_workers"].fix == install_hint("tensorflow")


@pytest.mark.starts("program")
def test_doctor_without_a_config_misses_no_key_of_it(tmp_path: Path):
    workdir = str(tmp_path / "work")
    for config, is_warned in ("", False), (str(tmp_path / "c.toml"), True):
        (tmp_path / "c.toml").touch()
        rows = {each.subject: each for each in diagnose(config, (), workdir)}
        assert ("source.uri" in rows, "dataset.uri" in rows) == (is_warned, is_warned)
        assert rows["--workdir"].status == "ok" and "second writer" in rows["--workdir"].found


@pytest.mark.starts("program")
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


@pytest.mark.parametrize(
    ("decision", "words"),
    [("promoted", "would be promoted"), ("kept", "would not be promoted"), ("already_current", "already_current")],
)
def test_the_gate_promotes_nothing(decision: str, words: str):
    judged = {"decision": decision, "reason": "0.9", "current": None, "candidate": 1}
    assert stage_rows(StageRecord(stage="gate", sections={"gate": judged})) == [("model", f"{words}: 0.9")]


def test_a_skipped_stage_says_what_it_shows():
    # That it is done was reported on stderr already, with its seconds.
    assert stage_title(StageRecord(stage="evaluate")) == "evaluate"
    assert "metrics recorded by the training" in stage_title(StageRecord(stage="evaluate", status="skipped"))
    assert stage_title(StageRecord(stage="export", status="skipped")) == "export"
    train = {"strategy": "single", "world_size": 1, "epochs": 9, "steps": 90, "weights_epoch": 6, "exported": "best"}
    trained = StageRecord(stage="train", sections={"train": train})
    assert outcome_words(trained) == "done; epoch 7, the best, is evaluated and exported"
    assert stage_rows(trained) == [
        ("training", "single, 1 rank, 9 epochs, 90 steps; epoch 7, the best, is evaluated and exported")
    ]
    assert outcome_words(StageRecord(stage="export", status="skipped")) == "skipped, its result already exists"
    for registered, words in (("models:/photos/1", "registered as models:/photos/1"), ("", "and not registered")):
        record = StageRecord(stage="promote", status="skipped", sections={"promotion": {"registered": registered}})
        assert outcome_words(record) == f"already current, {words}"


def rows_of(tree: PipelineTree, workdir: Path) -> dict[str, Finding]:
    return {each.subject: each for each in examine(tree, str(workdir))}


@pytest.mark.starts("program")
def test_a_clock_far_from_ours_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def row() -> Finding:
        write_images(tmp_path / "images", num_images=20, num_classes=2)
        overrides = (
            f"source.uri={tmp_path / 'images'}",
            f"dataset.uri={tmp_path / 'd'}",
            f"models.uri={tmp_path / 'm'}",
        )
        return rows_of(load_tree(PipelineTree, None, overrides), tmp_path / "work")["clock of dataset.uri"]

    assert row().status == "ok"
    for apart in 100, -100:
        ours = SimpleNamespace(time=lambda apart=apart: time.time() + apart)
        monkeypatch.setattr("pipeline.preflight.time", ours)
        found = row()
        assert found.status == "warn" and re.match(r"differs from this machine", found.found) and "NTP" in found.fix
    assert not (tmp_path / "d").exists()


@pytest.mark.starts("program")
def test_room_is_reported_beside_what_a_build_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=20, num_classes=2)
    uris = (
        f"source.uri={tmp_path / 'images'}",
        f"dataset.uri={tmp_path / 'not' / 'there'}",
        f"models.uri={tmp_path / 'm'}",
    )
    # 20 images of 1000 x 1000 x 3 bytes, in two formats.
    how = ("etl.encoding=raw", "etl.image_size=1000", 'etl.formats=["parquet", "tfrecord"]')
    for free, status in ((130_000_000, "ok"), (110_000_000, "warn")):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr("pipeline.doctor.doctor.shutil.disk_usage", lambda folder, usage=usage: usage)
        found = rows_of(load_tree(PipelineTree, None, (*uris, *how)), tmp_path / "work")["room for dataset.uri"]
        assert found.status == status
        assert f"{size_of(free)} free; a build of all 20 images takes about {size_of(120_000_000)[:3]}" in found.found


@pytest.mark.starts("program")
def test_a_host_whose_name_has_no_address_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert rows_of(load_tree(PipelineTree, None, ()), tmp_path)["host name"].status == "ok"
    monkeypatch.setattr("socket.gethostname", lambda: "no-such-host.invalid")
    for num_workers, status in (1, "warn"), (2, "fail"):
        tree = load_tree(PipelineTree, None, (f"train.num_workers={num_workers}",))
        found = rows_of(tree, tmp_path)["host name"]
        assert found.status == status and "127.0.0.1 no-such-host.invalid" in found.fix


@pytest.mark.starts("program")
def test_the_device_of_each_rank_is_shown(tmp_path: Path):
    rows = rows_of(load_tree(PipelineTree, None, ("train.num_workers=2", "train.devices=cpu")), tmp_path)
    host = socket.gethostname()
    assert rows["devices"] == Finding("ok", "devices", f"rank 0: {host} cpu; rank 1: {host} cpu")


BROKEN_MODEL = """
import keras


class Breaks(keras.layers.Layer):
    def call(self, inputs, training=None):
        if training:
            raise ValueError("the head is missing")
        return inputs


def build(image_shape, num_classes):
    inputs = keras.Input(image_shape)
    return keras.Model(inputs, keras.layers.Dense(num_classes)(keras.layers.Flatten()(Breaks()(inputs))))
"""


def rehearsal(folder: Path, *overrides: str) -> Finding:
    """With one rank; it leaves nothing. In the working directory is a model that builds, and breaks in a step."""
    Path("broken.py").write_text(BROKEN_MODEL)
    uri = make_dataset(folder, num_images=60, num_classes=3)
    Path("c.toml").write_text(f'[dataset]\nuri = "{uri}"\n[models]\nuri = "models"\n')
    one = ("train.num_workers=1", "train.global_batch_size=12", "train.num_streams=12")
    where = ("c.toml", (*one, *overrides), str(folder / "work"))
    found = rehearsed(diagnose(*where), *where)
    assert not [path for path in (folder / "models").rglob("*") if path.is_file()]
    return found


@pytest.mark.starts("program", "ranks")
def test_a_rehearsal_takes_one_step_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    done = rehearsal(tmp_path)
    assert done.status == "ok" and re.search("1 rank by inline, .*: first step \\d+\\.\\d s after", done.found)
    assert "not run: " in rehearsal(tmp_path, "train.model=missing:build").found


@pytest.mark.drill
def test_a_rehearsal_finds_what_only_a_step_and_its_checkpoint_show(tmp_path: Path, monkeypatch, faulty):
    monkeypatch.chdir(tmp_path)
    broken = rehearsal(tmp_path, "train.model=broken:build")
    assert broken.status == "fail" and "the head is missing" in broken.found
    # It builds.
    rows = [rows_of(load_pipeline("c.toml", ("train.model=broken:build",), "work"), tmp_path) for _ in range(2)]
    built, again = (each["train.model: built"] for each in rows)
    assert built.status == "ok" and built.found.startswith("for 3 classes, images of 16 x 16 x 3: 2,307 weights")
    assert again == built, "one process does it once, and tells the same seconds"

    def full(store: FaultyStore, path: str, data: bytes) -> None:
        if "checkpoints/" in path:
            raise StorageError(f"no space to write {path}")
        store.sound.put(path, data)

    faulty["put"] = full
    without = rehearsal(tmp_path, f"models.uri=faulty://{tmp_path / 'models'}")
    assert without.status == "fail" and "left no checkpoint" in without.found and "no space to write" in without.found


@pytest.mark.drill
def test_a_rehearsal_that_is_asked_to_end_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri = make_dataset(tmp_path, num_images=60, num_classes=3)
    (tmp_path / "c.toml").write_text(f'[dataset]\nuri = "{uri}"\n[models]\nuri = "{tmp_path / "models"}"\n')
    # It is stopped before it writes the checkpoint of its first step.
    monkeypatch.setitem(ENVIRONMENT, VARIABLE, "stop:checkpoint_file:1")
    doctor = start("doctor", "c.toml", "--rehearse", "--set", "train.num_workers=1", cwd=tmp_path)
    while not is_stopped(doctor.pid):
        assert doctor.poll() is None, doctor.communicate()
        time.sleep(0.01)
    assert list((tmp_path / "models").glob("reach/*"))
    doctor.terminate()
    doctor.send_signal(signal.SIGCONT)
    _, stderr = doctor.communicate(timeout=200)
    assert doctor.returncode == 143, stderr
    assert not list(open_store(str(tmp_path / "models")).list(""))


@pytest.mark.drill
def test_a_rehearsal_starts_as_many_ranks_as_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    uri = make_dataset(tmp_path, num_images=60, num_classes=3)
    how = ("train.num_workers=2", "train.launcher=local", "train.global_batch_size=12", "train.num_streams=12")
    Path("c.toml").write_text('[models]\nuri = "models"\n')
    assert rehearsed([], "c.toml", (), "work").found == "not run: dataset.uri, which is not set, has no version"
    found = rehearsed([], "c.toml", (*how, f"dataset.uri={uri}"), "work")
    assert found.status == "ok" and found.found.startswith("2 ranks by local, strategy horovod: ")


@pytest.mark.starts("program")
def test_doctor_ends_with_4_if_all_that_fails_is_transient(tmp_path: Path):
    (tmp_path / "images").mkdir()
    set_up = ("--set", f"source.uri={tmp_path / 'images'}", "--set", "dataset.uri=/proc/d")
    assert in_process("doctor", *set_up, cwd=tmp_path).returncode == 4
    assert in_process("doctor", *set_up, "--set", "train.strategy=nosuch", cwd=tmp_path).returncode == 2


@pytest.mark.starts("program")
def test_doctor_finds_what_would_fail(tmp_path: Path):
    (tmp_path / "c.toml").write_text(f'[source]\nuri = "{tmp_path}/gone"\n[dataset]\nuri = "/proc/d"\n')
    done = in_process("doctor", "c.toml", "--json", cwd=tmp_path)
    found = {each["subject"]: each for each in json.loads(done.stdout)}
    assert done.returncode == 2
    assert found["--workdir"]["status"] == "ok" and found["java"]["status"] == "ok"
    assert found["source.uri"]["status"] == "fail" and found["source.uri"]["fix"]
    assert found["dataset.uri"]["status"] == "fail"


@pytest.mark.starts("program")
def test_what_doctor_found_is_in_the_record_of_a_run_that_was_named(tmp_path: Path):
    config = tmp_path / "c.toml"
    config.write_text(f'[source]\nuri = "{tmp_path}/gone"\n')
    assert in_process("doctor", "c.toml", "--workdir", "w", "--run-id", "r", cwd=tmp_path).returncode == 2
    summary = json.loads((tmp_path / "w" / "runs" / "r" / "summary.json").read_text())
    assert (summary["status"], summary["exit_code"]) == ("failed", 2) and "source.uri: " in summary["error"]
    assert summary["stages"]["doctor"]["status"] == "failed"
    # The next try of the same run finds nothing.
    write_images(tmp_path / "gone", num_images=30)
    done = in_process("doctor", "c.toml", "--workdir", "w", "--run-id", "r", "--set", "dataset.uri=d", cwd=tmp_path)
    summary = json.loads((tmp_path / "w" / "runs" / "r" / "summary.json").read_text())
    assert (done.returncode, summary["status"], summary["error"]) == (0, "partial", None), done.stdout
    assert not list((tmp_path / "w" / "runs").glob("2*"))


@pytest.mark.starts("program")
def test_doctor_shows_a_config_that_does_not_load_as_a_row(tmp_path: Path):
    (tmp_path / "c.toml").write_text("[train]\nepoch = 3\n")
    done = in_process("doctor", "c.toml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (2, "")
    rows = {row[1]: (row[0], *row[2:]) for row in (line.split("\t") for line in done.stdout.splitlines()[1:])}
    assert rows["config"][:2] == ("fail", "c.toml: unknown config key train.epoch; did you mean train.epochs?")
    assert rows["python"][0] == "ok"


SPLIT = "train split"


def row_of(subject: str, uri: str, workdir: Path, *overrides: str) -> Finding:
    """Of a config whose dataset is this one."""
    findings = examine(load_for_dataset(uri, overrides, str(workdir)), str(workdir))
    [found] = [each for each in findings if each.subject == subject]
    return found


@pytest.mark.starts("program")
@pytest.mark.parametrize("has_source", [False, True])
def test_the_window_budget_of_the_committed_dataset(has_source: bool, tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=60, num_classes=3)
    source = (f"source.uri={tmp_path / 'images'}",) if has_source else ()
    key = "train.reading.window_budget_bytes"
    found = row_of(key, uri, tmp_path / "work", *source)
    assert found.status == "ok" and "of 256,000,000 bytes on each rank" in found.found and f"{uri}@1" in found.found
    small = row_of(key, uri, tmp_path / "work", *source, f"{key}=1000")
    # A run's ETL goes first, and may commit a version with smaller chunks.
    assert small.status == ("warn" if has_source else "fail") and "num_workers" in small.fix
    assert "expected at most train.reading.window_budget_bytes = 1000" in small.found


@pytest.mark.starts("program")
def test_rows_and_steps_of_each_rank_are_shown_for_a_dataset_and_for_a_listing(tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=60, num_classes=3, split_fractions={"train": 1, "validation": 0, "test": 0})
    # 8 streams of 7 or 8 rows, of which each step takes 2: of 3 ranks, one owns two streams and two own three.
    sizes = ("train.global_batch_size=16", "train.num_streams=8", "train.num_workers=3", "train.launcher=local")
    shares = "60 rows, 4 steps an epoch of train.global_batch_size = 16; 15 to 23 rows for each of 3 ranks"
    found = row_of(SPLIT, uri, tmp_path / "work", *sizes)
    assert found.status == "ok" and found.found.startswith(f"{uri}@1: {shares}, which own train.num_streams = 8")
    images = str(tmp_path / "images")
    for fraction, about in ("1", shares), ("0.8", "about 48 rows, 3 steps"):
        splits = f"etl.split_fractions={{train={fraction}, validation={1 - float(fraction):.1f}, test=0.0}}"
        rows = {each.subject: each for each in examine(load_pipeline(images, (*sizes, splits), "work"), str(tmp_path))}
        listed = rows[f"source: {SPLIT}"]
        assert listed.status == "ok" and listed.found.startswith(about), listed


@pytest.mark.starts("program")
def test_a_dataset_without_a_train_split_is_refused(tmp_path: Path):
    splits = {"train": 0, "validation": 0, "test": 1}
    uri = make_dataset(tmp_path, num_images=20, split_fractions=splits)
    found = row_of(SPLIT, uri, tmp_path / "work")
    assert found.status == "fail" and f"{uri}@1 has no train split; it has test" in found.found
    assert "raise etl.split_fractions.train" in found.fix

    # With a source it is the listing that counts: a build would make another version first.
    again = ("etl.split_fractions={train=0, validation=0, test=1}", f"dataset.uri={uri}")
    rows = {each.subject: each for each in examine(load_pipeline(str(tmp_path / "images"), again, "work"), "work")}
    assert rows[SPLIT].status == "warn" and "has no train split" in rows[SPLIT].found
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "fail" and "0 rows" in listed.found and "raise etl.split_fractions.train" in listed.fix


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("override", "said", "fix"),
    [
        ("train.loss=sigmoid", "train.loss = 'sigmoid', but the dataset has 3 classes", 'set train.loss = "auto"'),
        ("train.class_weights={clas_1=2.0}", "'clas_1'; expected classes of the dataset", "did you mean 'class_1'"),
    ],
)
def test_labels_that_the_training_cannot_take_are_refused(override: str, said: str, fix: str, tmp_path: Path):
    found = row_of(SPLIT, make_dataset(tmp_path, num_images=30), tmp_path / "work", override)
    assert found.status == "fail" and said in found.found and fix in found.fix + found.found


@pytest.mark.starts("program")
def test_images_without_labels_are_refused(tmp_path: Path):
    one_class = make_dataset(tmp_path, num_images=20, num_classes=1)
    flat = build_here(str(tmp_path / "images" / "class_0"), str(tmp_path / "flat"), EtlConfig(image_size=16))
    for uri, said, fix in (
        (one_class, "1 class(es); expected at least 2", "add images of another"),
        (flat, "has no labels", "sort the images into class folders"),
    ):
        found = row_of(SPLIT, uri, tmp_path / "work")
        assert found.status == "fail" and said in found.found and fix in found.fix


@pytest.mark.starts("program")
def test_more_ranks_than_streams_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    uri, eight = make_dataset(tmp_path, num_images=30), "train.num_streams=8"
    found = row_of("train.num_workers", uri, tmp_path / "work", eight, "train.num_workers=9")
    assert found.status == "fail" and "train.num_workers = 9 for train.num_streams = 8" in found.found
    # The number that others have started is in no config.
    for name, value in (("RANK", 0), ("WORLD_SIZE", 9), ("LOCAL_WORLD_SIZE", 9), ("LOCAL_RANK", 0)):
        monkeypatch.setenv(name, str(value))
    found = row_of(SPLIT, uri, tmp_path / "work", eight, "train.launcher=attach", "train.strategy=horovod")
    assert found.status == "fail" and "train.num_workers = 9 for train.num_streams = 8" in found.found
    assert "set train.num_workers = 8 or less" in found.fix


@pytest.mark.starts("program")
def test_fewer_rows_than_ranks_are_refused(tmp_path: Path):
    uri = make_dataset(tmp_path, num_images=6, split_fractions={"train": 1, "validation": 0, "test": 0})
    how = ("train.num_workers=8", "train.launcher=local")
    found = row_of(SPLIT, uri, tmp_path / "work", *how)
    said = "a train split of 6 rows for 8 ranks: rank 0 gets none"
    assert found.status == "fail" and said in found.found and "set train.num_workers to 6 or less" in found.fix
    # So is the training.
    dataset = open_dataset(uri)
    with pytest.raises(UsageError, match=r"6 rows for 8 ranks"):
        check_trainable(resolve(TrainConfig(num_workers=8), SparkConfig()).config, dataset)
    rows = {each.subject: each for each in examine(load_pipeline(str(tmp_path / "images"), how, "work"), str(tmp_path))}
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "fail" and said in listed.found, "all six images are too few, whatever the splits get"


@pytest.mark.starts("program")
def test_an_estimate_that_is_too_small_is_a_warning(tmp_path: Path):
    write_images(tmp_path / "images", num_images=10, num_classes=2)
    how = ("train.num_workers=6", "train.num_streams=6", "train.global_batch_size=6", "train.launcher=local")
    splits = "etl.split_fractions={train=0.5, validation=0.5, test=0.0}"
    tree = load_pipeline(str(tmp_path / "images"), (*how, splits), str(tmp_path / "work"))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    listed = rows[f"source: {SPLIT}"]
    assert listed.status == "warn" and listed.found.startswith("about a train split of 5 rows for 6 ranks")


@pytest.mark.parametrize(
    ("num_rows", "num_ranks", "num_streams", "expected"),
    [(3, 2, 8, (1, 2)), (8, 8, 8, (1,) * 8), (10, 1, 4, (10,)), (100, 3, 6, (33, 33, 34))],
)
def test_all_rows_are_shared_out(num_rows: int, num_ranks: int, num_streams: int, expected: tuple[int, ...]):
    config = TrainConfig(num_workers=num_ranks, num_streams=num_streams, global_batch_size=num_streams * 2)
    assert row_shares(resolve(config, SparkConfig()), num_rows).rows_of_ranks == expected
