"""The documentation: what it says is so, its links lead somewhere, and `llms.txt` names every page."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from mkdocs.utils import meta

import shardmill
from pipeline.choices import config_keys
from pipeline.cli import COMMANDS
from pipeline.tree import PipelineTree
from scripts.docs_site import hooks, llms
from scripts.docs_site.code_map import code_map, first_sentence, modules
from scripts.docs_site.pages import PAGES
from shardmill.errors import ERROR_BY_EXIT_CODE
from shardmill.formats.rows import OWN_COLUMNS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
TOUR = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def test_the_readme_stays_short():
    assert len(README.splitlines()) <= 150


def test_every_place_names_the_same_version():
    """And what a release adds is there (CONTRIBUTING.md)."""
    version = shardmill.__version__
    for file, line in {
        "pyproject.toml": f'version = "{version}"',
        "CITATION.cff": f"version: {version}",
        "uv.lock": f'name = "shardmill"\nversion = "{version}"',
        "CHANGELOG.md": f"## {version} - 20",
    }.items():
        assert f"\n{line}" in (ROOT / file).read_text(encoding="utf-8"), file
    assert (ROOT / "tests" / "pipeline" / "released" / f"{version}.tar.xz").exists()


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


def test_the_site_lists_every_page():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(re.findall(r"([\w./-]+\.md)$", nav, re.MULTILINE)) == sorted(pages | PAGES.keys())


@pytest.mark.starts("program")
def test_make_docs_fails_for_a_link_that_leads_nowhere(tmp_path: Path):
    """As the rule calls it: `--quiet` would drop the warnings that a strict build counts."""
    [words] = re.findall(r"\bmkdocs (build.*)", (ROOT / "Makefile").read_text(encoding="utf-8"))
    (tmp_path / "mkdocs.yml").write_text("site_name: two pages\nstrict: true\ntheme: {name: mkdocs}\n")
    (tmp_path / "docs").mkdir()
    for target, expected in (("index.md", 0), ("nowhere.md", 1)):
        (tmp_path / "docs" / "index.md").write_text(f"[a link]({target})\n")
        command = [sys.executable, "-m", "mkdocs", *words.split()]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
        assert done.returncode == expected, done.stderr


def test_documents_name_keys_that_exist():
    """A key of the config, a field of `summary.json`, or an event."""
    sources = [path for folder in ("etl", "train", "pipeline") for path in (ROOT / folder).rglob("*.py")]
    code = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    # Those of a training get their prefix when they are written.
    events = {*re.findall(r'"(\w+\.\w+)"', code), *(f"train.{name}" for name in re.findall(r'event\(\s*"(\w+)"', code))}
    fields = set(re.findall(r"^\| `([\w.]+)` \|", PAGES["reference/summary.md"](), re.MULTILINE))
    keys = {key for key, _ in config_keys(PipelineTree)}
    known = keys | {key.rpartition(".")[0] for key in keys} | fields | events
    # What the log and the benchmarks name was so on their day.
    pages = [
        page for page in DOCUMENTS if page.name != "LOG.md" and page.parent.name not in ("decisions", "benchmarks")
    ]
    named = re.compile(r"`((?:etl|train|source|gate)(?:\.[a-z_]+)+)(?=[` =])")
    wrong = {f"{page.name}: {key}" for page in pages for key in named.findall(page.read_text(encoding="utf-8"))}
    assert sorted(each for each in wrong if each.split(": ")[1] not in known) == []


def test_pages_that_code_names_exist():
    named = re.compile(r"(?<![\w/])docs/[\w/-]+\.md")
    folders = ("shardmill", "etl", "train", "pipeline", "airflow_dags", "scripts", "tests", "benchmarks", "examples")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    pages = {page for path in files for page in named.findall(path.read_text(encoding="utf-8", errors="ignore"))}
    assert len(pages) >= 10
    assert [page for page in sorted(pages) if not (ROOT / page).exists()] == []


def test_notebooks_and_examples_import_only_public_names():
    """What `shardmill` offers, and the layers for users' own models."""
    public = {*(f"shardmill.{name}" for name in shardmill.__all__), "shardmill"}
    public |= {f"train.layers.{framework}.SampleDropout" for framework in ("keras", "torch")}
    code = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").rglob("*.py")}
    for path in (ROOT / "docs/notebooks").glob("*.ipynb"):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code[path.name] = "\n".join("".join(each["source"]) for each in cells if each["cell_type"] == "code")
    imported = {
        (name, f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name)
        for name, text in code.items()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for each in node.names
    }
    ours = {
        (name, each) for name, each in imported if each.partition(".")[0] in ("shardmill", "etl", "train", "pipeline")
    }
    assert {"explore.ipynb", "train.ipynb", "finetune_model.py", "keras_fit.py"} <= {name for name, _ in ours}
    assert sorted(each for each in ours if each[1] not in public) == []


