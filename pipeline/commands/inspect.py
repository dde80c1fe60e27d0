"""The command `inspect`: what a dataset version holds."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.dataset import dataset_uri
from pipeline.output.printing import flat_rows, print_result
from shardmill.errors import UsageError


@command("run_id")
def inspect(
    context: typer.Context,
    dataset: DatasetArgument,
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
) -> None:
    from pipeline.output import inspection
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.versions import split_version

    common: Common = context.obj
    if sum((files, rejects, versions, diff is not None, near_duplicates is not None)) > 1:
        options = "--files, --rejects, --versions, --diff and --near-duplicates"
        raise UsageError(f"{options} exclude each other", "expected one of them")
    uri = dataset_uri(common, dataset)
    if rejects:
        found = inspection.list_rejections(uri)
        return print_result(common, found, inspection.rejection_rows(found), title=uri)
    if versions:
        found = inspection.list_versions(split_version(uri)[0])
        return print_result(common, found, inspection.version_rows(found), title=split_version(uri)[0])
    opened = open_dataset(uri)
    title = f"{opened.pin.uri}@{opened.pin.version}"
    if diff is not None:
        found = inspection.describe_difference(opened, diff)
        return print_result(common, found, inspection.difference_rows(found), title=f"{title} against @{diff}")
    if near_duplicates is not None:
        found = inspection.list_near_duplicates(opened, near_duplicates)
        return print_result(common, found, inspection.near_duplicate_rows(found), title=title)
    if files:
        found = inspection.list_files(opened)
        return print_result(common, found, [(each["uri"],) for each in found], title="")
    facts = inspection.describe(opened)
    print_result(common, facts, [*inspection.headline_rows(facts), *flat_rows(facts)], title=title)
