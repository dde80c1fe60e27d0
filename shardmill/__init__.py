"""shardmill: images to committed, checksummed training shards, and exact, resumable epochs over them.

The map of the repository, in the order in which an image travels:

- `etl/` lists images and writes shards with Spark; `shardmill.images` decodes and normalizes, `shardmill.formats`
  stores, `shardmill.dataset` commits and verifies (contract 1).
- `shardmill.epoch_plan` decides which rows make step k (contract 2); `shardmill.loader` turns them into batches.
- `train/` launches ranks, trains, evaluates, exports and promotes.
- `pipeline/` runs all stages and owns the command line; `airflow_dags/` schedules it.

This library imports none of the applications, and importing it loads nothing heavy: `shardmill.run` starts them in a
process of their own.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.augment.options import AugmentOptions
    from shardmill.calls.commands import (
        check_source,
        compact,
        doctor,
        drift,
        etl,
        evaluate,
        export,
        export_tar,
        gate,
        gc,
        inspect,
        lineage,
        mislabels,
        plan,
        predict,
        promote,
        report,
        rollback,
        run,
        train,
    )  # fmt: skip
    from shardmill.calls.predictions import Predictions
    from shardmill.calls.results import PromotionResult
    from shardmill.calls.run_result import RunResult
    from shardmill.dataset.dataset import Dataset
    from shardmill.dataset.verify import verify_dataset
    from shardmill.errors import ShardmillError
    from shardmill.images.process import process_image
    from shardmill.loader.dataset import open_dataset
    from shardmill.values import Batch, Cursor
    from shardmill.version import __version__ as __version__

_HOMES = {
    "AugmentOptions": "augment.options",
    "Batch": "values",
    "Cursor": "values",
    "Dataset": "dataset.dataset",
    "Predictions": "calls.predictions",
    "PromotionResult": "calls.results",
    "RunResult": "calls.run_result",
    "ShardmillError": "errors",
    "__version__": "version",
    "check_source": "calls.commands",
    "compact": "calls.commands",
    "doctor": "calls.commands",
    "drift": "calls.commands",
    "etl": "calls.commands",
    "evaluate": "calls.commands",
    "export": "calls.commands",
    "export_tar": "calls.commands",
    "gate": "calls.commands",
    "gc": "calls.commands",
    "inspect": "calls.commands",
    "lineage": "calls.commands",
    "mislabels": "calls.commands",
    "open_dataset": "loader.dataset",
    "plan": "calls.commands",
    "predict": "calls.commands",
    "process_image": "images.process",
    "promote": "calls.commands",
    "report": "calls.commands",
    "rollback": "calls.commands",
    "run": "calls.commands",
    "train": "calls.commands",
    "verify_dataset": "dataset.verify",
}

__all__ = [
    "AugmentOptions",
    "Batch",
    "Cursor",
    "Dataset",
    "Predictions",
    "PromotionResult",
    "RunResult",
    "ShardmillError",
    "check_source",
    "compact",
    "doctor",
    "drift",
    "etl",
    "evaluate",
    "export",
    "export_tar",
    "gate",
    "gc",
    "inspect",
    "lineage",
    "mislabels",
    "open_dataset",
    "plan",
    "predict",
    "process_image",
    "promote",
    "report",
    "rollback",
    "run",
    "train",
    "verify_dataset",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    """What is imported only once it is used is there, too."""
    return sorted({*globals(), *__all__})
