"""The command `rollback`: an older version becomes the latest again."""

from __future__ import annotations

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.dataset import dataset_uri, refresh_dataset_card
from pipeline.output.printing import print_result
from shardmill.errors import UsageError


@command()
def rollback(context: typer.Context, dataset: DatasetArgument) -> None:
    from shardmill.dataset.maintenance.rollback import roll_back
    from shardmill.dataset.versions import split_version
    from shardmill.stores import open_store

    common: Common = context.obj
    root, version = split_version(dataset_uri(common, dataset))
    if version is None:
        raise UsageError(
            f"{dataset} names no version", "expected DATASET@N", f"`shardmill inspect {dataset} --versions` lists them"
        )
    store = open_store(root)
    done = roll_back(store, version, common.run_id)
    refresh_dataset_card(store, "rollback")
    latest = done.manifest.version
    machine = {"uri": store.uri, "version": latest, "restored_version": version, "is_new": done.is_new}
    said = f"has the content of @{version}" if done.is_new else f"already has the content of @{version}; no new version"
    print_result(common, machine, [(f"{store.uri}@{latest}", said)], title="rollback")
