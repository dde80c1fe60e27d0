"""The command `compact`: small shards become full ones, in a new version."""

from __future__ import annotations

import typer

from pipeline.cli_options import Common, command
from pipeline.commands.dataset import WholeDataset, dataset_uri, refresh_dataset_card, whole_dataset
from pipeline.output.printing import print_result
from shardmill.words import counted


@command()
def compact(context: typer.Context, dataset: WholeDataset) -> None:
    from shardmill.dataset.dataset import open_dataset
    from shardmill.dataset.maintenance.compact import compact_dataset

    common: Common = context.obj
    opened = open_dataset(whole_dataset(dataset_uri(common, dataset)))
    done = compact_dataset(opened, common.run_id)
    refresh_dataset_card(opened.store, "compact")
    shards = f"{counted(done.num_shards_before, 'shard')} in each format"
    machine = {
        "uri": opened.pin.uri,
        "version": done.manifest.version,
        "is_new": not done.is_unchanged,
        "content_digest": done.manifest.content_digest,
        "num_shards_before": done.num_shards_before,
        "num_shards_after": done.num_shards_after,
        "num_rows_copied": done.num_rows_copied,
    }
    rows = (
        [("unchanged", f"nothing to merge in {shards}; no new version")]
        if done.is_unchanged
        else [
            ("dataset", f"{opened.pin.uri}@{done.manifest.version}"),
            ("shards", f"{shards} before, {done.num_shards_after:,} now"),
            ("rows copied", f"{done.num_rows_copied:,}"),
        ]
    )
    print_result(common, machine, rows, title="compact")
