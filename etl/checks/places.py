"""Where a build may put its dataset: a check before the source is listed."""

from __future__ import annotations

from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.stores import open_store


def check_places(source_key: str, source_uri: str, dataset_uri: str) -> None:
    """A dataset inside its own source would be listed by the next run."""
    if split_version(dataset_uri)[1] is not None:
        raise UsageError(
            f"dataset.uri = {dataset_uri} names one version", "expected the dataset: a build creates a version",
            f"set dataset.uri to {split_version(dataset_uri)[0]}",
        )  # fmt: skip
    source, dataset = open_store(source_uri).uri, open_store(dataset_uri).uri
    if f"{dataset}/".startswith(f"{source}/"):
        raise UsageError(
            f"dataset.uri {dataset} is inside {source_key} {source}",
            "expected separate folders, because the next run would list the shards as inputs",
            "set dataset.uri, or --workdir, to a folder outside the source",
        )
