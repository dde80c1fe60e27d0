"""The hook of MkDocs: adds the generated pages and `llms.txt`, and makes links to files outside of docs/ work on the
site.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from scripts.docs_site.code_map import ROOT
from scripts.docs_site.llms import llms_txt, write_llms
from scripts.docs_site.notebooks import page_of
from scripts.docs_site.pages import PAGES

_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")

# Every page as it is on the site, by its path below docs/; `mkdocs build` makes all before it calls `on_post_build`.
_MARKDOWN: dict[str, str] = {}


def on_files(files: Files, config: Any) -> Files:
    """Generated pages stand beside those of docs/."""
    for uri, make in PAGES.items():
        files.append(File.generated(config, uri, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """A link to code leads to the repository if mkdocs.yml has `repo_url`, and is plain text otherwise.

    A link to a notebook leads to its page.
    """

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(page.file.src_uri), found[2]))
        if target.endswith(".ipynb"):
            return f"[{found[1]}]({page_of(found[2])}{found[3] or ''})"
        if not target.startswith("../") and not target.endswith(".json"):
            return found[0]
        path = target.removeprefix("../") if target.startswith("../") else f"docs/{target}"
        if not (ROOT / path).exists():
            return found[0]  # MkDocs reports it
        return f"[{found[1]}]({config.repo_url.rstrip('/')}/blob/main/{path})" if config.repo_url else found[1]

    _MARKDOWN[page.file.src_uri] = _outside_of_code(markdown, lambda text: _LINK.sub(link, text))
    return _MARKDOWN[page.file.src_uri]


def on_post_build(config: Any) -> None:
    """Beside the pages of the site: the same for language models."""
    text = llms_txt(config.site_name, config.site_description, config.nav, _MARKDOWN)
    write_llms(Path(config.site_dir), text, _MARKDOWN)


def _outside_of_code(markdown: str, change: Callable[[str], str]) -> str:
    """`change` applied to everything but fenced blocks."""
    pieces = re.split(r"(^```.*?^```$)", markdown, flags=re.MULTILINE | re.DOTALL)
    return "".join(piece if piece.startswith("```") else change(piece) for piece in pieces)
