"""An extension is one file and one entry: a new entry of any registry works in config, CLI, doctor and docs."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import train.config
from pipeline.choices import registries, registry_keys
from pipeline.config import load_pipeline
from pipeline.config_file import commented_toml, to_toml
from pipeline.doctor.doctor import examine
from pipeline.tree import PipelineTree
from scripts.docs_site import extension_points
from scripts.docs_site.entries import entries, of_registry
from scripts.docs_site.extension_points import registry_file
from shardmill.errors import UsageError
from shardmill.registry import Entry, OneOf, Registry, install_hint, load_object
from tests.lab.commands import ENVIRONMENT, in_process
from tests.lab.datasets import write_images
from tests.quick_start import FOLDER

ROOT = Path(__file__).resolve().parent.parent
EXTENDING = ROOT / "docs" / "extending.md"
ENTRIES = "tests.extending_entries"
NEW_ENTRIES = {
    "source.kind": "NEW_SOURCE", "etl.engine": "NEW_ENGINE", "etl.encoding": "NEW_ENCODING",
    "etl.formats": "NEW_FORMAT", "train.model": "NEW_MODEL", "train.strategy": "NEW_STRATEGY_WITH_OPTIONS",
    "train.backend": "NEW_BACKEND", "train.optimizer": "new_optimizer", "train.schedule": "NEW_SCHEDULE",
    "train.launcher": "NEW_LAUNCHER", "train.reader": "NEW_READER", "train.log.trackers": "NewTracker",
    "storage scheme": "new_store",
}  # fmt: skip
# What an entry names beside its object.
OPTIONS = {"train.strategy": ', options="new_entries:NewOptions"', "source.kind": ', suffixes=(".new",)'}
# A second strategy, whose ranks hold one module together.
SHARED = (
    '"new_shared": Entry("new_entries:NEW_SHARED_STRATEGY", "added by a test", extra="torch", packages=("torch",)),'
)
REGISTRIES = registries(PipelineTree)
ALL = pytest.mark.parametrize("registry", REGISTRIES, ids=lambda registry: registry.key)


def override(registry: Registry[Any], name: str) -> str:
    return f"dataset.uri={name}:///d" if registry.key == "storage scheme" else f"{registry.key}={name}"


def test_every_registry_is_tried():
    assert {registry.key for registry in REGISTRIES} == set(NEW_ENTRIES)


@pytest.mark.starts("program")
@ALL
def test_a_new_entry_is_accepted_listed_and_examined(registry: Registry[Any], tmp_path: Path, monkeypatch):
    entry = Entry("no_such_package:X", "a line of help", extra="brand_new", packages=("no_such_package",))
    monkeypatch.setitem(registry.entries, "brand_new", entry)
    (tmp_path / "images").mkdir()

    # The config accepts it; a typo is answered with it.
    tree = load_pipeline(str(tmp_path / "images"), (override(registry, "brand_new"),), str(tmp_path / "work"))
    if registry.key != "storage scheme":
        with pytest.raises(UsageError, match="did you mean 'brand_new'"):
            load_pipeline(str(tmp_path / "images"), (override(registry, "brand_mew"),), "work")

        # `init` and `config show` list it with its help, and what they print stays TOML that gives the same tree.
        listed = re.compile(r"^#   brand_new +a line of help$", re.MULTILINE)
        num_keys = sum(one_of.registry is registry for _, one_of in registry_keys(PipelineTree))
        for text in (commented_toml(tree), to_toml(tree, with_choices=True)):
            assert len(listed.findall(text)) == num_keys
        assert PipelineTree.model_validate(tomllib.loads(to_toml(tree, with_choices=True))) == tree

    # `doctor` names what is missing, and how it is installed.
    failures = [each for each in examine(tree, str(tmp_path / "work")) if each.status == "fail"]
    assert any("no_such_package" in each.found and each.fix == install_hint("brand_new") for each in failures)
    assert "| `brand_new` | a line of help | `brand_new` |" in of_registry(registry)


@pytest.mark.drill
def test_one_file_and_one_entry_are_enough(tmp_path: Path):
    """In a copy of the sources, follow the document: one more module, one more line in each registry; then run."""
    sources = tmp_path / "sources"
    for package in ("shardmill", "etl", "train", "pipeline"):
        shutil.copytree(ROOT / package, sources / package)
    shutil.copy(ROOT / "tests" / "extending_entries.py", sources / "new_entries.py")
    for registry in REGISTRIES:
        file = sources / registry_file(registry)
        head = f'"{registry.key}",\n    {{\n'
        text = file.read_text(encoding="utf-8")
        assert head in text
        words = f'"new_entries:{NEW_ENTRIES[registry.key]}", "added by a test"{OPTIONS.get(registry.key, "")}'
        entry = f'        "new": Entry({words}),\n'
        entry += f"        {SHARED}\n" if registry.key == "train.strategy" else ""
        # A model has twins in a second registry of this key.
        file.write_text(text.replace(head, head + entry, 1), encoding="utf-8")

    def try_to_run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pipeline.cli", *words]
        environment = {**ENVIRONMENT, "PYTHONPATH": f"{sources}:{FOLDER}", **variables}
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)

    def run(*words: str) -> str:
        done = try_to_run(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    # The strategy has a setting of its own, which is shown, and checked by the driver.
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    assert "[train.new]\npatience = 1\n" in run("config", "show")
    for value, expected in (("0", "greater than or equal to 1"), ("10", "at most 9")):
        refused = try_to_run("run", "images", "--set", "train.strategy=new", "--set", f"train.new.patience={value}")
        assert refused.returncode == 2 and f"train.new.patience = {value}; expected {expected}" in refused.stderr

    # A file with the suffix of the new source is one of that kind.
    (tmp_path / "photos.new").touch()
    assert 'kind = "new"' in run("config", "show", "photos.new")

    # What starts processes is a registry that no key chooses from.
    environments = sources / "shardmill/environments/__init__.py"
    head = '"started by",\n    {\n'
    text = environments.read_text(encoding="utf-8")
    assert text.count(head) == 1
    entry = '        "new": Entry("new_entries:NEW_ENVIRONMENT", "added by a test"),\n'
    environments.write_text(text.replace(head, head + entry), encoding="utf-8")
    refused = try_to_run("run", "images", NEW_RANK="1", NEW_SIZE="2")
    said = "the new cluster started this command 2 times (NEW_RANK = 1, NEW_SIZE = 2), and train.launcher is not set"
    assert refused.returncode == 2 and said in refused.stderr

    # The whole pipeline through new entries alone: ETL, verification, training, an export that is loaded back, report.
    dataset = f"new://{tmp_path}/dataset"
    chosen = [*(f"{key}=new" for key in NEW_ENTRIES if key != "storage scheme"), "train.new.patience=3"]
    overrides = [*chosen, f"dataset.uri={dataset}", "etl.image_size=16", "train.epochs=1"]
    options = [word for each in overrides for word in ("--set", each)]
    run("run", "images", "--workdir", "work", "--run-id", "r", *options)
    described = json.loads(run("inspect", dataset, "--json"))
    assert (described["formats"], described["image"]["encoding"]) == (["new"], "new")
    assert "ok" in run("verify", dataset, "--deep")
    assert "Confusion matrix" in (tmp_path / "work/runs/r/report.html").read_text()
    curves = (tmp_path / "work/runs/r/curves.txt").read_text()
    # The setting has reached the rank.
    assert "rank 0: the first sum with patience 3\n" in (tmp_path / "work/runs/r/ranks.log").read_text()
    assert curves.startswith("0 step/loss ") and "0 epoch/validation_accuracy " in curves and curves.endswith("True")

    # The strategy that shares a module: a plan counts it, refuses axes that it has not, and two ranks train by it.
    options = ["--set", "train.model=vit_tiny"]
    planned = json.loads(run("plan", dataset, "--world-size", "2", "--memory", "4GB", "--json", *options))
    of_strategy = {row["strategy"]: row for row in planned["strategies"]}
    mine, fsdp = of_strategy["new_shared"], of_strategy["torch_fsdp"]
    assert mine["fits"] and (mine["mesh"], mine["parameters"]) == ("fsdp 2", fsdp["parameters"])
    assert mine["exchange"] > fsdp["exchange"], "it gathers all blocks at once"
    options += ["--set", "train.strategy=new_shared", "--set", "train.num_workers=2", "--set", "train.epochs=1"]
    refused = try_to_run("train", dataset, *options, "--set", "train.mesh.tensor=2")
    said = "train.mesh.tensor = 2 with train.strategy = 'new_shared', which has no such axis"
    assert refused.returncode == 2 and said in refused.stderr
    run("train", dataset, "--workdir", "work", "--run-id", "shared", *options)
    summary = json.loads((tmp_path / "work/runs/shared/summary.json").read_text())
    assert summary["train"]["strategy"] == "new_shared" and summary["train"]["world_size"] == 2


def test_a_users_own_objects_need_no_entry(tmp_path: Path):
    """The same through the command, with objects from a module in the working directory."""
    (tmp_path / "mine.py").write_text(
        f"from {ENTRIES} import NEW_LAUNCHER, NEW_SOURCE, NEW_STRATEGY, NEW_ENGINE, NewTracker\n"
    )
    write_images(tmp_path / "images", num_images=60, num_classes=3)
    own = (
        "source.kind=mine:NEW_SOURCE", "etl.engine=mine:NEW_ENGINE", "train.strategy=mine:NEW_STRATEGY",
        "train.launcher=mine:NEW_LAUNCHER", "train.log.trackers=mine:NewTracker",
    )  # fmt: skip
    options = [word for each in (*own, "train.epochs=1", "etl.image_size=16") for word in ("--set", each)]
    done = in_process("run", "images", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("shardmill-work/runs/*/curves.txt"))
    done = in_process("run", "images", *options, "--set", "etl.engine=mine:no_such", cwd=tmp_path)
    assert done.returncode == 2 and "mine.py has no 'no_such'" in done.stderr


def test_a_dataset_names_no_code(tmp_path: Path):
    """Formats and encodings are stored in manifests: `package.module:object` there would import what a file says."""
    for key in ("etl.formats", "etl.encoding", "train.format"):
        with pytest.raises(UsageError, match=r"expected one of \w+, (?!.*package.module)"):
            load_pipeline(None, (f"{key}={ENTRIES}:NEW_FORMAT",), "work")


@ALL
def test_the_reference_lists_every_entry(registry: Registry[Any]):
    page = entries()
    assert all(
        f"| `{name}` | {entry.help.replace('|', chr(92) + '|')} |" in page for name, entry in registry.entries.items()
    )


def test_the_document_names_the_registries_whose_entries_have_settings():
    registries_of_config = re.findall(r'"([\w.]+:[A-Z]+)",\n', inspect.getsource(train.config).partition("\nclass ")[0])
    have_sections = [one_of.registry for one_of in map(OneOf, registries_of_config)]
    assert have_sections == [registry for registry in REGISTRIES if registry.options_prefix is not None]
    text = " ".join(EXTENDING.read_text(encoding="utf-8").split())
    for registry in have_sections:
        assert re.search(rf"`{registry.key}`.{{1,30}}`\[train\.{registry.options_prefix}NAME\]`", text), registry.key


def test_the_document_has_the_table_of_today(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert extension_points.main([]) == 0, "python -m scripts.docs_site.extension_points --update"
    page = tmp_path / "extending.md"
    page.write_text(
        EXTENDING.read_text(encoding="utf-8").replace("| `etl.engine`:", "| `etl.motor`:"), encoding="utf-8"
    )
    assert extension_points.main([], page) == 1 and "--update" in capsys.readouterr().err
    assert extension_points.main(["--update"], page) == 0
    assert page.read_text(encoding="utf-8") == EXTENDING.read_text(encoding="utf-8")


@ALL
def test_each_registry_says_what_it_is_for(registry: Registry[Any]):
    assert registry.point is not None and callable(load_object(registry.point.defines))
    text = (ROOT / registry_file(registry)).read_text(encoding="utf-8")
    # A model has twins in a second registry of this key.
    constant, *_ = re.findall(rf'^(\w+): Registry\[.*\] = Registry\(\n    "{registry.key}"', text, re.MULTILINE)
    # Each of the shared tests runs over the registry, or names it.
    tests = extension_points.SHARED_TESTS[registry.key]
    assert tests and all(constant in (ROOT / "tests" / f"{test}.py").read_text(encoding="utf-8") for test in tests)
