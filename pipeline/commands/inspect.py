"""The command `inspect`: what a dataset version holds."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.datasets import dataset_uri, not_models
from pipeline.output.printing import print_result, print_table
from shardmill.errors import UsageError


@command("run_id")
def inspect(
    context: typer.Context,
    dataset: DatasetArgument,
    everything: Annotated[
        bool, typer.Option("--all", help="List every fact of the manifest, digests included.")
    ] = False,
    files: Annotated[bool, typer.Option("--files", help="List the shards' URIs, for other tools.")] = False,
    rejects: Annotated[
        bool, typer.Option("--rejects", help="List the rejects by reason; also DATASET/rejects/X.")
    ] = False,
    versions: Annotated[
        bool, typer.Option("--versions", help="List all versions, and the operation that created each.")
    ] = False,
    diff: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="List the rows that differ from version M.")
    ] = None,
    near_duplicates: Annotated[
        int | None,
        typer.Option(metavar="BITS", help="List groups of similar images: at most BITS (0-7) of 64 differ."),
    ] = None,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="List images that are dark, blurred, uniform, or of odd size, and copies."),
    ] = False,
) -> None:
    from shardmill.data_quality.findings import inspect_quality
    from shardmill.data_quality.near_duplicates import find_near_duplicates
    from shardmill.data_quality.row_looks import read_looks
    from shardmill.dataset import inspection
    from shardmill.dataset.dataset import open_dataset
    from shardmill.dataset.versions import split_version
    from shardmill.result import flat_rows

    common: Common = context.obj
    if sum((everything, files, rejects, versions, diff is not None, near_duplicates is not None, quality)) > 1:
        options = "--all, --files, --rejects, --versions, --diff, --near-duplicates and --quality"
        raise UsageError(f"{options} exclude each other", "expected one of them")
    uri = dataset_uri(common, dataset)
    if rejects:
        ledger = "" if uri.endswith(".parquet") else inspection.failed_ledger(uri)
        title = f"{uri}: no version, its builds failed; rejected by the last one, {ledger}" if ledger else uri
        return print_result(common, inspection.list_rejections(ledger or uri), title)
    if versions:
        return print_result(common, inspection.list_versions(split_version(uri)[0]), split_version(uri)[0])
    with not_models(uri):
        opened = open_dataset(uri)
    title = f"{opened.pin.uri}@{opened.pin.version}"
    if files:
        return print_result(common, inspection.list_files(opened))
    if diff is not None:
        return print_result(common, inspection.difference(opened, diff), f"{title} against @{diff}")
    if near_duplicates is not None:
        return print_result(common, find_near_duplicates(read_looks(opened), near_duplicates), title)
    if quality:
        return print_result(common, inspect_quality(opened), title)
    facts = inspection.describe(opened)
    rest = flat_rows(facts) if everything else inspection.class_rows(facts)
    return print_table(common, facts, [*inspection.headline_rows(facts), *rest], title)
