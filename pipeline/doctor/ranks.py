"""The rows of `shardmill doctor` about a training's ranks: where they would run, what they need, and whether their
model builds.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.doctor.finding import failed
from pipeline.tree import PipelineTree
from shardmill.calls.results import Finding
from shardmill.errors import ShardmillError
from shardmill.jobs.observer import SilentObserver
from shardmill.words import counted
from train.config import TrainConfig

if TYPE_CHECKING:
    from shardmill.formats.rows import RowSchema
    from shardmill.jobs.config import SparkConfig


def rank_findings(train: TrainConfig, spark: SparkConfig) -> Iterator[Finding]:
    """Rows about a planned training; empty for a launcher that cannot be loaded, which another row reports."""
    from train.launching import LAUNCHERS
    from train.strategies import roles_of

    try:
        num_ranks = len(roles_of(train))
        num_ranks_here = LAUNCHERS[train.launcher].ranks_here(num_ranks, spark)
    except ShardmillError:
        return
    yield _slots(train, num_ranks, num_ranks_here)
    yield from _devices(train, num_ranks_here)


def model_findings(tree: PipelineTree, train: TrainConfig | None, schema: RowSchema | None = None) -> Iterator[Finding]:
    """Whether it builds for a dataset with this schema, by default the committed one; takes seconds.

    `train`: as planned; None if it cannot run, which another row tells. None if it could not fail to, or there is no
    dataset.
    """
    from shardmill.dataset.dataset import has_version, open_dataset
    from train.labels import LabelSpec
    from train.planning.trial_build import try_build
    from train.reporting.run_log import RunLog

    subject = "train.model: built"
    try:
        if schema is None and has_version(tree.dataset.uri):
            schema = open_dataset(tree.dataset.uri).manifest.row_schema
        built = try_build(train, schema, RunLog(SilentObserver())) if train and schema is not None else None
    except ShardmillError as error:
        yield failed(subject, error)
        return
    if built is not None and schema is not None:
        for_what = f"for {LabelSpec.of_schema(schema)}, images of {' x '.join(map(str, schema.one_shape_HWC or ()))}"
        yield Finding("ok", subject, f"{for_what}: {built.num_trained:,} weights to train; {built.seconds:.1f} s")


def _slots(train: TrainConfig, num_ranks: int, num_ranks_here: int) -> Finding:
    """Whether each rank that starts here has a core of its own."""
    cores = os.cpu_count() or 1
    if num_ranks_here > cores:
        found = (
            f"{num_ranks_here} ranks (train.num_workers = {train.num_workers}) on {cores} cores, which the ranks will "
            "share"
        )
        return Finding("warn", "slots", found, "fewer workers, or a cluster")
    where = f", {cores} cores here" if num_ranks_here else ""
    return Finding("ok", "slots", f"{counted(num_ranks, 'rank')} by launcher {train.launcher}{where}")


def _devices(train: TrainConfig, num_ranks_here: int) -> Iterator[Finding]:
    """Report the device of each rank that starts here; ranks elsewhere agree on theirs when they start."""
    from train.launching.devices import devices_here

    if num_ranks_here:
        try:
            yield Finding("ok", "devices", "; ".join(map(str, devices_here(train, num_ranks_here))))
        except ShardmillError as error:
            yield failed("devices", error)
