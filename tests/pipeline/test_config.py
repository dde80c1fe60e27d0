"""Configuration files, and what is checked before anything starts."""

from __future__ import annotations

import json
import os
import stat
import time
import tomllib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from etl.config import EtlTree
from etl.job import build_dataset
from pipeline.choices import config_keys
from pipeline.config import load_for_dataset, load_pipeline, require, without_secrets
from pipeline.config_file import FIRST_KEYS, commented_toml, to_toml
from pipeline.doctor.doctor import Finding, examine
from pipeline.preflight import FirstSetup, check_store, refuse_what_cannot_work, setting
from pipeline.tree import PipelineTree
from shardmill.errors import StorageError, UsageError
from shardmill.registry import Entry, install_hint
from tests.canaries import PLAIN_SETTINGS, SECRET_SETTINGS, files_with_canaries, toml_table, write_config
from tests.lab.commands import BUILD_HERE, in_process, last_line
from tests.lab.datasets import make_dataset, write_images
from train.backends import BACKENDS
from train.models.user import find_model
from train.planning.checks import check_schema

OVERRIDES = (
    "train.epochs=3", 'spark.etl.conf={"spark.x" = "a\\"b"}', "etl.formats=['tfrecord']", "train.learning_rate=1e-05",
)  # fmt: skip


def test_shown_config_gives_the_same_tree_again(tmp_path: Path):
    tree = load_pipeline(str(tmp_path), OVERRIDES, "work")
    file = tmp_path / "shown.toml"
    file.write_text(to_toml(tree))
    assert load_pipeline(str(file), (), "elsewhere") == tree
    assert tree.train.epochs == 3 and tree.spark.etl.conf == {"spark.x": 'a"b'}


def test_any_text_can_be_shown(tmp_path: Path):
    odd = "\x7f\x00\t\n\r\x1b '\"\\ {} \u2028 \N{SNOWMAN}"
    tree = PipelineTree.model_validate({"source": {"uri": odd}, "spark": {"etl": {"conf": {odd: odd}}}})
    for text in (to_toml(tree), to_toml(tree, with_choices=True), commented_toml(tree)):
        assert tomllib.loads(text)["source"]["uri"] == odd
    assert PipelineTree.model_validate(tomllib.loads(to_toml(tree))) == tree
    # A path that is not UTF-8 has no form in TOML; a record shows it all the same.
    nameless = PipelineTree.model_validate({"source": {"uri": "caf\udce9"}})
    assert "caf\\udce9" in to_toml(nameless).encode("utf-8").decode()


def test_init_file_means_all_defaults_and_explains_every_key():
    text = commented_toml(PipelineTree())
    assert PipelineTree.model_validate(tomllib.loads(text)) == PipelineTree()
    uncommented = "\n".join(
        line.removeprefix("# ") if " = " in line.split("`")[0] else line for line in text.splitlines()
    )
    assert PipelineTree.model_validate(tomllib.loads(uncommented)) == PipelineTree()
    lines = text.splitlines()
    keys = [number for number, line in enumerate(lines) if not line.startswith("[") and " = " in line.split("`")[0]]
    # The three split fractions say by their names what their section's comment explains.
    unexplained = [lines[number] for number in keys if not lines[number - 1].startswith("# ") or number - 1 in keys]
    assert unexplained == ["# train = 0.8", "# validation = 0.1", "# test = 0.1"]


def test_a_folder_needs_no_config(tmp_path: Path):
    tree = load_pipeline(str(tmp_path), (), str(tmp_path / "work"))
    assert tree.source.uri == str(tmp_path)
    assert tree.dataset.uri == str(tmp_path / "work" / "dataset")
    assert tree.models.uri == str(tmp_path / "work" / "models")
    # The sections' own defaults, which `init` writes down, are the only ones.
    file = tmp_path / "c.toml"
    file.write_text(commented_toml(PipelineTree()))
    written = load_pipeline(str(file), (), str(tmp_path / "work"))
    assert (written.etl, written.train, written.spark, written.gate) == (tree.etl, tree.train, tree.spark, tree.gate)


