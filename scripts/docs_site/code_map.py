"""The code map of the documentation: every module with the first sentence of its docstring."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ("shardmill", "etl", "train", "pipeline", "airflow_dags")

_FIRST_SENTENCE = re.compile(r".+?\.(?=\s|$)")

HEAD = """# Code map

Every module with the first sentence of its docstring. `shardmill` imports neither `etl` nor `train`, and these two
never import each other; `pipeline` uses all three. [One image through the code](../tour.md) is the order in which to
read them.
"""


def modules() -> list[Path]:
    """Every module that has content, folder by folder."""
    found = [
        path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if path.read_text(encoding="utf-8")
    ]
    return sorted(found, key=lambda path: (PACKAGES.index(path.relative_to(ROOT).parts[0]), path.parent, path.name))


def first_sentence(module: Path) -> str:
    """How a module's docstring opens. Raises ValueError if that is no sentence."""
    text = ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or ""
    sentence = _FIRST_SENTENCE.match(" ".join(text.partition("\n\n")[0].split()))
    if not sentence:
        raise ValueError(f"{module}: expected a docstring that opens with one sentence on the module's place")
    return sentence[0]


def code_map() -> str:
    """The page, in Markdown."""
    lines = [HEAD]
    folder = None
    for module in modules():
        if module.parent != folder:
            folder = module.parent
            lines += [f"\n## {folder.relative_to(ROOT)}\n", "| module | |", "|---|---|"]
        path = module.relative_to(ROOT)
        sentence = first_sentence(module).replace("|", "\\|")
        lines.append(f"| [`{path.name}`](../../{path}) | {sentence} |")
    return "\n".join(lines) + "\n"
