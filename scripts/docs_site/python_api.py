"""The reference of the Python API: what `import shardmill` offers, from its docstrings by mkdocstrings."""

from __future__ import annotations

from types import ModuleType

import shardmill
from shardmill.calls import findings, model_findings

HEAD = """# Python API

`import shardmill` loads nothing heavy; each name is imported on first use.
[Your training loop](../get-started/your-loop.md) shows the calls in order.

`Folder` in a signature is a path or URI, as `str` or `os.PathLike`. `Place` may also be an open version (`Dataset`,
`Predictions`), which stands for its `URI@N`.
"""
ALSO = (
    "shardmill.loader.dataset.LoadableDataset",
    "shardmill.loader.dataset.Reading",
    "shardmill.loader.loader.Loader",
    "shardmill.loader.batch.LoaderBatch",
    "shardmill.loader.loader.LoaderReport",
    "shardmill.loader.samples.Samples",
    "shardmill.loader.samples.StoredSample",
    "shardmill.epoch_plan.streams_of_rank",
    "shardmill.loader.reader.ReaderOptions",
    "shardmill.calls.result.EpochFigures",
    "shardmill.data_faults.drift.AspectDrift",
    "shardmill.data_faults.mislabels.SuspectLabel",
    "shardmill.data_faults.mislabels.ConfidentMistake",
    "shardmill.data_faults.mislabels.ClassFaults",
    "shardmill.data_faults.quality.SuspectImage",
    "shardmill.data_faults.quality.Telltale",
    "shardmill.data_faults.near_duplicates.SimilarImages",
    "shardmill.dataset.tar_export.TarShard",
)


def python_api() -> str:
    """The page, in Markdown for mkdocstrings."""
    objects = {name: getattr(shardmill, name) for name in shardmill.__all__}
    homes = [f"{value.__module__}.{name}" for name, value in objects.items()]
    results = [home for module in (findings, model_findings) for home in _classes(module)]
    return "\n".join([HEAD, *(f"::: {home}\n" for home in (*homes, *results, *ALSO))])


def _classes(module: ModuleType) -> list[str]:
    own = [value for value in vars(module).values() if getattr(value, "__module__", "") == module.__name__]
    return [f"{module.__name__}.{value.__name__}" for value in own]
