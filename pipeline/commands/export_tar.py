"""The command `export-tar`: a dataset version as WebDataset shards."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.dataset import dataset_uri
from pipeline.output.printing import print_result
from shardmill.words import counted

if TYPE_CHECKING:
    from shardmill.dataset.tar_export import TarExport, TarShard


@command("run_id")
def export_tar(
    context: typer.Context,
    dataset: DatasetArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="An empty or new folder, or a URI; or that of an unfinished export, which is continued.",
        ),
    ],
    max_bytes: Annotated[
        int, typer.Option(metavar="N", min=1, help="Largest size of a tar file, unless it holds a single image.")
    ] = 500_000_000,
) -> None:
    from shardmill.dataset import tar_export
    from shardmill.dataset.dataset import open_dataset
    from shardmill.stores import open_store

    common: Common = context.obj
    opened = open_dataset(dataset_uri(common, dataset))
    done = tar_export.export_tar(opened, open_store(target), max_bytes, _say, _say_resumed)
    print_result(common, done.document(), _rows(done), title=f"export-tar of {done.dataset}")


def _say(shard: TarShard) -> None:
    sys.stderr.write(f"export-tar: {shard.path}, {counted(shard.num_rows, 'row')}, {shard.size_bytes:,} bytes\n")


def _say_resumed(shards: list[TarShard]) -> None:
    num_rows = sum(shard.num_rows for shard in shards)
    there = f"{counted(len(shards), 'tar file')} with {counted(num_rows, 'row')}"
    sys.stderr.write(f"export-tar: {there} of an earlier run {'is' if len(shards) == 1 else 'are'} there already\n")


def _rows(done: TarExport) -> list[tuple[str, ...]]:
    splits = list(dict.fromkeys(shard.split for shard in done.shards))
    rows: list[tuple[str, ...]] = [("target", done.target)]
    for split in splits:
        mine = [shard for shard in done.shards if shard.split == split]
        size = sum(shard.size_bytes for shard in mine)
        num_rows = sum(shard.num_rows for shard in mine)
        rows.append((split, f"{counted(num_rows, 'row')} in {counted(len(mine), 'tar file')}, {size:,} bytes"))
    return rows
