"""The command `drift`: how far a dataset version is from an older one, and whether that is too far."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli_options import Common, DatasetArgument, command
from pipeline.config import existing_path, load_for_dataset, require
from pipeline.output.drift import DriftComparison
from pipeline.output.printing import print_result
from pipeline.running import dataset_of_run, open_run
from pipeline.tree import PipelineTree
from shardmill.data_faults.drift import baseline_of, measure_drift
from shardmill.dataset.dataset import open_dataset
from shardmill.dataset.versions import latest_version, read_manifest, split_version
from shardmill.errors import DriftLimitExceeded, UsageError
from shardmill.jobs.process import report_error
from shardmill.stores import open_store


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
    version: Annotated[
        int,
        typer.Option("--dataset-version", min=0, help="Compare this version of the dataset; 0: that of DATASET[@N]."),
    ] = 0,
) -> None:
    common: Common = context.obj

    def compared(tree: PipelineTree, uri: str) -> DriftComparison:
        named = f"{split_version(uri)[0]}@{version}" if version else uri
        return _compare(named, against, tree.etl.drift_baseline, tree.etl.max_drift if max_drift is None else max_drift)

    if dataset.endswith(".toml"):
        # With a config file it is a stage of the run, as `verify` is.
        with open_run(dataset, common) as run:
            require(run.tree, "dataset")
            uri = dataset_of_run(run)
            found = run.stage("drift", lambda: compared(run.tree, uri), DriftComparison.record)
    else:
        uri = existing_path(dataset)
        found = compared(load_for_dataset(uri, common.overrides, common.workdir), uri)
    print_result(common, found.document(), found.rows(), title=found.title)
    try:
        found.raise_if_above()
    except DriftLimitExceeded as error:
        # The table, or the document with --json, has been printed; an error's own document would be a second one.
        raise typer.Exit(report_error(error, debug=common.debug)) from None


def _compare(uri: str, against: str, baseline: int, limit: float) -> DriftComparison:
    """`against`: a version of the same dataset, `DATASET[@M]`, or empty for the baseline."""
    dataset = open_dataset(uri)
    if against:
        root, version = split_version(f"{dataset.pin.uri}@{against}" if against.isdecimal() else against)
        # Its manifest is enough, so it may have expired.
        store = open_store(root)
        before = read_manifest(store, (latest_version(store) or 1) if version is None else version)
    else:
        store, before = dataset.store, baseline_of(dataset.store, dataset.manifest, baseline)
    for uri, manifest in ((dataset.pin.uri, dataset.manifest), (store.uri, before)):
        if manifest is not None and manifest.predicted_by is not None:
            raise UsageError(
                f"{uri}@{manifest.version} holds predictions",
                "expected versions of images: predictions have neither pixels nor labels to compare",
                "compare the datasets that were predicted",
            )
    drift = None if before is None else measure_drift(before, dataset.manifest)
    return DriftComparison(dataset, store.uri, drift, limit)
