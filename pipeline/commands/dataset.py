"""What commands on a dataset share: the argument, and the dataset card that they rewrite after a commit."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common
from shardmill.errors import UsageError
from shardmill.words import printable

if TYPE_CHECKING:
    from shardmill.storage import Store

WholeDataset = Annotated[str, typer.Argument(metavar="DATASET", help="Dataset folder or URI, or a TOML file.")]


def whole_dataset(uri: str) -> str:
    """`uri` itself. Raises UsageError if it names one version: these commands follow the latest one."""
    from shardmill.dataset.versions import split_version

    root, version = split_version(uri)
    if version is not None:
        raise UsageError(
            f"{uri} names one version",
            "expected the dataset: the command creates a version after the latest",
            f"give {root}; to go back to an older version, `shardmill rollback {uri}`",
        )
    return root


def dataset_uri(common: Common, dataset: str) -> str:
    from pipeline.config import existing_path, load_pipeline, require

    if not dataset.endswith(".toml"):
        return existing_path(dataset)
    tree = load_pipeline(dataset, common.overrides, common.workdir)
    require(tree, "dataset")
    return tree.dataset.uri


def refresh_dataset_card(store: Store, command: str) -> None:
    """Refresh the card behind a commit; a problem is a line on stderr."""
    from shardmill.dataset.card import refresh_card

    for problem in refresh_card(store):
        sys.stderr.write(f"{command}: WARNING: {printable(problem)}\n")
