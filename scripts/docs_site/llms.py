"""`llms.txt` of the documentation site (https://llmstxt.org): every page with its first sentence, and its Markdown, and
the skill for coding agents."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from scripts.docs_site.code_map import ROOT

# Whoever has little room leaves these out, as the format has it.
OPTIONAL = ("Contributing", "Benchmarks")
# For agents that load instructions by their front matter: https://agentskills.io/specification.
SKILL = "skills/shardmill/SKILL.md"
_MAX_NOTE = 240

HEAD = """# {name}

> {about}

Each link is the Markdown of a page. The project's tests run the commands and programs on these pages.
"""


def llms_txt(name: str, about: str, nav: Sequence[Any], markdown: Mapping[str, str]) -> str:
    """The file. `nav` is MkDocs' own; `markdown` has every page by its path below docs/."""
    lines, optional = [HEAD.format(name=name, about=about)], ["## Optional", ""]
    for section in nav:
        for title, pages in section.items():
            listed = [_line(page, markdown[page]) for page in _pages(pages)]
            if title in OPTIONAL:
                optional += listed
            else:
                lines += [f"## {title}", "", *listed, ""]
    return "\n".join([*lines, *optional]) + "\n"


def write_llms(folder: Path, text: str, markdown: Mapping[str, str]) -> None:
    """Write `llms.txt`, and each page's Markdown where it names it, below the site's folder."""
    (folder / "llms.txt").write_text(text, encoding="utf-8")
    for path, page in markdown.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        # MkDocs takes the front matter off, by which an agent finds the skill.
        text = (ROOT / "docs" / path).read_text(encoding="utf-8") if path == SKILL else with_api(page)
        target.write_text(text, encoding="utf-8")


def first_sentence(page: str) -> str:
    """The first sentence behind the title, without links; empty if the page begins with something else than text."""
    body = re.sub(r"^(```|~~~).*?^\1\s*$", "", page.partition("\n")[2], flags=re.MULTILINE | re.DOTALL)
    # A paragraph that begins with a small letter continues the sentence of a command; an indented one is a command.
    texts = (part.strip("\n") for part in re.split(r"\n\s*\n", body))
    text = " ".join(next((part for part in texts if re.match(r"[A-Z`\[\"]|shardmill|\*\*[A-Z]", part)), "").split())
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text).replace("**", "")
    sentence = re.match(r".+?\.(?=\s|$)", text)
    note = (sentence[0] if sentence else text).rstrip(":")
    return note if len(note) <= _MAX_NOTE else f"{note[:_MAX_NOTE].rsplit(' ', 1)[0]} ..."


def with_api(page: str) -> str:
    """The page with the objects that mkdocstrings would insert: signatures and docstrings."""
    return re.sub(r"^::: ([\w.]+)$", lambda found: _object(found[1]), page, flags=re.MULTILINE)


def _pages(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, Mapping):
        for inner in entry.values():
            yield from _pages(inner)
    else:
        for inner in entry:
            yield from _pages(inner)


def _line(path: str, page: str) -> str:
    title = re.match(r"# (.*)", page.lstrip())
    assert title is not None, f"{path} has no title"
    note = first_sentence(page.lstrip())
    return f"- [{title[1].replace('`', '')}]({path})" + (f": {note}" if note else "")


def _object(name: str) -> str:
    module, _, last = name.rpartition(".")
    value = getattr(import_module(module), last)
    parts = [f"## {name}", "", *_described(last, value)]
    if inspect.isclass(value):
        for member, inner in vars(value).items():
            if not member.startswith("_") and (inspect.isfunction(inner) or isinstance(inner, property)):
                parts += [f"### {last}.{member}", "", *_described(member, inner)]
    return "\n".join(parts)


def _described(name: str, value: Any) -> list[str]:
    try:
        signature = "" if isinstance(value, property) else str(inspect.signature(value))
    except (TypeError, ValueError):
        signature = ""
    return [f"```python\n{name}{signature}\n```", "", inspect.getdoc(value) or "", ""]
