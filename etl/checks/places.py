"""Where a build may put its dataset: a check before the source is listed."""

from __future__ import annotations

from shardmill.dataset.versions import split_version
from shardmill.errors import UsageError
from shardmill.stores import open_store


def check_places(source_key: str, source_uri: str, dataset_key: str, dataset_uri: str) -> None:
    """A dataset inside its own source would be listed by the next run. `dataset_key`: the setting or option that names
    it.
    """
    if split_version(dataset_uri)[1] is not None:
        raise UsageError(
            f"{dataset_key} = {dataset_uri} names one version", "expected the dataset: a build creates a version",
            f"set {dataset_key} to {split_version(dataset_uri)[0]}",
        )  # fmt: skip
    # A dataset that no setting names is in the working directory.
    moved = "dataset.uri or --workdir" if dataset_key == "dataset.uri" else dataset_key
    source, dataset = open_store(source_uri).uri, open_store(dataset_uri).uri
    if f"{dataset}/".startswith(f"{source}/"):
        raise UsageError(
            f"{dataset_key} {dataset} is inside {source_key} {source}",
            "expected separate folders, because the next run would list the shards as inputs",
            f"set {moved} to a folder outside the source",
        )
