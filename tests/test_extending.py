"""An extension is one file and one entry: every registry, given a new entry, works in config, CLI, doctor and docs."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from pipeline.choices import registries, registry_keys
from pipeline.cli import app
from pipeline.config import PipelineTree, load_pipeline
from pipeline.config_file import commented_toml, to_toml
from pipeline.doctor import examine
from shardmill.dataset import open_dataset
from shardmill.errors import UsageError
from shardmill.registry import Entry, Registry
from tests.pipeline.command import shardmill
from tests.support import write_images

ROOT = Path(__file__).resolve().parent.parent
EXTENDING = ROOT / "docs" / "extending.md"
ENTRIES = "tests.extending_entries"
NEW_ENTRIES = {
    "source.kind": "NEW_SOURCE",
    "etl.engine": "new_engine",
    "etl.encoding": "NEW_ENCODING",
    "etl.formats": "NEW_FORMAT",
    "train.model": "NEW_MODEL",
    "train.strategy": "NEW_STRATEGY",
    "train.launcher": "NEW_LAUNCHER",
    "storage scheme": "new_store",
}
REGISTRIES = registries()
ALL = pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.key)


def override(registry: Registry[Any], name: str) -> str:
    return f"dataset.uri={name}:///d" if registry.key == "storage scheme" else f"{registry.key}={name}"


def test_every_registry_is_tried():
    assert {registry.key for registry in REGISTRIES} == set(NEW_ENTRIES)


@ALL
def test_a_new_entry_is_accepted_listed_and_examined(
    registry: Registry[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    entry = Entry("no_such_package:X", "a line of help", extra="brand_new", packages=("no_such_package",))
    monkeypatch.setitem(registry.entries, "brand_new", entry)
    (tmp_path / "images").mkdir()

    # The config accepts it; a typo is answered with it.
    tree = load_pipeline(str(tmp_path / "images"), (override(registry, "brand_new"),), str(tmp_path / "work"))
    if registry.key != "storage scheme":
        with pytest.raises(UsageError, match="did you mean 'brand_new'"):
            load_pipeline(str(tmp_path / "images"), (override(registry, "brand_mew"),))

        # `init` and `config show` list it with its help, and what they print stays TOML that gives the same tree.
        listed = re.compile(r"^#   brand_new +a line of help$", re.MULTILINE)
        num_keys = sum(one_of.registry is registry for _, one_of in registry_keys(PipelineTree))
        for text in (commented_toml(tree), to_toml(tree, with_choices=True)):
            assert len(listed.findall(text)) == num_keys
        assert PipelineTree.model_validate(tomllib.loads(to_toml(tree, with_choices=True))) == tree

    # `doctor` names what is missing, and how it is installed.
    failures = [each for each in examine(tree, str(tmp_path / "work")) if each.status == "fail"]
    assert any("no_such_package" in each.found and each.fix == "pip install '.[brand_new]'" for each in failures)
    assert problems_of_document(registry) == [f"{registry.key}: `brand_new` is not in the table"]


@pytest.fixture
def new_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in REGISTRIES:
        entry = Entry(f"{ENTRIES}:{NEW_ENTRIES[registry.key]}", "added by a test")
        monkeypatch.setitem(registry.entries, "new", entry)


def run_here(*words: str) -> None:
    """A command in this process, where the new entries are."""
    assert not app(list(words), standalone_mode=False)


@pytest.mark.usefixtures("new_entries")
def test_the_commands_reach_new_entries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    dataset = f"new://{tmp_path}/work/dataset"
    etl = ("dataset.uri=" + dataset, "source.kind=new", "etl.engine=new", "etl.encoding=new", "etl.formats=new")
    train = ("train.model=new", "train.strategy=new", "train.launcher=new", "train.epochs=1", "etl.image_size=16")
    options = [word for each in (*etl, *train) for word in ("--set", each)]
    # The whole pipeline: ETL, verification, training and an export that is loaded back, through new entries alone.
    run_here("run", "images", "--workdir", "work", "--run-id", "r", *options)
    manifest = open_dataset(dataset).manifest
    assert (manifest.formats, manifest.normalize.encoding) == (("new",), "new")
    run_here("verify", dataset, "--deep")
    assert "Confusion matrix" in (tmp_path / "work/runs/r/report.html").read_text()


def test_a_users_own_objects_need_no_entry(tmp_path: Path):
    """The same through the real command, with objects from a module in the working directory."""
    (tmp_path / "mine.py").write_text(f"from {ENTRIES} import NEW_LAUNCHER, NEW_SOURCE, NEW_STRATEGY, new_engine\n")
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    own = (
        "source.kind=mine:NEW_SOURCE",
        "etl.engine=mine:new_engine",
        "train.strategy=mine:NEW_STRATEGY",
        "train.launcher=mine:NEW_LAUNCHER",
    )
    options = [word for each in (*own, "train.epochs=1", "etl.image_size=16") for word in ("--set", each)]
    done = shardmill("run", "images", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = shardmill("run", "images", *options, "--set", "etl.engine=mine:no_such", cwd=tmp_path)
    assert done.returncode == 2 and "'mine:no_such' cannot be loaded" in done.stderr


def test_a_dataset_names_no_code(tmp_path: Path):
    """Formats and encodings are stored in manifests: `package.module:object` there would import what a file says."""
    for key in ("etl.formats", "etl.encoding", "train.format"):
        with pytest.raises(UsageError, match=r"expected one of \w+, (?!.*package.module)"):
            load_pipeline(None, (f"{key}={ENTRIES}:NEW_FORMAT",))


@dataclass(frozen=True)
class Point:
    """One row of the first table of docs/extending.md."""

    key: str
    defines: str
    entry_file: str
    tests: tuple[str, ...]


def points() -> list[Point]:
    rows = [line.split(" | ") for line in EXTENDING.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    found = []
    for row in rows:
        if len(row) == 5 and (key := re.search(r"`([\w. ]+)`", row[0])):
            files = [re.findall(r"\]\(\.\./([\w/.]+)\)", cell) for cell in row]
            found.append(Point(key[1], files[1][0], files[2][0], tuple(files[3])))
    return found


def problems_of_document(registry: Registry[Any]) -> list[str]:
    """Entries of a registry that docs/extending.md does not list with their help, and others that it does."""
    text = EXTENDING.read_text(encoding="utf-8")
    listed = set(re.findall(rf"^\| `{registry.key}` \| `(\w+)` \| (.*?) \|", text, re.MULTILINE))
    actual = {(name, entry.help) for name, entry in registry.entries.items()}
    return [f"{registry.key}: `{name}` is not in the table" for name, _ in sorted(actual - listed)] + [
        f"{registry.key}: `{name}` is in the table with other words, or no entry" for name, _ in sorted(listed - actual)
    ]


@ALL
def test_the_document_lists_every_entry(registry: Registry[Any]):
    assert problems_of_document(registry) == []


def test_the_document_says_where_each_point_is():
    found = {point.key: point for point in points()}
    assert set(found) == set(NEW_ENTRIES)
    for point in found.values():
        assert (ROOT / point.defines).is_file()
        entry_file = (ROOT / point.entry_file).read_text(encoding="utf-8")
        [constant] = re.findall(rf'^(\w+): Registry\[.*\] = Registry\(\n    "{point.key}"', entry_file, re.MULTILINE)
        # Each of the shared tests runs over the registry, or names it.
        assert point.tests and all(constant in (ROOT / test).read_text(encoding="utf-8") for test in point.tests)
