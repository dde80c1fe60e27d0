"""Runs the notebooks of docs/notebooks in one folder; `python -m scripts.run_notebooks` stores what they output."""

from __future__ import annotations

import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

NOTEBOOKS = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
# The second trains on the dataset that the first builds.
IN_ORDER = ("explore", "train")


def read_notebook(name: str) -> NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def run_notebook(notebook: NotebookNode, folder: Path) -> NotebookNode:
    """The notebook with fresh outputs. Raises CellExecutionError for a cell that fails."""
    # Sockets are files, so that no other user of the machine reaches the kernel; their paths must be short.
    with tempfile.TemporaryDirectory(prefix="shardmill-") as sockets:
        client = NotebookClient(
            notebook,
            config=Config(ConnectionFileMixin={"transport": "ipc", "ip": f"{sockets}/kernel"}),
            timeout=500,
            startup_timeout=300,
            # Behind a cell's reply; what comes later is left out without a word.
            iopub_timeout=120,
            resources={"metadata": {"path": folder}},
            # Times of execution would change the file with each run.
            record_timing=False,
            coalesce_streams=True,
        )
        return client.execute()


def main() -> None:
    """Runs all, then rewrites the files: a notebook that fails leaves them unchanged."""
    with tempfile.TemporaryDirectory(prefix="shardmill-") as folder:
        done = {name: run_notebook(read_notebook(name), Path(folder)) for name in IN_ORDER}
    for name, notebook in done.items():
        # It names the version of Python otherwise.
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, NOTEBOOKS / f"{name}.ipynb")


if __name__ == "__main__":
    main()
