"""The dataset card: by it Hugging Face `datasets` loads the newest version alone; a build does not depend on it."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from etl.config import EtlConfig, EtlTree, SourceConfig
from etl.job import build_dataset
from shardmill.dataset.card import CARD, refresh_card
from shardmill.dataset.open import open_dataset
from shardmill.dataset.verify import verify_dataset
from shardmill.errors import StorageError
from shardmill.jobs.config import DatasetConfig
from shardmill.jobs.observer import WARNING
from shardmill.own_card import put_card
from shardmill.stores import open_store
from shardmill.stores.local import LocalStore
from tests.lab.commands import in_process
from tests.lab.datasets import HERE, make_dataset, upload, write_images


def front_matter(root: str | Path) -> dict:
    text = open_store(str(root)).read(CARD).decode()
    assert text.startswith("---\n")
    return yaml.safe_load(text.split("---\n")[1])


def listed(root: str | Path) -> dict[str, list[str]]:
    [config] = front_matter(root)["configs"]
    return {each["split"]: each["path"] for each in config["data_files"]}


def shards_of(root: str | Path) -> dict[str, list[str]]:
    dataset = open_dataset(str(root))
    shards = {split: dataset.shards_of(split, "parquet") for split in dataset.manifest.splits}
    return {split: [shard.path for shard in each] for split, each in shards.items()}


class Warnings:
    """An observer that keeps them."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def event(self, name: str, fields: dict) -> None:
        if WARNING in fields:
            self.sentences.append(str(fields[WARNING]))


def build(folder: Path, observer: Warnings | None = None) -> Warnings:
    observer = observer or Warnings()
    tree = EtlTree(
        source=SourceConfig(uri=str(folder / "images")),
        dataset=DatasetConfig(uri=str(folder / "dataset")),
        etl=EtlConfig(image_size=16, encoding="png", engine=HERE),
    )
    build_dataset(tree, run_id="r", observer=observer)  # pyright: ignore[reportArgumentType]
    return observer


def test_a_build_writes_the_card_of_its_version_and_each_later_commit_replaces_it(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    first = shards_of(tmp_path / "dataset")
    assert listed(tmp_path / "dataset") == first and list(first) == ["test", "train", "validation"]

    write_images(tmp_path / "images", num_images=90)
    build(tmp_path)
    second = shards_of(tmp_path / "dataset")
    assert listed(tmp_path / "dataset") == second != first
    assert verify_dataset(open_dataset(str(tmp_path / "dataset")), deep=True).problems == ()

    done = in_process("rollback", tmp_path / "dataset@1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert listed(tmp_path / "dataset") == first
    done = in_process("gc", tmp_path / "dataset", "--keep", "1", "--older-than", "0", "--delete", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (
        listed(tmp_path / "dataset") == first
        and "Version 4 of a dataset" in (tmp_path / "dataset/README.md").read_text()
    )


def test_the_features_are_those_of_the_columns(tmp_path: Path):
    dataset = make_dataset(tmp_path)
    assert refresh_card(open_store(dataset)) == ()
    features = {each["name"]: each for each in front_matter(dataset)["dataset_info"]["features"]}
    assert features["image"]["dtype"] == "image"
    assert features["label"]["dtype"]["class_label"]["names"] == {"0": "class_0", "1": "class_1", "2": "class_2"}
    assert features["height"]["dtype"] == "int32" and features["source"]["dtype"] == "string"


@pytest.mark.parametrize("name", ['it\'s: [a] "name" # no', "été ☃ 😀", "a\u200db", "- true"])
def test_a_class_may_have_any_name(name: str, tmp_path: Path):
    write_images(tmp_path / "images", num_classes=2)
    (tmp_path / "images/class_0").rename(tmp_path / "images" / name)
    build(tmp_path)
    features = {each["name"]: each for each in front_matter(tmp_path / "dataset")["dataset_info"]["features"]}
    assert set(features["label"]["dtype"]["class_label"]["names"].values()) == {name, "class_1"}


def test_a_card_that_was_lost_or_never_written_comes_back_and_one_of_the_user_stays(tmp_path: Path):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    card = tmp_path / "dataset" / CARD
    written = card.read_bytes()
    card.unlink()
    assert not any("card" in each for each in build(tmp_path).sentences)
    assert card.read_bytes() == written

    card.write_text("# My flowers\n")
    assert any("was not written by shardmill" in each for each in build(tmp_path).sentences)
    assert card.read_text() == "# My flowers\n"


def test_a_writer_that_is_late_leaves_the_card_of_a_later_version(tmp_path: Path):
    store, mark = open_store(str(tmp_path)), "# Version "
    for number in (9, 10, 2):
        assert put_card(store, mark, number, lambda text=f"{mark}{number}\n": text)
    assert store.read(CARD) == b"# Version 10\n"


def test_a_store_that_refuses_the_card_costs_a_warning_and_no_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    put = LocalStore.put

    def refuse(self: LocalStore, path: str, data: bytes) -> None:
        if path == CARD:
            raise StorageError("no space for it")
        put(self, path, data)

    monkeypatch.setattr(LocalStore, "put", refuse)
    write_images(tmp_path / "images", num_images=60)
    told = build(tmp_path).sentences
    assert any("no space for it" in each for each in told)
    assert open_dataset(str(tmp_path / "dataset")).manifest.version == 1


def test_of_two_writers_the_one_that_writes_its_card_last_looks_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_images(tmp_path / "images", num_images=60)
    build(tmp_path)
    store = open_store(str(tmp_path / "dataset"))
    (tmp_path / "dataset" / CARD).unlink()
    put = type(store).put

    def commit_meanwhile(self: object, path: str, data: bytes) -> None:
        monkeypatch.undo()
        write_images(tmp_path / "images", num_images=90)
        build(tmp_path)
        put(store, path, data)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(type(store), "put", commit_meanwhile)
    assert refresh_card(store) == ()
    assert listed(tmp_path / "dataset") == shards_of(tmp_path / "dataset")


def test_a_dataset_without_parquet_has_a_card_that_names_no_files(tmp_path: Path):
    dataset = make_dataset(tmp_path, formats=("tfrecord",))
    assert refresh_card(open_store(dataset)) == ()
    assert set(front_matter(dataset)) == {"pretty_name"}


def test_the_card_goes_to_an_object_store(s3_bucket: str, tmp_path: Path):
    uri = upload(Path(make_dataset(tmp_path)), f"{s3_bucket}/dataset")
    assert refresh_card(open_store(uri)) == ()
    assert listed(uri) == shards_of(uri)
