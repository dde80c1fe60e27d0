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
    from train.planning.setup import Setup


def rank_findings(setup: Setup) -> Iterator[Finding]:
    """Rows about its ranks; empty for a launcher that cannot be loaded, which another row reports."""
    from train.launching.devices import devices_here

    try:
        num_ranks, num_ranks_here = len(setup.roles), setup.num_ranks_here
    except ShardmillError:
        return
    yield _slots(setup.config, num_ranks, num_ranks_here)
    # Ranks elsewhere agree on their devices when they start.
    if num_ranks_here:
        try:
            yield Finding("ok", "devices", "; ".join(map(str, devices_here(setup.config, num_ranks_here))))
        except ShardmillError as error:
            yield failed("devices", error)


def model_findings(tree: PipelineTree, setup: Setup | None, schema: RowSchema | None = None) -> Iterator[Finding]:
    """Whether it builds for a dataset with this schema, by default the committed one; takes seconds.

    `setup`: None if it cannot run, which another row tells. None if it could not fail to, or there is no
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
        built = try_build(setup, schema, RunLog(SilentObserver())) if setup and schema is not None else None
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
