"""Every command of the README, the start page, Get started and the Guides is one that there is, and runs with
their programs as a reader would run them: those of the README and of Get started in a drill, all in `make test-all`.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.cli import COMMANDS
from pipeline.tree import PipelineTree
from shardmill.checksummed import verified_body
from shardmill.jobs.config import load_tree
from tests.demo import Demo
from tests.etl.annotations import ROWS, as_coco
from tests.lab.commands import ENVIRONMENT, shardmill
from tests.lab.datasets import write_images
from tests.lab.scale import exhaustive, usually

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "index.md"
SKILL = ROOT / "docs" / "skills" / "shardmill" / "SKILL.md"
LOOP = ROOT / "docs" / "get-started" / "your-loop.md"
AUGMENTATION = ROOT / "docs" / "augmentation.md"
MODEL = ROOT / "docs" / "get-started" / "your-model.md"

# What the fixture `demo` has run, what changes a shell, and what test_table_values.py, test_examples.py and
# test_packaging.py run with inputs of their own.
ELSEWHERE = ("make demo", "pip install ", "shardmill demo", "source .venv/", "python examples/")
# These start ranks in processes of their own, or measure for seconds: a drill runs them.
SLOW = ("train.model=torchvision", "train.num_workers=2", "--rehearse", "shardmill plan ")
# Commands that need a cluster, a server, ffmpeg, a GPU, data of others or an hour are
# blocks of `console`; no other page has such.
PLATFORMS = {f"platforms/{name}.md" for name in ("databricks", "dataproc", "emr", "kubernetes")}
TRAINING = {"training/speed.md", "training/launchers.md"}
NEED_MORE = {
    "choosing.md", "clusters.md", "images.md", "observability.md", "promotion.md", "recipes.md", "sources.md",
    *TRAINING, *PLATFORMS,
}  # fmt: skip


def pages(*sections: str) -> list[Path]:
    """The README, then the pages of these sections of the site in its order."""

    def below(entry: object) -> list[str]:
        inner = entry.values() if isinstance(entry, dict) else entry if isinstance(entry, list) else ()
        return [entry] if isinstance(entry, str) else [page for each in inner for page in below(each)]

    # Its tags of Python are about extensions; of the rest nothing has a tag.
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    nav = {title: section for entry in yaml.safe_load(text)["nav"] for title, section in entry.items()}
    listed = below([nav[section] for section in sections])
    # Notebooks are run by tests/test_examples.py.
    return [README, *(ROOT / "docs" / page for page in listed if not page.startswith("notebooks/"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^ *```{language}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


ALL = pages("Home", "Get started", "Guides")
EXECUTED = usually(pages("Home", "Get started"), ALL)


def commands(pages: list[Path], language: str = "bash") -> list[str]:
    """Each once, in the order of the pages."""
    texts = [block.replace("\\\n", "") for page in pages for block in blocks(page, language)]
    lines = [line.partition(" # ")[0].strip() for text in texts for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith(("#", *ELSEWHERE))))


@pytest.mark.parametrize("language", ["bash", "console"])
def test_every_command_is_one_that_there_is(language: str):
    """Those of `console` as well, which need what no test has: their arguments are parsed, their settings checked."""
    given = [line.removeprefix("$ ") for line in commands(ALL, language)]
    ours = [line for line in given if line.startswith("shardmill ")]
    assert len(ours) >= {"bash": 50, "console": 9}[language]
    for line in ours:
        names, arguments = [], shlex.split(line)[1:]
        command = COMMANDS[arguments[0]]
        while True:
            names.append(arguments.pop(0))
            commands_below = getattr(command, "commands", None)
            if commands_below is None:
                break
            command = commands_below[arguments[0]]
        try:
            context = command.make_context(" ".join(names), arguments)
            load_tree(PipelineTree, None, tuple(context.params["overrides"]))
        except Exception as error:
            pytest.fail(f"{line}: {error}")


def write_inputs(folder: Path) -> None:
    write_images(folder / "my_photos", num_images=100, num_classes=3)
    write_images(folder / "new_photos", num_images=60, num_classes=4)
    write_images(folder / "tuesday", num_images=60, num_classes=3)
    as_coco(folder / "pets", ROWS)
    [net] = blocks(MODEL, "python")
    (folder / "net.py").write_text(net)


def run_it(command: str, folder: Path) -> str:
    """What it says; if need be of the same command with less to train: ten epochs at 64 pixels are for people."""
    if re.match(r"shardmill (run \w+_photos|train )", command) and "train.epochs" not in command:
        command += " --set train.epochs=1"
    if re.match(r"shardmill (run \w+_photos|etl tuesday)", command) and "etl.image_size" not in command:
        command += " --set etl.image_size=16"
    program, *arguments = shlex.split(command)
    if program == "shardmill":
        done = shardmill(*arguments, cwd=folder, timeout=200)
    else:
        done = subprocess.run(
            [program, *arguments], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=200
        )
    assert done.returncode == 0, f"{command}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.mark.timeout(1000)
def test_every_command_runs(demo: Demo):
    quick = [command for command in commands(EXECUTED) if not any(part in command for part in SLOW)]
    assert len(quick) >= usually(12, 45)
    write_inputs(demo.folder)
    for command in quick:
        run_it(command, demo.folder)


@pytest.mark.drill
@pytest.mark.timeout(1000)
def test_every_slow_command_runs(tmp_path: Path):
    slow = [command for command in commands(EXECUTED) if any(part in command for part in SLOW)]
    assert {part for part in SLOW if any(part in command for command in slow)} == set(usually(SLOW[:2], SLOW))
    write_inputs(tmp_path)
    [init] = [command for command in commands(ALL) if command.startswith("shardmill init ")]
    for command in (init, "shardmill run photos.toml --set train.epochs=1 --set etl.image_size=16", *slow):
        run_it(command, tmp_path)
    trainings = list((tmp_path / "shardmill-work" / "models").glob("trainings/*/*/*/fresh-*/result.json"))
    assert [json.loads(verified_body(each.read_bytes(), "result"))["world_size"] for each in trainings] == [2]


@pytest.mark.parametrize("page", [README, INDEX, SKILL, LOOP, exhaustive(AUGMENTATION)], ids=lambda page: page.name)
def test_every_program_runs(page: Path, demo: Demo):
    # The first block by itself; then the same with each of the others behind it, at once in processes of their own.
    first, *others = blocks(page, "python")
    assert len(others) >= 2 or page in (INDEX, SKILL)
    started = [
        subprocess.Popen(
            [sys.executable, "-c", each], cwd=demo.folder, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
        )
        for each in (first, *(f"{first}\n{other}" for other in others))
    ]
    for process in started:
        _, stderr = process.communicate(timeout=200)
        assert process.returncode == 0, stderr


def test_commands_that_no_test_runs_are_marked():
    docs = ROOT / "docs"
    marked = {str(page.relative_to(docs)) for page in ALL if page != README and blocks(page, "console")}
    assert marked == NEED_MORE
    assert not blocks(README, "console")
    # A block without a language, or an indented one, would hide a command.
    for page in ALL:
        text = page.read_text(encoding="utf-8")
        fences = re.findall(r"^ *```(.*)$", text, re.MULTILINE)
        assert all(fences[::2]) and not any(fences[1::2]), page
        assert not re.search(r"^\n    (shardmill|spark-submit|pip|make|python) ", text, re.MULTILINE), page


def test_what_the_readme_shows_is_what_the_demo_says(demo: Demo):
    text = README.read_text(encoding="utf-8")
    shown = next(block for block in blocks(README, "text") if "accepted" in block)
    counts = demo.summary["dataset"]["counts"]
    images = f"{counts['accepted']:,} accepted, {counts['rejected']:,} rejected of {counts['listed']:,} listed"
    assert images in shown and images in demo.stdout
    train = demo.summary["train"]
    training = f"{train['strategy']}, {train['world_size']} ranks, {train['epochs']} epochs, {train['steps']} steps"
    assert training in shown and training in demo.stdout
    assert "23 odd files" in text and "23 odd files" in demo.stderr
