"""`llms.txt`: it names every page of the site, and each link leads to the Markdown of one."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import yaml

from scripts.docs_site import hooks
from scripts.docs_site.llms import OPTIONAL, first_sentence
from scripts.docs_site.pages import PAGES

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"^- \[([^\]]+)\]\(([^)]+)\)(?:: (.+))?$", re.MULTILINE)


def test_it_names_every_page_and_each_link_leads_to_one(tmp_path: Path):
    text = re.sub(r"!!python/\S+", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    config = SimpleNamespace(**yaml.safe_load(text), repo_url="")
    config.site_dir = str(tmp_path)
    sources = {str(path.relative_to(ROOT / "docs")): path.read_text for path in (ROOT / "docs").rglob("*.md")}
    # As MkDocs calls the hook: for each page, and then once.
    for path, read in {**sources, **PAGES}.items():
        hooks.on_page_markdown(read(), SimpleNamespace(file=SimpleNamespace(src_uri=path)), config, files=None)
    hooks.on_post_build(config)

    written = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    head, *sections = written.split("\n## ")
    assert head.startswith(f"# {config.site_name}\n\n> {config.site_description}\n")
    assert [section.partition("\n")[0] for section in sections] == [
        *(title for entry in config.nav for title in entry if title not in OPTIONAL), "Optional"
    ]  # fmt: skip
    links = LINK.findall(written)
    assert sorted(target for _, target, _ in links) == sorted({**sources, **PAGES})
    for _, target, _ in links:
        # Their own links among each other lead somewhere, too.
        page = (tmp_path / target).read_text(encoding="utf-8")
        inner = re.findall(r"\]\((?!http|#|data:)([^)#]+\.md)", re.sub(r"```.*?```", "", page, flags=re.DOTALL))
        assert [each for each in inner if not ((tmp_path / target).parent / each).exists()] == [], target
    assert sum(bool(note) for *_, note in links) >= 0.9 * len(links) and len(written) < 30_000

    # What a plugin of MkDocs would insert is there.
    api = (tmp_path / "reference" / "python.md").read_text(encoding="utf-8")
    assert ":::" not in api and "run(source_or_config: 'Place', /" in api
    assert "### LoadableDataset.torch_loader" in api


def test_the_first_sentence_is_text():
    page = "# Title\n\n```bash\nmake\n```\n\ngoes on.\n\nThe *page* of [links](a.md) and `code.py`. More.\n"
    assert first_sentence(page) == "The *page* of links and `code.py`."
    assert first_sentence("# Title\n\n| a |\n|---|\n") == ""
