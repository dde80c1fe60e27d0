"""The commands that look at a dataset's versions, and those that make one of another: no image is decoded in any."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.printing import flat_rows, print_result
from shardmill.errors import UsageError
from shardmill.words import counted

WholeDataset = Annotated[str, typer.Argument(metavar="DATASET", help="Dataset folder or URI, or a TOML file.")]


@command("run_id")
def inspect(
    context: typer.Context,
    dataset: DatasetArgument,
    files: Annotated[bool, typer.Option("--files", help="List the shards' URIs, for other tools.")] = False,
    rejects: Annotated[
        bool, typer.Option("--rejects", help="List the rejects by reason; also DATASET/rejects/X.")
    ] = False,
    versions: Annotated[bool, typer.Option("--versions", help="List all versions, and what made each.")] = False,
    diff: Annotated[
        int | None, typer.Option(metavar="M", min=1, help="The rows that differ from those of version M.")
    ] = None,
    near_duplicates: Annotated[
        int | None,
        typer.Option(metavar="BITS", help="Groups of similar images: at most 0-7 of 64 bits differ."),
    ] = None,
) -> None:
    from pipeline import inspection
    from shardmill.dataset.open import open_dataset
    from shardmill.dataset.versions import split_version

    common: Common = context.obj
    if sum((files, rejects, versions, diff is not None, near_duplicates is not None)) > 1:
        options = "--files, --rejects, --versions, --diff and --near-duplicates"
        raise UsageError(f"{options} exclude each other", "expected one of them")
    uri = _dataset_uri(common, dataset)
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


@command()
def compact(context: typer.Context, dataset: WholeDataset) -> None:
    from shardmill.dataset.maintenance.compact import compact_dataset
    from shardmill.dataset.open import open_dataset

    common: Common = context.obj
    opened = open_dataset(_whole_dataset(_dataset_uri(common, dataset)))
    done = compact_dataset(opened, common.run_id)
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


@command()
def rollback(context: typer.Context, dataset: DatasetArgument) -> None:
    from shardmill.dataset.maintenance.rollback import roll_back
    from shardmill.dataset.versions import split_version
    from shardmill.stores import open_store

    common: Common = context.obj
    root, version = split_version(_dataset_uri(common, dataset))
    if version is None:
        raise UsageError(
            f"{dataset} names no version", "expected DATASET@N", f"`shardmill inspect {dataset} --versions` lists them"
        )
    store = open_store(root)
    done = roll_back(store, version, common.run_id)
    latest = done.manifest.version
    machine = {"uri": store.uri, "version": latest, "restored_version": version, "is_new": done.is_new}
    said = f"holds what @{version} holds" if done.is_new else f"held what @{version} holds already; no new version"
    print_result(common, machine, [(f"{store.uri}@{latest}", said)], title="rollback")


@command()
def gc(
    context: typer.Context,
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET|MODELS", help="A folder or URI, or a TOML file's dataset.")
    ],
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the newest N versions, trainings and exports."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Keep everything younger than this: 90s, 30m, 12h, 7d.")
    ] = "7d",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete; without this option files are only listed.")
    ] = False,
) -> None:
    from pipeline.garbage import gc_document, gc_rows, models_document, models_rows
    from shardmill.dataset.maintenance.gc import collect_garbage, plan_gc
    from shardmill.dataset.maintenance.retention import Retention
    from shardmill.stores import open_store
    from train.garbage import collect_models, is_models_root, plan_models

    common: Common = context.obj
    uri = _whole_dataset(_dataset_uri(common, dataset))
    store, retention = open_store(uri), Retention(keep, parse_age(older_than))
    if is_models_root(store):
        found = collect_models(store, retention) if delete else plan_models(store, retention, time.time())
        rows = models_rows(found, deleted=delete)
        return print_result(common, models_document(uri, found, deleted=delete), rows, title="gc")
    # Ages are by this machine's clock.
    report = collect_garbage(store, retention, common.run_id) if delete else plan_gc(store, retention, time.time())
    print_result(common, gc_document(uri, report, deleted=delete), gc_rows(report, deleted=delete), title="gc")


def parse_age(text: str) -> float:
    """`90s`, `30m`, `12h` or `7d` in seconds; 0 needs no unit. Raises UsageError."""
    parsed = re.fullmatch(r"(\d+)([smhd]?)", text)
    if parsed is None or not (parsed[2] or int(parsed[1]) == 0):
        raise UsageError(f"--older-than {text}", "expected a number with a unit: 90s, 30m, 12h or 7d")
    return int(parsed[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[parsed[2]]


def _whole_dataset(uri: str) -> str:
    """`uri` itself. Raises UsageError if it names one version: these commands follow the latest one."""
    from shardmill.dataset.versions import split_version

    root, version = split_version(uri)
    if version is not None:
        raise UsageError(
            f"{uri} names one version",
            "expected the dataset: the command makes a version that follows the latest",
            f"give {root}; to go back to an older version, `shardmill rollback {uri}`",
        )
    return root


def _dataset_uri(common: Common, dataset: str) -> str:
    from pipeline.config import existing_path, load_pipeline, require

    if not dataset.endswith(".toml"):
        return existing_path(dataset)
    tree = load_pipeline(dataset, common.overrides, common.workdir)
    require(tree, "dataset")
    return tree.dataset.uri
