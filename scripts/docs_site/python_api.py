"""The reference of the Python API: what `import shardmill` offers, from its docstrings by mkdocstrings."""

from __future__ import annotations

import shardmill

HEAD = """# Python API

`import shardmill` loads nothing heavy; each name is imported on first use.
[Your training loop](../get-started/your-loop.md) shows the calls in order.
"""
ALSO = (
    "shardmill.loader.dataset.LoadableDataset",
    "shardmill.loader.dataset.Reading",
    "shardmill.loader.loader.Loader",
    "shardmill.loader.batch.LoaderBatch",
    "shardmill.loader.report.LoaderReport",
    "shardmill.loader.samples.Samples",
    "shardmill.loader.samples.StoredSample",
    "shardmill.epoch_plan.streams_of_rank",
    "shardmill.loader.reader.ReaderOptions",
)


def python_api() -> str:
    """The page, in Markdown for mkdocstrings."""
    objects = {name: getattr(shardmill, name) for name in shardmill.__all__}
    homes = [f"{value.__module__}.{name}" for name, value in objects.items()]
    return "\n".join([HEAD, *(f"::: {home}\n" for home in (*homes, *ALSO))])
