"""The notebooks of docs/notebooks as pages: cells and stored outputs in Markdown, so that links are checked too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from scripts.docs_site.code_map import ROOT

FOLDER = "notebooks"


def page_of(notebook: str) -> str:
    """Where a notebook's page stands: beside it."""
    return f"{notebook.removesuffix('.ipynb')}.md"


def notebook_pages() -> dict[str, Callable[[], str]]:
    """Every notebook's page by its path below docs/."""
    found = sorted((ROOT / "docs" / FOLDER).glob("*.ipynb"))
    return {f"{FOLDER}/{page_of(path.name)}": lambda path=path: notebook_page(path.name) for path in found}


def notebook_page(name: str) -> str:
    """The page, in Markdown: the title, a link to the file, and all other cells."""
    notebook = json.loads((ROOT / "docs" / FOLDER / name).read_text(encoding="utf-8"))
    title, *cells = (block for cell in notebook["cells"] for block in _blocks(cell))
    # Of Markdown it would be a link to this page. A page is a folder of the site, and the file lies beside that.
    download = f'<a href="../{name}" download>{name}</a>'
    head, _, rest = title.partition("\n")
    return "\n\n".join([head, f"This page is a notebook: {download}.", rest.strip(), *cells]) + "\n"


def _blocks(cell: dict[str, Any]) -> Iterator[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        yield source
        return
    yield f"```python\n{source}\n```"
    for output in cell["outputs"]:
        yield _shown(output)


def _shown(output: dict[str, Any]) -> str:
    """A figure, or else text. Raises ValueError for an error: a notebook with one is not shown."""
    if output["output_type"] == "error":
        raise ValueError(f"a cell ended with {output['ename']}: {output['evalue']}")
    data = output.get("data", {})
    if "image/png" in data:
        return f"![Figure of the cell above](data:image/png;base64,{data['image/png'].strip()})"
    text = "".join(output["text"] if output["output_type"] == "stream" else data["text/plain"])
    return f"```text\n{text.rstrip()}\n```"
