"""Config: one line for each mistake, with the key, what was given, and what was meant or expected."""

from __future__ import annotations

from pathlib import Path

import pytest

from etl.config import EtlTree
from pipeline.tree import PipelineTree
from shardmill.errors import UsageError
from shardmill.jobs.config import load_tree
from shardmill.jobs.redact import redacted_text
from train.tree import TrainTree


@pytest.mark.parametrize(
    ("tree", "override", "message"),
    [
        (TrainTree, "train.epoch=3", r"unknown config key train\.epoch; did you mean train\.epochs\?"),
        (TrainTree, "train.batch=3", r"unknown config key train\.batch; did you mean train\.global_batch_size\?"),
        (TrainTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (TrainTree, "sauce.uri=x", r"unknown config key sauce; did you mean source\?"),
        (EtlTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (EtlTree, "eetl.image_size=3", r"unknown config key eetl; did you mean etl\?"),
        (PipelineTree, "trian.epochs=3", r"unknown config key trian; did you mean train\?"),
        (TrainTree, "train.augment.random_flp=true", r"did you mean train\.augment\.random_flip\?"),
        (
            TrainTree,
            "train.zzzz=1",
            r"unknown config key train\.zzzz; known here: model, epochs(, \w+){3} and \d+ more;",
        ),
        (TrainTree, "train.epochs=many", r'config key train\.epochs = "many"; expected a whole number;'),
        (TrainTree, "train.epochs=1.5", r"config key train\.epochs = 1\.5; expected a whole number;"),
        (TrainTree, "train.learning_rate=fast", r'learning_rate = "fast"; expected a number;'),
        (TrainTree, "train.record_samples=often", r'record_samples = "often"; expected true or false;'),
        (TrainTree, "train.momentum=high", r'key train\.momentum = "high"; expected a number or \'auto\';'),
        (
            TrainTree,
            "train.weight_decay=-1",
            r"key train\.weight_decay = -1; expected greater than or equal to 0 or '",
        ),
        (TrainTree, "train.augment.random_flip=maybe", r'\.random_flip = "maybe"; expected true or false or \'auto\';'),
        (TrainTree, "train.augment.images=faces", r"images = \"faces\"; expected 'any' or 'photographs'"),
        (TrainTree, "train.epochs=0", r"config key train\.epochs = 0; expected greater than or equal to 1"),
        (TrainTree, "train.num_streams=30", r"global_batch_size = 64.*num_streams = 30; nearest: 60"),
        (EtlTree, 'etl.encoding="avif"', r"config key etl\.encoding = \"avif\"; expected one of jpeg, png, webp, raw"),
        (EtlTree, "etl.formats=[]", r"etl\.formats = \[\]; expected a non-empty list of different formats"),
        (EtlTree, "etl.split_fractions.train=0.5", r"expected fractions that add up to 1; these add up to 0\.7"),
        (EtlTree, "etl", r"--set 'etl'; expected SECTION\.NAME=VALUE"),
        (EtlTree, "etl.image_size.x=1", r"config key etl\.image_size"),
    ],
)
def test_a_mistake_is_answered_with_what_was_meant(tree: type, override: str, message: str):
    with pytest.raises(UsageError, match=message) as refused:
        load_tree(tree, None, (override,))
    assert "\n" not in str(refused.value)


def test_applications_agree_on_the_sections_of_the_file():
    for tree in (EtlTree, TrainTree):
        assert {*tree.model_fields, *tree.other_sections} == set(PipelineTree.model_fields)
        assert not tree.model_fields.keys() & set(tree.other_sections)


def test_file_then_overrides_then_nothing_of_other_sections(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text('[etl]\nimage_size = 32\nencoding = "raw"\n[train]\nepochs = 3\n')
    tree = load_tree(EtlTree, file, ("etl.image_size=48", "source.uri=/a b/c"))
    assert (tree.etl.image_size, tree.etl.encoding, tree.source.uri) == (48, "raw", "/a b/c")
    assert load_tree(TrainTree, file).train.epochs == 3


def test_defaults_lie_below_the_file(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text("[etl]\nimage_size = 32\n")
    tree = load_tree(EtlTree, file, defaults={"etl": {"image_size": 64, "encoding": "png"}})
    assert (tree.etl.image_size, tree.etl.encoding) == (32, "png")


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"[etl\n", "is not TOML"), (b"\xff\xfe", "is not TOML"), (None, "no config file.*shardmill init")],
)
def test_a_file_that_is_no_config_is_one_line(tmp_path: Path, content: bytes | None, message: str):
    file = tmp_path / "c.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        load_tree(EtlTree, file)


def test_every_refusal_says_how_to_fix_it(tmp_path: Path):
    (tmp_path / "c.toml").write_text("[etl\n")
    given = [(tmp_path, ()), (tmp_path / "c.toml", ()), (tmp_path / "absent.toml", ())]
    for file, overrides in [*given, (None, ("epochs",)), (None, ("train.epochs=3", "train.epochs.more=4"))]:
        with pytest.raises(UsageError) as caught:
            load_tree(TrainTree, file, overrides)
        assert caught.value.fix, caught.value


def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path):
    (tmp_path / "file").touch()
    for file in (tmp_path / "file" / "c.toml", tmp_path / ("x" * 300)):
        with pytest.raises(UsageError, match=f"cannot read {file}: "):
            load_tree(EtlTree, file)


def test_an_error_names_the_file(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text("[train]\nepoch = 3\n")
    with pytest.raises(UsageError, match=rf"^{file}: unknown config key train\.epoch; did you mean"):
        load_tree(TrainTree, file)
    with pytest.raises(UsageError, match=rf"^{file} with --set: 2 errors"):
        load_tree(TrainTree, file, ("train.seeds=3",))
    with pytest.raises(UsageError, match="^unknown config key"):
        load_tree(TrainTree, None, ("train.epoch=3",))


def test_no_fixed_text_is_redacted():
    with pytest.raises(UsageError) as refused:
        load_tree(TrainTree, None, ("epochs=3",))
    assert redacted_text(str(refused.value)) == str(refused.value)


def test_trees_are_frozen():
    tree = load_tree(EtlTree, None)
    with pytest.raises(ValueError, match="frozen"):
        tree.etl.image_size = 3


def test_spark_settings_pass_through_however_they_are_written(tmp_path: Path):
    file = tmp_path / "c.toml"
    file.write_text(
        '[spark.etl.conf]\nspark.executor.memory = "2g"\n"spark.executor.instances" = 2\nspark.speculation = true\n'
    )
    tree = load_tree(EtlTree, file, ("spark.etl.conf.spark.executor.cores=4",))
    assert tree.spark.etl.conf == {
        "spark.executor.memory": "2g",
        "spark.executor.instances": "2",
        "spark.speculation": "true",
        "spark.executor.cores": "4",
    }


@pytest.mark.parametrize(
    ("override", "formats"),
    [
        ("etl.formats=tfrecord", ("tfrecord",)),
        ("etl.formats='tfrecord'", ("tfrecord",)),
        ("etl.formats=parquet,tfrecord", ("parquet", "tfrecord")),
        ('etl.formats=["tfrecord"]', ("tfrecord",)),
    ],
)
def test_one_word_is_a_list_of_one(override: str, formats: tuple[str, ...]):
    assert load_tree(EtlTree, None, (override,)).etl.formats == formats
