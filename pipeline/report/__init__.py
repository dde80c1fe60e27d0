"""The last stage: one self-contained `report.html` from what a run left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def write_report(workdir: str | Path, run_id: str, summary: dict[str, Any]) -> str:
    """Write `<workdir>/runs/<run_id>/report.html` and return its URI."""
    from pipeline.report.data import gather
    from pipeline.report.page import render
    from shardmill.jobs.run_files import run_folder
    from shardmill.storage import join_uri
    from shardmill.stores import open_store

    path = f"{run_folder(run_id)}/report.html"
    store = open_store(workdir)
    store.put(path, render(gather(workdir, run_id, summary)).encode("utf-8"))
    return join_uri(store.uri, path)