def headings_of(page: Path) -> set[str]:
    """As a link names them on GitHub."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_reference_has_every_config_key_and_command():
    keys = PAGES["reference/config.md"]()
    assert all(f'<a id="{key}"></a>`{key.rpartition(".")[2]}`' in keys for key, _ in config_keys(PipelineTree))
    listed = PAGES["reference/cli.md"]()
    assert all(f"    shardmill {name} " in listed for name in COMMANDS)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_a_page_that_leads_to_a_generated_one_says_where_that_is(document: Path):
    """In a clone and on GitHub there is none."""
    text = document.read_text(encoding="utf-8")
    leads = [
        target
        for target in re.findall(r"\]\((?!http)([^)#]+)", text)
        if os.path.relpath(document.parent / target, ROOT / "docs") in PAGES
    ]
    assert not leads or "`make docs`" in text, leads


def row_of(key: str) -> list[str]:
    """The cells of a key in the reference."""
    [row] = [line for line in PAGES["reference/config.md"]().splitlines() if f'<a id="{key}"></a>' in line]
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", row)[2:-1]]


def test_every_default_is_a_value():
    """One that followed from other keys would have to name them; its meaning says what 0 stands for."""
    assert row_of("train.num_streams")[0] == "`0`"


@pytest.mark.parametrize("key", ["accumulation_steps", "num_workers", "local_sgd.silo_timeout_seconds"])
def test_the_reference_does_not_say_that_a_setting_changes_nothing_that_does(key: str):
    _, meaning = row_of(f"train.{key}")
    assert meaning.endswith(
        "*Execution setting: it may differ between two attempts at one training, and starts no new run.*"
    )


def test_the_columns_of_a_shard_are_listed():
    text = (ROOT / "docs" / "columns.md").read_text(encoding="utf-8").partition("\n## TFRecord")[0]
    listed = tuple(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    assert listed == OWN_COLUMNS


def test_every_exit_code_is_explained():
    text = (ROOT / "docs" / "exit-codes.md").read_text(encoding="utf-8")
    for code, kind in ERROR_BY_EXIT_CODE.items():
        retries = "yes" if kind.is_worth_retrying else "no"
        assert re.search(rf"^\| {code} \|.*`{kind.__name__}` \| {retries} \|$", text, re.MULTILINE)


def test_the_skill_has_the_front_matter_of_the_format_and_every_exit_code():
    path = ROOT / "docs" / llms.SKILL
    text, front = meta.get_data(path.read_text(encoding="utf-8"))
    assert front["name"] == path.parent.name and re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", front["name"])
    assert 0 < len(front["description"]) <= 1024 and len(front["compatibility"]) <= 500
    codes = {int(code) for cell in re.findall(r"^\| ([\d, ]+) \|", text, re.MULTILINE) for code in cell.split(",")}
    assert codes == {0, 1, *ERROR_BY_EXIT_CODE, 130, 143}


LINK = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)(?:: (.+))?$", re.MULTILINE)


def test_it_names_every_page_and_each_link_leads_to_one(tmp_path: Path):
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config = SimpleNamespace(**yaml.safe_load(text), repo_url="")
    config.site_dir = str(tmp_path)
    sources = {str(path.relative_to(ROOT / "docs")): path.read_text for path in (ROOT / "docs").rglob("*.md")}
    # As MkDocs calls the hook: for each page without its front matter, and then once.
    for path, read in {**sources, **PAGES}.items():
        hooks.on_page_markdown(
            meta.get_data(read())[0], SimpleNamespace(file=SimpleNamespace(src_uri=path)), config, files=None
        )
    hooks.on_post_build(config)

    written = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    head, *sections = written.split("\n## ")
    assert head.startswith(f"# {config.site_name}\n\n> {config.site_description}\n")
    assert [section.partition("\n")[0] for section in sections] == [
        *(title for entry in config.nav for title in entry if title not in llms.OPTIONAL), "Optional"
    ]  # fmt: skip
    links = LINK.findall(written)
    assert sorted(target for _, target, _ in links) == sorted({**sources, **PAGES})
    for _, target, _ in links:
        # Their own links among each other lead somewhere, too.
        page = (tmp_path / target).read_text(encoding="utf-8")
        inner = re.findall(r"\]\((?!http|#|data:)([^)#]+\.md)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
        assert [each for each in inner if not ((tmp_path / target).parent / each).exists()] == [], target
    assert sum(bool(note) for *_, note in links) >= 0.9 * len(links) and len(written) < 30_000

    assert (tmp_path / llms.SKILL).read_bytes() == (ROOT / "docs" / llms.SKILL).read_bytes()

    # What a plugin of MkDocs would insert is there.
    api = (tmp_path / "reference" / "python.md").read_text(encoding="utf-8")
    first = re.findall(r"^## ([\w.]+)$", api, re.MULTILINE)
    assert [name.rpartition(".")[2] for name in first[:3]] == ["open_dataset", "run", "LoadableDataset"]
    assert len(first) == len(set(first)) and set(shardmill.__all__) <= {name.rpartition(".")[2] for name in first}
    assert ":::" not in api and "run(source_or_config: 'Location', /" in api
    assert "### LoadableDataset.torch_loader" in api


def test_the_first_sentence_is_text():
    page = "# Title\n\n```bash\nmake\n```\n\ngoes on.\n\nThe *page* of [links](a.md) and `code.py`. More.\n"
    assert llms.first_sentence(page) == "The *page* of links and `code.py`."
    assert llms.first_sentence("# Title\n\n| a |\n|---|\n") == ""
