"""The command `drift`: how far a dataset version is from an older one, and whether that is too far."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, DatasetVersion, command
from pipeline.config import existing_path, load_for_dataset, require
from pipeline.output.printing import print_result
from pipeline.running import checked_record, dataset_of_run, open_run
from shardmill.data_quality.drift import DriftResult, compare
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.versions import at_version
from shardmill.jobs.run_files import StageRecord, dataset_section

if TYPE_CHECKING:
    from pipeline.tree import PipelineTree


@command()
def drift(
    context: typer.Context,
    dataset: DatasetArgument,
    against: Annotated[
        str,
        typer.Option(
            metavar="M|DATASET[@M]",
            help="Compare with version M, or with another dataset; default: etl.drift_baseline, or the version before.",
        ),
    ] = "",
    max_drift: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="End with exit 7 if the drift is larger; default: etl.max_drift."),
    ] = None,
    version: DatasetVersion = 0,
) -> None:
    common: Common = context.obj

    def compared(tree: PipelineTree, uri: str) -> DriftResult:
        limit = tree.etl.max_drift if max_drift is None else max_drift
        return compare(open_dataset(at_version(uri, version)), against, tree.etl.drift_baseline, limit)

    if dataset.endswith(".toml"):
        # With a config file it is a stage of the run, as `verify` is.
        with open_run(dataset, common) as run:
            require(run.tree, "dataset")
            uri = dataset_of_run(run)
            found = run.stage("drift", lambda: compared(run.tree, uri), _drift_record)
    else:
        uri = existing_path(dataset)
        found = compared(load_for_dataset(uri, common.overrides, common.workdir), uri)
    print_result(common, found, found.title)


def _drift_record(found: DriftResult) -> StageRecord:
    opened = open_dataset(f"{found.uri}@{found.version}")
    drift = None if found.drift is None else found.drift.model_dump(mode="json")
    return checked_record("drift", found, {"dataset": dataset_section(opened.pin, opened.manifest), "drift": drift})
