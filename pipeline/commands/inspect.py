"""The command `inspect`: what a dataset version holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.commands.dataset import dataset_uri
from pipeline.output.printing import flat_rows, print_result
from shardmill.errors import UsageError

if TYPE_CHECKING:
    from pipeline.output.printing import Rows
    from shardmill.dataset.dataset import Dataset


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
    from pipeline.output import inspection
    from shardmill.dataset.dataset import open_dataset
    from shardmill.dataset.versions import split_version

    common: Common = context.obj
    if sum((everything, files, rejects, versions, diff is not None, near_duplicates is not None, quality)) > 1:
        options = "--all, --files, --rejects, --versions, --diff, --near-duplicates and --quality"
        raise UsageError(f"{options} exclude each other", "expected one of them")
    uri = dataset_uri(common, dataset)
    if rejects:
        found = inspection.list_rejections(uri)
        return print_result(common, found, inspection.rejection_rows(found), title=uri)
    if versions:
        found = inspection.list_versions(split_version(uri)[0])
        return print_result(common, found, inspection.version_rows(found), title=split_version(uri)[0])
    opened = open_dataset(uri)
    found, rows = _described(opened, files, diff, near_duplicates, quality=quality, everything=everything)
    title = f"{opened.pin.uri}@{opened.pin.version}" + ("" if diff is None else f" against @{diff}")
    print_result(common, found, rows, title="" if files else title)


def _described(
    dataset: Dataset, files: bool, diff: int | None, near_duplicates: int | None, *, quality: bool, everything: bool
) -> tuple[Any, Rows]:
    """What was asked of a version: the document of --json, and the rows for people."""
    from pipeline.output import inspection

    if diff is not None:
        found = inspection.describe_difference(dataset, diff)
        return found, inspection.difference_rows(found)
    if near_duplicates is not None or quality:
        return _faults(dataset, near_duplicates)
    if files:
        found = inspection.list_files(dataset)
        return found, [(each["uri"],) for each in found]
    found = inspection.describe(dataset)
    rest = flat_rows(found) if everything else inspection.class_rows(found)
    return found, [*inspection.headline_rows(found), *rest]


def _faults(dataset: Dataset, near_duplicates: int | None) -> tuple[Any, Rows]:
    """The groups of images that look alike if a number of bits is given, else all that `--quality` shows."""
    from pipeline.output import data_faults as output
    from shardmill.data_faults.near_duplicates import find_equal_bytes, find_near_duplicates
    from shardmill.data_faults.quality import find_faults
    from shardmill.data_faults.row_looks import read_looks

    looks = read_looks(dataset)
    if near_duplicates is not None:
        found = output.near_duplicates_document(find_near_duplicates(looks, near_duplicates))
        return found, output.near_duplicate_rows(found)
    copies = find_near_duplicates(looks, output.QUALITY_BITS)
    equal = find_equal_bytes(dataset)
    found = output.quality_document(find_faults(looks), dataset.manifest.counts, equal, copies)
    return found, output.quality_rows(found)
