"""The command `gc`: old versions, trainings and exports, and files that nothing names."""

from __future__ import annotations

import re
import time
from typing import Annotated

import typer

from pipeline.cli_options import Common, command
from pipeline.commands.dataset import dataset_uri, refresh_dataset_card, whole_dataset
from pipeline.output.printing import print_result
from shardmill.errors import UsageError


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
        bool, typer.Option("--delete", help="Delete the files; without this option they are only listed.")
    ] = False,
) -> None:
    from pipeline.output.garbage import gc_document, gc_rows, models_document, models_rows
    from shardmill.dataset.maintenance.gc import Retention, collect_garbage, plan_gc
    from shardmill.stores import open_store
    from train.garbage import collect_models, is_models_root, plan_models

    common: Common = context.obj
    uri = whole_dataset(dataset_uri(common, dataset))
    store, retention = open_store(uri), Retention(keep, parse_age(older_than))
    if is_models_root(store):
        found = collect_models(store, retention) if delete else plan_models(store, retention, time.time())
        rows = models_rows(found, deleted=delete)
        return print_result(common, models_document(uri, found, deleted=delete), rows, title="gc")
    # Ages are by this machine's clock.
    report = collect_garbage(store, retention, common.run_id) if delete else plan_gc(store, retention, time.time())
    if delete:
        refresh_dataset_card(store, "gc")  # an expiry is a version
    print_result(common, gc_document(uri, report, deleted=delete), gc_rows(report, deleted=delete), title="gc")


def parse_age(text: str) -> float:
    """`90s`, `30m`, `12h` or `7d` in seconds; 0 needs no unit. Raises UsageError."""
    parsed = re.fullmatch(r"(\d+)([smhd]?)", text)
    if parsed is None or not (parsed[2] or int(parsed[1]) == 0):
        raise UsageError(f"--older-than {text}", "expected a number with a unit: 90s, 30m, 12h or 7d")
    return int(parsed[1]) * {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[parsed[2]]
