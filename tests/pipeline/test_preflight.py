"""Problems that stop a run before any work starts, all reported at once, and the same rows in doctor."""

from __future__ import annotations

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from etl.config import EtlTree
from etl.job import build_dataset
from pipeline.config import load_pipeline
from pipeline.doctor.doctor import Finding, examine
from pipeline.preflight import FirstPlan, check_place, refuse_what_cannot_work, setting
from shardmill.errors import StorageError, UsageError
from shardmill.registry import Entry
from tests.lab.commands import in_process, last_line
from tests.lab.datasets import write_images
from train.backends import BACKENDS
from train.models.find import find_model
from train.planning.preflight import check_schema


def refused(folder: Path, *overrides: str) -> str:
    (folder / "images").mkdir(exist_ok=True)
    tree = load_pipeline(str(folder / "images"), overrides, str(folder / "work"))
    with pytest.raises((UsageError, StorageError)) as caught:
        refuse_what_cannot_work(tree, str(folder / "work"))
    return str(caught.value)


@pytest.mark.starts("program")
@pytest.mark.parametrize(
    ("overrides", "needs_yarn"), [((), True), (("etl.engine=local", "train.num_workers=1"), False)]
)
def test_yarn_without_its_settings_is_refused_where_it_would_start(
    overrides: tuple[str, ...], needs_yarn: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("HADOOP_CONF_DIR", "YARN_CONF_DIR", "SPARK_CONF_DIR", "SPARK_HOME"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "images").mkdir()
    tree = load_pipeline(str(tmp_path / "images"), ("spark.master=yarn", *overrides), str(tmp_path / "work"))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    assert ("spark.master" in rows) == needs_yarn
    if needs_yarn:
        said = "neither HADOOP_CONF_DIR nor YARN_CONF_DIR is set"
        assert rows["spark.master"].status == "fail" and said in rows["spark.master"].found
        with pytest.raises(UsageError, match=said):
            refuse_what_cannot_work(tree, str(tmp_path / "work"), ("etl",))
        refuse_what_cannot_work(tree, str(tmp_path / "work"), ("train",))
        monkeypatch.setenv("HADOOP_CONF_DIR", str(tmp_path))
    refuse_what_cannot_work(tree, str(tmp_path / "work"))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["train.model=mine:bild"], ["mine.py has no function 'bild'", "did you mean mine:build?"]),
        (["train.model=absent:build"], ["there is no module 'absent'", "start shardmill in the folder"]),
        (["train.model=broken:build"], ["broken.py:1: "]),
        (["train.num_workers=2", "train.strategy=single"], ["train.num_workers = 2", "horovod"]),
        (["train.num_workers=2", "train.launcher=inline"], ["'inline'", "one worker"]),
        (
            ["train.num_workers=4", "train.strategy=horovod", "train.launcher=horovod_spark", "spark.master=local[2]"],
            ["runs 2 task(s) at a time", "expected at least 4 slots"],
        ),
        (
            ['train.nics=["lo", "nosuch0"]'],
            ["train.nics: ", "no interface 'nosuch0'", "it has ", " lo", "name an interface"],
        ),
        (["models.uri=/proc/nowhere"], ["/proc/nowhere"]),
        (["etl.resize_mode=shorter"], ["etl.resize_mode = 'shorter'", "one shape", "crop, pad or stretch"]),
        (
            ["source.uri=gone", "train.model=absent:build"],
            ["2 problems would stop this run: (1) source ", "(2) train.model"],
        ),
    ],
)
def test_impossible_settings_are_refused_at_once(
    overrides: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("import nothing_of_this_name\ndef build(image_shape, num_classes): ...\n")
    Path("broken.py").write_text("def (\n")
    line = refused(tmp_path, *overrides)
    assert all(part in line for part in parts), line
    assert not [path for path in tmp_path.glob("work/**/*") if path.is_file()]


def test_a_stage_by_itself_is_checked_for_what_it_needs(tmp_path: Path):
    (tmp_path / "images").mkdir()
    wrong = ("train.model=absent:build", "source.uri=gone")
    tree = load_pipeline(str(tmp_path / "images"), wrong, str(tmp_path / "work"))
    for application, said, unsaid in (("etl", "gone", "absent"), ("train", "absent", "gone")):
        with pytest.raises(UsageError) as caught:
            refuse_what_cannot_work(tree, str(tmp_path / "work"), (application,))
        assert said in str(caught.value) and unsaid not in str(caught.value)


def test_probes_of_killed_processes_are_removed_a_day_later(tmp_path: Path):
    (tmp_path / "reach").mkdir()
    for name, age_seconds in (("preflight-old", 90_000), ("preflight-new", 60)):
        probe = tmp_path / "reach" / name
        probe.write_bytes(b"first")
        os.utime(probe, (time.time() - age_seconds,) * 2)
    check_place(str(tmp_path))
    assert [path.name for path in (tmp_path / "reach").iterdir()] == ["preflight-new"]


def test_a_model_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("raise SystemExit\ndef build(image_shape, num_classes): ...\nother = build\n")
    assert find_model("small_cnn") == "built in"
    assert find_model("mine:build") == find_model("mine:other") == str(tmp_path / "mine.py")


@pytest.mark.starts("program")
def test_what_the_listing_says_of_labels_is_held_against_the_training_before_the_etl(tmp_path: Path):
    write_images(tmp_path / "images", num_images=8, num_classes=2)

    def refused_at_the_listing(override: str) -> str:
        tree = load_pipeline(str(tmp_path / "images"), (override,), str(tmp_path / "work"))
        check = partial(check_schema, tree.train, tree.gate)
        with pytest.raises(UsageError) as caught:
            build_dataset(tree.part(EtlTree), run_id="r", check_labels=check)
        [listing] = [each for each in examine(tree, str(tmp_path / "work")) if each.subject == "source"]
        assert listing.status == "fail" and caught.value.what in listing.found
        assert not (tmp_path / "work/dataset/manifests").exists()
        return str(caught.value)

    line = refused_at_the_listing("train.class_weights={clas_1=2.0}")
    assert "'clas_1'; expected classes of the dataset: class_0, class_1; did you mean 'class_1'" in line
    assert "train.loss = 'sigmoid'" in refused_at_the_listing("train.loss=sigmoid")


BROKEN_FACTORY = """
from torch import nn


def build(image_shape, num_classes):
    print("shardmill", flush=True)
    return nn.Sequential(nn.Flatten(), nn.Linear(num_pixels, num_classes))
"""


@pytest.mark.starts("program", "ranks")
def test_a_model_that_does_not_build_ends_a_run_before_its_etl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("net.py").write_text(BROKEN_FACTORY)
    write_images(tmp_path / "images", num_images=20, num_classes=2)
    why = f"the factory failed: NameError: name 'num_pixels' is not defined ({tmp_path}/net.py:7)"

    done = in_process("run", "images", "--workdir", "work", "--json", "--set", "train.model=net:build", cwd=tmp_path)
    assert done.returncode == 2 and last_line(done).startswith("ERROR 2: train.model = 'net:build': "), done.stderr
    assert why in last_line(done) and "num_classes=2" in last_line(done)
    assert "train: checking that net:build builds for images of 32 x 32 x 3 and 2 classes" in done.stderr
    assert set(json.loads(done.stdout)) == {"error", "run_id"}
    assert not [path for path in Path("work/dataset").rglob("*") if path.is_file()]

    tree = load_pipeline("images", ("train.model=net:build",), "work")
    rows = {each.subject: each for each in examine(tree, "work")}
    assert rows["train.model"].status == "ok" and rows["train.model"].found.endswith("/net.py")
    assert rows["train.model: built"].status == "fail" and why in rows["train.model: built"].found


@pytest.mark.starts("program")
def test_what_is_wrong_with_initial_weights_is_reported_beside_them(tmp_path: Path):
    def rows(*overrides: str) -> dict[str, Finding]:
        tree = load_pipeline(str(tmp_path), overrides, str(tmp_path / "work"))
        return {each.subject: each for each in examine(tree, str(tmp_path / "work"))}

    absent = rows("train.init_from=absent.keras")
    assert absent["train.init_from"].status == "fail" and "no such file" in absent["train.init_from"].found
    assert absent["train.num_workers"].status == "ok"
    assert "train.init_from" not in rows()
    own = "train.model=tests.train.models_under_test:linear"
    late = rows(own, "train.freeze=conv*", "train.unfreeze_epoch=3", "train.epochs=3")
    assert "stay frozen" in late["train.init_from"].found


@pytest.mark.starts("program")
@pytest.mark.parametrize(("num_classes", "shown"), [(0, "no classes"), (1, "class_0")])
def test_a_listing_without_classes_ends_a_run_that_would_train(num_classes: int, shown: str, tmp_path: Path):
    write_images(tmp_path / "images", num_images=4, num_classes=1)
    if num_classes == 0:
        for image in (tmp_path / "images/class_0").iterdir():
            image.rename(tmp_path / "images" / image.name)
    tree = load_pipeline(str(tmp_path / "images"), (), str(tmp_path / "work")).part(EtlTree)
    with pytest.raises(UsageError, match=f"has {num_classes} classes .{shown}.*at least 2"):
        build_dataset(tree, run_id="r", check_labels=lambda schema: None)
    assert not (tmp_path / "work/dataset/manifests").exists()


@pytest.mark.starts("program")
def test_doctor_shows_what_the_listing_says(tmp_path: Path):
    write_images(tmp_path / "images", num_images=20, num_classes=2)
    tree = load_pipeline(str(tmp_path / "images"), (), str(tmp_path / "work"))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    assert rows["tensorflow"].status == "ok" and "tensorflow" in rows["tensorflow"].found
    assert rows["source: classes"].found == "class_0, class_1"
    assert (
        rows["source: warning"].status == "warn" and ("metrics on it are not reliable") in rows["source: warning"].found
    )
    for number in range(9):
        (tmp_path / "images" / f"notes{number}.txt").write_text("no image")
    tree = load_pipeline(str(tmp_path / "images"), ("train.model=absent:build",), str(tmp_path / "work"))
    rows = {each.subject: each for each in examine(tree, str(tmp_path / "work"))}
    assert rows["train.model"].status == "fail" and "absent" in rows["train.model"].found


def test_a_run_with_a_backend_of_ones_own_says_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BACKENDS.entries, "new", Entry("tests.extending_entries:NEW_BACKEND", "added by a test"))
    (tmp_path / "images").mkdir()
    own = ("train.backend=new", "train.strategy=tests.extending_entries:NEW_STRATEGY", "train.num_workers=1")
    tree = load_pipeline(str(tmp_path / "images"), own, str(tmp_path / "work"))
    assert "small_cnn (new), " in setting(tree, FirstPlan(tree), str(tmp_path / "work"))


def test_a_place_is_left_as_it_was(tmp_path: Path):
    assert "a second writer is refused" in check_place(str(tmp_path / "place"))
    assert not list(tmp_path.iterdir())
