"""The config tree: from a folder or a file, back to TOML, and what a wrong key is answered."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from etl.config import EtlTree
from pipeline.choices import config_keys
from pipeline.config import load_for_dataset, load_pipeline, require, without_secrets
from pipeline.config_file import FIRST_KEYS, commented_toml, to_toml
from pipeline.tree import PipelineTree
from shardmill.errors import UsageError
from tests.canaries import PLAIN_SETTINGS, SECRET_SETTINGS, toml_table
from tests.lab.datasets import make_dataset

OVERRIDES = (
    "train.epochs=3",
    'spark.etl.conf={"spark.x" = "a\\"b"}',
    "etl.formats=['tfrecord']",
    "train.learning_rate=1e-05",
)


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
