"""The documents: README commands run, the tour names what exists, links lead somewhere."""

from __future__ import annotations

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.choices import config_keys
from pipeline.cli import COMMANDS
from pipeline.tree import PipelineTree
from scripts.docs_site.code_map import code_map, first_sentence, modules
from scripts.docs_site.pages import PAGES
from shardmill.errors import ERROR_BY_EXIT_CODE
from shardmill.formats.rows import OWN_COLUMNS
from shardmill.sealed import unseal
from tests.demo import Demo
from tests.pipeline.command import ENVIRONMENT
from tests.support import write_images

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.splitlines() if line.strip()]


# Two trainings of a residual network, one of them in two processes.
SLOW = "--set train.model=torchvision"


@pytest.mark.timeout(1000)
def test_every_command_of_the_readme_runs(demo: Demo):
    # `make demo` is what the fixture ran.
    told = {"make demo", "source .venv/bin/activate"}
    assert told <= set(commands()) and len(commands()) >= 10
    write_images(demo.folder / "my_photos", num_images=100, num_classes=3)
    write_images(demo.folder / "new_photos", num_images=60, num_classes=4)
    for command in commands():
        if command not in told and SLOW not in command:
            run_it(command, demo.folder)


@pytest.mark.drill
def test_the_slow_commands_of_the_readme_run(tmp_path):
    write_images(tmp_path / "my_photos", num_images=100, num_classes=3)
    slow = [command for command in commands() if SLOW in command]
    assert len(slow) == 2
    for command in slow:
        assert "resnet18" in command and "training" in run_it(command, tmp_path)
    trainings = list((tmp_path / "shardmill-work" / "models").glob("trainings/*/*/*/fresh-*/result.json"))
    assert [json.loads(unseal(each.read_bytes(), "result"))["world_size"] for each in trainings] == [2]


def run_it(command: str, folder: Path) -> str:
    """What it says; if need be of the same command with less to train: ten epochs at 64 pixels are for people."""
    if re.match(r"shardmill run \w+_photos", command) and "train.epochs" not in command:
        command += " --set train.epochs=1 --set etl.image_size=16"
    done = subprocess.run(
        shlex.split(command), cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    return done.stdout


def test_the_python_of_the_readme_runs(demo: Demo):
    # NumPy alone; then the same with each framework's loop behind it, in processes of their own.
    first, *others = blocks("python")
    assert len(others) == 2
    programs = [first, *(f"{first}\n{other}" for other in others)]
    started = [
        subprocess.Popen(
            [sys.executable, "-c", each], cwd=demo.folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        for each in programs
    ]
    for process in started:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr


def test_what_the_readme_shows_is_what_the_demo_says(demo: Demo):
    shown = next(block for block in blocks("text") if "accepted" in block)
    counts = demo.summary["dataset"]["counts"]
    images = f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"
    assert images in shown and images in demo.stdout
    train = demo.summary["train"]
    training = f"{train['strategy']}, {train['world_size']} ranks, {train['epochs']} epochs, {train['steps']} steps"
    assert training in shown and training in demo.stdout
    assert "23 odd files" in README and "23 odd files" in demo.stderr


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 150


def test_every_module_opens_with_a_sentence_for_the_code_map():
    sentences = {module: first_sentence(module) for module in modules()}
    assert len(sentences) > 300
    assert [str(module) for module, sentence in sentences.items() if len(sentence) > 250] == []
    page = code_map()
    assert all(f"](../../{module.relative_to(ROOT)}) |" in page for module in sentences)


def test_the_tour_names_what_exists():
    named = re.findall(r"\[`([\w/]+\.py)`\]\(\.\./([\w/]+\.py)\) `(\w+)`", TOUR)
    assert len(named) >= 33
    for shown, target, name in named:
        assert shown == target
        tree = ast.parse((ROOT / target).read_text(encoding="utf-8"))
        assert any(getattr(node, "name", None) == name for node in tree.body), f"{target} has no {name}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path):
    for target, heading in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
        page = document.parent / target if target else document
        # The anchors of generated pages are checked by `make docs`.
        if os.path.relpath(page, ROOT / "docs") not in PAGES:
            assert page.exists(), target
            assert not heading or heading in headings_of(page), f"{target}#{heading}"


def headings_of(page: Path) -> set[str]:
    """As a link names them on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reference_has_every_config_key_and_command():
    keys = PAGES["reference/config.md"]()
    assert all(f'<a id="{key}"></a>`{key.rpartition(".")[2]}`' in keys for key, _ in config_keys(PipelineTree))
    listed = PAGES["reference/cli.md"]()
    assert all(f"    shardmill {name} " in listed for name in COMMANDS)


def test_the_columns_of_a_shard_are_listed():
    text = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8").partition("\n## TFRecord")[0]
    listed = tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed == OWN_COLUMNS


def test_every_exit_code_is_explained():
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    for code, kind in ERROR_BY_EXIT_CODE.items():
        assert re.search(rf"^\| {code} \|.*`{kind.__name__}`", text, re.MULTILINE)
