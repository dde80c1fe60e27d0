"""The command `verify`: every rule of a dataset version, checked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, DatasetVersion, command
from pipeline.config import existing_path, require
from pipeline.output.printing import print_result
from pipeline.running import dataset_of_run, open_run, verify_record
from shardmill.dataset.versions import at_version

if TYPE_CHECKING:
    from shardmill.dataset.verify import VerifyReport


@command()
def verify(
    context: typer.Context,
    dataset: DatasetArgument,
    deep: Annotated[bool, typer.Option("--deep", help="Re-read every byte of every shard.")] = False,
    version: DatasetVersion = 0,
) -> None:
    common: Common = context.obj
    report = _verified(dataset, common, version, deep=deep)
    print_result(common, report, f"{report.uri}@{report.version}")


def _verified(dataset_or_config: str, common: Common, version: int, *, deep: bool) -> VerifyReport:
    """With a config file, the check is a stage of the run; a bare dataset leaves no run record."""
    from shardmill.dataset.dataset import open_dataset
    from shardmill.dataset.verify import verify_dataset

    if not dataset_or_config.endswith(".toml"):
        return verify_dataset(open_dataset(at_version(existing_path(dataset_or_config), version)), deep=deep)
    with open_run(dataset_or_config, common) as run:
        require(run.tree, "dataset")
        # Not what an earlier attempt of this stage has checked: a later version may be there by now.
        uri = at_version(dataset_of_run(run, ("etl",)), version)
        return run.stage(
            "verify",
            lambda: verify_dataset(open_dataset(uri), deep=deep, on_shard=run.progress.shard_verified),
            verify_record,
        )
