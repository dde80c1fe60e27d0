"""Writes the table of extension points into docs/extending.md, from what the registries declare.

python -m scripts.docs_site.extension_points --update
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Any

from pipeline.choices import registries
from pipeline.tree import PipelineTree
from scripts.docs_site.code_map import ROOT
from scripts.docs_site.markdown import table
from shardmill.registry import Registry

PAGE = ROOT / "docs" / "extending.md"
_BEGIN, _END = "<!-- generated: python -m scripts.docs_site.extension_points --update -->\n", "<!-- end -->"
# A test module that runs over every entry of a registry; tests/test_extending.py checks that it names the registry.
SHARED_TESTS = {
    "source.kind": ("etl/test_sources",),
    "etl.engine": ("etl/test_engines",),
    "etl.encoding": ("shardmill/images/test_normalize",),
    "etl.formats": ("shardmill/test_formats", "shardmill/test_reader"),
    "train.model": ("train/test_models",),
    "train.backend": ("train/test_backends",),
    "train.strategy": ("train/test_strategies", "train/test_multi_rank"),
    "train.optimizer": ("train/test_optimizer",),
    "train.schedule": ("train/test_optimizer",),
    "train.launcher": ("train/test_launchers",),
    "train.reader": ("train/test_backends",),
    "train.log.trackers": ("train/test_trackers",),
    "storage scheme": ("shardmill/test_storage",),
}


def points() -> list[Registry[Any]]:
    """The registries that a config chooses from."""
    return registries(PipelineTree)


def extension_points() -> str:
    """The table, in Markdown, with links as they are from docs/."""
    head = ["extension point", "one file defines", "its `Entry` goes into", "shared tests", "`package.module:object`"]
    return "\n".join(table(head, [_row(registry) for registry in points()]))


def registry_file(registry: Registry[Any]) -> str:
    """The file with the registry's entries, relative to the repository."""
    declares = re.compile(rf'^\w+: Registry\[.*\] = Registry\(\n    "{re.escape(registry.key)}"', re.MULTILINE)
    files = (path for package in ("shardmill", "etl", "train") for path in sorted((ROOT / package).rglob("*.py")))
    return next(str(path.relative_to(ROOT)) for path in files if declares.search(path.read_text(encoding="utf-8")))


def with_table(page: str) -> str:
    """The page with the present table. Raises ValueError if it lacks the two lines that enclose it."""
    before, _, rest = page.partition(_BEGIN)
    _, end, behind = rest.partition(_END)
    if not end:
        raise ValueError(f"docs/extending.md lacks {_BEGIN.strip()} or {_END}")
    return f"{before}{_BEGIN}\n{extension_points()}\n{end}{behind}"


def _row(registry: Registry[Any]) -> list[str]:
    tests = ", ".join(_link(f"tests/{name}.py") for name in SHARED_TESTS[registry.key])
    takes_own = "yes" if registry.takes_own else "no"
    assert registry.point is not None, registry.key
    what = f"`{registry.key}`: {registry.point.help}"
    return [what, _contract(registry.point.defines), _link(registry_file(registry)), tests, takes_own]


def _contract(target: str) -> str:
    """`module:object` as a word and a link; nothing is imported."""
    module, _, name = target.partition(":")
    path = next(path for path in _files_of(module) if (ROOT / path).is_file())
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    found = next(node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == name)
    article = "an" if name[0] in "AEIOU" else "a"
    return f"{article} `{name}`, {_link(path)}" if isinstance(found, ast.ClassDef) else (
        f"a function like `{name}`, {_link(path)}"
    )  # fmt: skip


def _files_of(module: str) -> tuple[str, str]:
    path = module.replace(".", "/")
    return f"{path}.py", f"{path}/__init__.py"


def _link(path: str) -> str:
    return f"[`{path}`](../{path})"


def main(arguments: list[str], page: Path = PAGE) -> int:
    """`--update` writes the page; without it, exit 1 if the page does not have the present table."""
    now = page.read_text(encoding="utf-8")
    should = with_table(now)
    if "--update" in arguments:
        page.write_text(should, encoding="utf-8")
    elif now != should:
        sys.stderr.write("docs/extending.md: old table; run python -m scripts.docs_site.extension_points --update\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
