"""The reference of the Python API: what `import shardmill` offers, from its docstrings by mkdocstrings."""

from __future__ import annotations

from typing import Any

import shardmill
from shardmill.calls import commands
from shardmill.result import Result

HEAD = """# Python API

`import shardmill` loads nothing heavy; each name is imported on first use.
[Your training loop](../get-started/your-loop.md) shows the calls in order.

`Folder` in a signature is a path or URI, as `str` or `os.PathLike`. `Location` may also be an open version (`Dataset`,
`Predictions`), which stands for its `URI@N`.
"""
FIRST = (
    "shardmill.loader.dataset.open_dataset",
    "shardmill.calls.commands.run",
    "shardmill.loader.dataset.LoadableDataset",
    "shardmill.loader.dataset.Reading",
    "shardmill.loader.loader.Loader",
    "shardmill.loader.batch.LoaderBatch",
    "shardmill.calls.run_result.RunResult",
)
"""What most programs call, and what that returns."""
ALSO = (
    "shardmill.loader.loader.LoaderReport",
    "shardmill.loader.samples.Samples",
    "shardmill.loader.samples.StoredSample",
    "shardmill.epoch_plan.streams_of_rank",
    "shardmill.loader.reader.ReaderOptions",
    "shardmill.calls.run_result.EpochMetrics",
    "shardmill.data_quality.drift.AspectDrift",
    "shardmill.data_quality.mislabels.SuspectLabel",
    "shardmill.data_quality.mislabels.ConfidentMistake",
    "shardmill.data_quality.mislabels.ClassFaults",
    "shardmill.data_quality.quality.SuspectImage",
    "shardmill.data_quality.quality.Telltale",
    "shardmill.data_quality.near_duplicates.SimilarImages",
    "shardmill.dataset.tar_export.TarShard",
)


def python_api() -> str:
    """The page, in Markdown for mkdocstrings."""
    homes = [_home(getattr(shardmill, name)) for name in shardmill.__all__]
    results = [_home(each) for each in vars(commands).values() if isinstance(each, type) and issubclass(each, Result)]
    others = [each for each in (*results, *ALSO) if each not in homes]
    shown = dict.fromkeys((*FIRST, *homes, *others))
    return "\n".join([HEAD, *(f"::: {home}\n" for home in shown if home != _home(Result))])


def _home(value: Any) -> str:
    return f"{value.__module__}.{value.__name__}"
