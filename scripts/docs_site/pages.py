"""The generated pages of the documentation, by their path below docs/."""

from __future__ import annotations

import re
from collections.abc import Callable

from scripts.docs_site.code_map import ROOT, code_map
from scripts.docs_site.commands import commands
from scripts.docs_site.config_keys import config_keys
from scripts.docs_site.entries import entries
from scripts.docs_site.notebooks import notebook_pages
from scripts.docs_site.python_api import python_api
from scripts.docs_site.schema import summary


def _of_repository(path: str, page: str) -> Callable[[], str]:
    """A page of the repository outside of docs/, with links as they are from `page`."""
    up = "../" * page.count("/")

    def read() -> str:
        text = (ROOT / path).read_text(encoding="utf-8")
        text = re.sub(r"\]\((?:\.\./)?docs/([^)]*)\)", rf"]({up}\1)", text)
        text = re.sub(r"\]\((LICENSE|README\.md|CONTRIBUTING\.md|CHANGELOG\.md)\)", rf"]({up}../\1)", text)
        # A folder is no page of the site.
        return re.sub(r"\[([^\]]*)\]\([^)]*/\)", r"\1", text)

    return read


PAGES: dict[str, Callable[[], str]] = {
    "reference/cli.md": commands,
    "reference/code-map.md": code_map,
    "reference/config.md": config_keys,
    "reference/entries.md": entries,
    "reference/python.md": python_api,
    "reference/summary.md": summary,
    "contributing.md": _of_repository("CONTRIBUTING.md", "contributing.md"),
    "changelog.md": _of_repository("CHANGELOG.md", "changelog.md"),
    "benchmarks/index.md": _of_repository("benchmarks/README.md", "benchmarks/index.md"),
    **notebook_pages(),
}