def test_local_uris_become_absolute_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("c.toml").write_text('[source]\nuri = "images"\n[dataset]\nuri = "s3://bucket/d"\n')
    tree = load_pipeline("c.toml", (), "work")
    assert (tree.source.uri, tree.dataset.uri) == (str(tmp_path / "images"), "s3://bucket/d")
    assert (tree.models.uri, tree.train.init_from) == (str(tmp_path / "work" / "models"), "")
    assert tree.etl.corrections == ""
    # The run's own config.toml is used from other folders, too.
    fine_tuned = load_pipeline("c.toml", ("train.init_from=old/models@1",), "work").train
    assert fine_tuned.init_from == f"{tmp_path}/old/models@1"
    corrected = load_pipeline("c.toml", ("etl.corrections=found.csv",), "work").etl
    assert corrected.corrections == f"{tmp_path}/found.csv"


@pytest.mark.parametrize(
    ("source", "overrides", "message"),
    [
        (".", ("train.epoch=3",), "unknown config key train.epoch; did you mean train.epochs?"),
        (".", ("etl.image_sise=3",), "unknown config key etl.image_sise; did you mean etl.image_size?"),
        (".", ("trian.epochs=3",), "unknown config key trian; did you mean train?"),
        (".", ("train.epochs=no",), 'config key train.epochs = "no"; expected'),
        (".", ("train.backend=tensorflow",), "did you mean 'keras'?"),
        (".", ("train.global_batch_size=no",), 'config key train.global_batch_size = "no"; expected a whole number; `'),
        (".", ("train.epochs",), "--set 'train.epochs'; expected SECTION.NAME=VALUE, such as --set train.epochs=3"),
        (
            ".",
            ("train.global_batch_size=30", "train.num_streams=8"),
            "train.global_batch_size = 30 to be a multiple of train.num_streams = 8",
        ),
        (
            "nowhere",
            (),
            "nowhere does not exist; expected a folder of images, an archive, a table or a .toml file; check",
        ),
        ("nowhere.toml", (), "no config file nowhere.toml"),
        ("photo.jpg", (), "photo.jpg is neither a source of images nor a .toml file"),
    ],
)
def test_wrong_config_is_answered_with_what_was_expected(
    source: str, overrides: tuple[str, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("photo.jpg").write_bytes(b"")
    with pytest.raises(UsageError) as caught:
        load_pipeline(source, overrides, "work")
    assert message in str(caught.value)


def test_all_errors_are_reported_at_once(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('dataset = "s3://b/d"\n[train]\nepoch = 3\n')
    with pytest.raises(UsageError) as caught:
        load_pipeline(str(file), ("etl.image_size=-1", "trian.seed=1"), "work")
    line = str(caught.value)
    assert line.startswith(f"{file} with --set: 4 errors in the config: (1) ")
    for part in (
        'config key dataset = "s3://b/d"; expected a section, [dataset]',
        "unknown config key train.epoch; did you mean train.epochs?",
        "config key etl.image_size = -1; expected greater than or equal to 0",
        "unknown config key trian; did you mean train?",
    ):
        assert part in line


def test_what_init_is_given_is_set_in_its_file():
    tree = load_pipeline(None, ("train.epochs=3", "source.uri=/photos", "spark.etl.conf.spark.x=y"), "work")
    lines = commented_toml(tree).splitlines()
    assert {"epochs = 3", 'uri = "/photos"', "# image_size = 0"} <= set(lines)
    written = PipelineTree.model_validate(tomllib.loads("\n".join(lines)))
    assert written.model_copy(update={"models": PipelineTree().models}).train == tree.train
    assert written.spark == tree.spark and any("relative path" in line for line in lines)


def test_a_new_file_explains_the_keys_that_people_change_first():
    assert len(FIRST_KEYS) == 20 and {key for key, _ in config_keys(PipelineTree)} >= FIRST_KEYS
    text = commented_toml(load_pipeline(None, ("train.attach.port=3",), "work"), FIRST_KEYS)
    uncommented = "\n".join(
        line.removeprefix("# ") if " = " in line.split("`")[0] else line for line in text.splitlines()
    )
    found = {
        f"{path}{name}"
        for path, section in sections_of(tomllib.loads(uncommented))
        for name, value in section.items()
        if not isinstance(value, dict)
    }
    # What is set is there, too.
    assert found == FIRST_KEYS | {"train.attach.port"} and "config show" in text


def sections_of(values: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, values
    for name, below in values.items():
        if isinstance(below, dict):
            yield from sections_of(below, f"{path}{name}.")


def test_secrets_are_in_no_record():
    given = toml_table({**SECRET_SETTINGS, **PLAIN_SETTINGS})
    tree = load_pipeline(None, (f"spark.etl.conf={given}", f"spark.train.conf={given}"), "work")
    written = to_toml(without_secrets(tree))
    assert "canary" not in written.lower() and '"spark.executor.memory" = "2g"' in written
    # The stages still get them; and a tree without secrets is written as it is.
    assert tree.part(EtlTree).spark.etl.conf == {**SECRET_SETTINGS, **PLAIN_SETTINGS}
    assert without_secrets(PipelineTree()) == PipelineTree()


def test_a_missing_uri_is_named():
    with pytest.raises(UsageError, match=r"config key source\.uri is not set; expected"):
        require(PipelineTree(), "source", "dataset")


def test_what_trains_takes_a_dataset_or_a_config_and_nothing_else(tmp_path: Path):
    dataset = make_dataset(tmp_path, num_images=20)
    for named in (dataset, f"{dataset}@1"):
        tree = load_for_dataset(named, ("train.epochs=3",), str(tmp_path / "work"))
        assert tree.dataset.uri == named and tree.train.epochs == 3 and tree.source.uri == ""
        assert tree.models.uri == str(tmp_path / "work" / "models")
    for other in (tmp_path / "images", tmp_path / "nothing"):
        with pytest.raises(UsageError, match=r"is not a committed dataset.*shardmill etl FOLDER"):
            load_for_dataset(str(other), (), "work")


@pytest.mark.parametrize("command", ["run", "etl", "train", "config show", "config show --json"])
def test_a_run_that_ends_early_leaves_no_secret(command: str, tmp_path: Path):
    file = write_config(tmp_path)
    before = os.umask(0o027)
    try:
        done = in_process(*command.split(), file, "--workdir", tmp_path / "work", "--debug", cwd=tmp_path)
    finally:
        os.umask(before)
    assert done.returncode == (0 if "show" in command else 2), done.stderr
    assert "canary" not in (done.stdout + done.stderr).lower()
    (tmp_path / "work").mkdir(exist_ok=True)
    assert files_with_canaries(tmp_path / "work") == []
    # Who may read it is for the umask to say, the same for every file.
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "work").rglob("*") if path.is_file()}
    assert modes <= {0o640}


def test_a_wrong_setting_is_named_without_its_value(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('[spark.etl]\nconf = "password=canary"\n[train]\nauth_token = "canary"\n')
    done = in_process("run", file, "--set", "train.api_key=canary", cwd=tmp_path)
    assert done.returncode == 2 and last_line(done).startswith("ERROR 2:")
    assert "canary" not in done.stderr + done.stdout


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


@pytest.mark.needs("horovod")
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
def test_impossible_settings_are_refused_at_once(overrides: list[str], parts: list[str], tmp_path: Path, monkeypatch):
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
    check_store(str(tmp_path))
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
    assert "small_cnn (new), " in setting(tree, FirstSetup(tree), str(tmp_path / "work"))


def test_a_place_is_left_as_it_was(tmp_path: Path):
    assert "a second writer is refused" in check_store(str(tmp_path / "place"))
    assert not list(tmp_path.iterdir())


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """60 images, two files that are none, and a name that is none."""
    folder = tmp_path / "photos"
    write_images(folder, num_images=60)
    (folder / "class_0" / "page.jpg").write_bytes(b"<html>not found</html>")
    (folder / "class_1" / "empty.png").write_bytes(b"")
    (folder / "class_1" / "notes.txt").write_text("notes")
    return folder


@pytest.mark.starts("program")
def test_it_finds_what_the_build_rejects_and_writes_nothing(photos: Path, tmp_path: Path):
    before = sorted(tmp_path.rglob("*"))
    done = in_process("check-source", photos, "--json", "--set", "etl.image_size=16", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert sorted(tmp_path.rglob("*")) == before
    assert (found["num_listed"], found["num_accepted"], found["num_rejected"]) == (63, 60, 3)
    assert found["broken_limit"] is None
    assert found["by_class"] == {"class_0": 20, "class_1": 20, "class_2": 20}
    assert sum(found["by_split"].values()) == sum(found["source_sizes"]["longer_side"].values()) == 60

    built = in_process("etl", photos, "--set", "etl.image_size=16", *BUILD_HERE, cwd=tmp_path)
    assert built.returncode == 0, built.stderr
    rejects = in_process("inspect", "shardmill-work/dataset", "--rejects", "--json", cwd=tmp_path)
    assert json.loads(rejects.stdout) == found["rejections"]


@pytest.mark.starts("program")
def test_it_counts_the_notes_of_images_and_warns_as_the_build_does(photos: Path, tmp_path: Path):
    dark = np.random.default_rng(0).integers(0, 1 << 12, (32, 32), np.uint16)
    for number in range(3):
        Image.fromarray(dark + number).save(photos / "class_0" / f"dark_{number}.png")
    checked = in_process("check-source", photos, "--json", "--set", "etl.image_size=16", cwd=tmp_path)
    found = json.loads(checked.stdout)
    assert found["by_note"]["low_range_16_bit"] == 3
    [*of_listing, warning] = found["warnings"]
    assert "3 of 3 accepted 16-bit images use at most 14 of their bits" in warning
    built = in_process("etl", photos, "--set", "etl.image_size=16", *BUILD_HERE, cwd=tmp_path)
    assert of_listing and all(each in built.stderr for each in found["warnings"])
    people = in_process("check-source", photos, "--set", "etl.image_size=16", cwd=tmp_path)
    assert "low_range_16_bit 3" in people.stdout and warning in people.stdout
    assert "3: class_0 23, class_1 20, class_2 20" in people.stdout and "longer side in pixels" in people.stdout


@pytest.mark.starts("program")
def test_it_ends_like_the_build_if_too_much_is_rejected(photos: Path, tmp_path: Path):
    settings = ["--set", "etl.image_size=16", "--set", "etl.max_reject_fraction=0.01"]
    checked = in_process("check-source", photos, *settings, cwd=tmp_path)
    built = in_process("etl", photos, *settings, *BUILD_HERE, cwd=tmp_path)
    assert checked.returncode == built.returncode == 7
    assert "2 of 63 inputs were rejected; etl.max_reject_fraction allows 0.01" in last_line(checked)
    assert "class_1/empty.png\tempty_file" in checked.stdout


def test_without_any_framework_it_is_pytorch_that_is_to_be_installed_and_said_once(monkeypatch, tmp_path):
    monkeypatch.setattr("train.models.user.find_spec", lambda name: None)
    monkeypatch.setattr(Entry, "missing_packages", lambda entry: entry.packages)
    tree = load_pipeline(str(tmp_path), (), str(tmp_path / "work"))
    with pytest.raises(UsageError) as refused:
        refuse_what_cannot_work(tree, str(tmp_path / "work"), ("train",))
    assert str(refused.value) == f"train.model = 'small_cnn' needs torch; not installed here; {install_hint('torch')}"
