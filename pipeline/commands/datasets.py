"""The commands that make a version of a dataset from its older ones, delete what none needs, or export one."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.output.printing import print_result, print_table
from shardmill.errors import NoDataset, UsageError
from shardmill.words import counted, printable

if TYPE_CHECKING:
    from shardmill.dataset.tar_export import TarShard
    from shardmill.storage import Store


WholeDataset = Annotated[str, typer.Argument(metavar="DATASET", help="Dataset folder or URI, or a TOML file.")]


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
    print_table(common, machine, rows, title="compact")


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
    print_table(common, machine, [(f"{store.uri}@{latest}", said)], title="rollback")


@command()
def gc(
    context: typer.Context,
    dataset: Annotated[
        str, typer.Argument(metavar="DATASET|MODELS|WORKDIR", help="A folder or URI, or a TOML file's dataset.")
    ],
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Keep the newest N versions, trainings and exports, or runs."),
    ] = None,
    older_than: Annotated[
        str, typer.Option(metavar="AGE", help="Keep everything younger than this: 90s, 30m, 12h, 7d.")
    ] = "7d",
    delete: Annotated[
        bool, typer.Option("--delete", help="Delete the files; without this option they are only listed.")
    ] = False,
) -> None:
    from shardmill.calls.results import Garbage, GarbageFile
    from shardmill.dataset.maintenance.gc import Retention, collect_garbage, plan_gc
    from shardmill.jobs.old_runs import collect_runs, is_workdir, plan_runs
    from shardmill.stores import open_store
    from train.garbage import collect_models, is_models_root, plan_models

    common: Common = context.obj
    uri = whole_dataset(dataset_uri(common, dataset))
    store, retention = open_store(uri), Retention(keep, parse_age(older_than))
    if is_models_root(store):
        found = collect_models(store, retention) if delete else plan_models(store, retention, time.time())
        expired: dict[str, Any] = {
            "expired_exports": found.expired_exports,
            "retained_exports": found.retained_exports,
            "expired_trainings": found.expired_trainings,
            "retained_trainings": found.retained_trainings,
        }
    elif is_workdir(store):
        found = collect_runs(store, retention) if delete else plan_runs(store, retention, time.time())
        expired = {"expired_runs": found.expired, "retained_runs": found.retained}
    else:
        # Ages are by this machine's clock.
        found = collect_garbage(store, retention, common.run_id) if delete else plan_gc(store, retention, time.time())
        expired = {"expired_versions": found.expired, "retained_versions": found.retained}
        if delete:
            refresh_dataset_card(store, "gc")  # an expiry is a version
    retained = max((len(each) for name, each in expired.items() if name.startswith("retained")), default=0)
    if keep is not None and retained > keep:
        typer.echo(f"kept more than {keep}: what is younger than {older_than} (--older-than) or in use stays", err=True)
    files = tuple(GarbageFile(each.kind, each.file.path, each.file.size_bytes) for each in found.garbage)
    num_bytes = sum(each.size_bytes for each in files)
    print_result(
        common,
        Garbage(uri=uri, deleted=delete, num_files=len(files), size_bytes=num_bytes, files=files, **expired),
        "gc",
    )


def parse_age(text: str) -> float:
    """`90s`, `30m`, `12h` or `7d` in seconds; 0 needs no unit. Raises UsageError."""
    parsed = re.fullmatch(r"(\d+)([smhd]?)", text)
    if parsed is None or not (parsed[2] or int(parsed[1]) == 0):
        raise UsageError(f"--older-than {text}", "expected a number with a unit: 90s, 30m, 12h or 7d")
    return int(parsed[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[parsed[2]]


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
    print_result(common, done, f"export-tar of {done.dataset}")


def _say(shard: TarShard) -> None:
    sys.stderr.write(f"export-tar: {shard.path}, {counted(shard.num_rows, 'row')}, {shard.size_bytes:,} bytes\n")


def _say_resumed(shards: list[TarShard]) -> None:
    num_rows = sum(shard.num_rows for shard in shards)
    there = f"{counted(len(shards), 'tar file')} with {counted(num_rows, 'row')}"
    sys.stderr.write(f"export-tar: {there} of an earlier run {'is' if len(shards) == 1 else 'are'} there already\n")


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


@contextmanager
def not_models(uri: str) -> Iterator[None]:
    """Raises NoDataset with a hint at `lineage` for a folder of models."""
    try:
        yield
    except NoDataset as error:
        from shardmill.stores import open_store
        from train.garbage import is_models_root

        if not is_models_root(open_store(uri)):
            raise
        shown = f"`shardmill lineage {uri}` shows what they were made of; its `dataset` is what this command takes"
        raise NoDataset(f"{uri} holds models", "expected a folder created by `shardmill etl`", shown) from error


def refresh_dataset_card(store: Store, command: str) -> None:
    """Refresh the card behind a commit; a problem is a line on stderr."""
    from shardmill.dataset.card import refresh_card

    for problem in refresh_card(store):
        sys.stderr.write(f"{command}: WARNING: {printable(problem)}\n")
