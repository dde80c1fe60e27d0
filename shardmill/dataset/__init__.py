"""Contract 1, the dataset version: manifest, index, commit, verify. Names load on first use: pyarrow is heavy."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.dataset.dataset import Dataset, StoredSample, open_dataset, open_pinned
    from shardmill.dataset.manifest import Manifest
    from shardmill.dataset.verify import verify_dataset

_HOMES = {
    "Dataset": "dataset",
    "StoredSample": "dataset",
    "open_dataset": "dataset",
    "open_pinned": "dataset",
    "Manifest": "manifest",
    "verify_dataset": "verify",
}

__all__ = ["Dataset", "Manifest", "StoredSample", "open_dataset", "open_pinned", "verify_dataset"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
