"""The rows of `shardmill doctor` about a dataset against the ranks that would train on it: rows, steps and memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pipeline.doctor.finding import found_by
from pipeline.tree import PipelineTree
from shardmill.calls.results import Finding, Status
from shardmill.errors import ShardmillError, UsageError

if TYPE_CHECKING:
    from etl.plan import BuildPlan
    from train.planning.setup import Setup

SPLIT = "train split"


def dataset_findings(tree: PipelineTree) -> Iterator[Finding]:
    """Rows about the committed version, if there is one: why a training on it would be refused, or its shares per rank.

    In a config with a source it is only a warning: a run builds another version first.
    """
    from shardmill.dataset.dataset import has_version, open_dataset
    from train.planning.checks import WINDOW, problems, window_memory
    from train.planning.setup import resolve

    status: Status = "warn" if any(tree.source.uris().values()) else "fail"
    subject = SPLIT
    try:
        if not has_version(tree.dataset.uri):
            return
        dataset = open_dataset(tree.dataset.uri)
        setup = resolve(tree.train, tree.spark, dataset, tree.gate)
        row, problem = next(problems(setup), ("", None))
        if problem is not None and row != WINDOW:
            raise problem
        of_version = f"{dataset.pin.uri}@{dataset.pin.version}"
        yield Finding("ok", subject, f"{of_version}: {_shares(setup)}")
        subject = WINDOW
        if problem is not None:
            raise problem
        memory = window_memory(setup)
    except ShardmillError as error:
        found = f"the committed dataset: {found_by(error)}"
        yield Finding(status, subject, found, error.fix, is_transient=error.is_worth_retrying)
        return
    found = f"{memory.bytes_per_rank:,} of {memory.budget_bytes:,} bytes on each rank for {of_version}"
    yield Finding("ok", subject, found)


def listing_findings(tree: PipelineTree, setup: Setup | None, plan: BuildPlan) -> Iterator[Finding]:
    """Rows about the version that a build of this listing would create: shares of a split by content hash are
    estimates.

    None of an append, whose version has older rows, too, and of a training that cannot run (`setup` is None).
    """
    from etl.checks.listing import images_by_split
    from train.planning.checks import row_shares
    from train.readers import reader_of

    if setup is None or plan.is_append or not reader_of(setup.config).follows_plan:
        return
    subject, num_rows = f"source: {SPLIT}", images_by_split(plan)["train"]
    is_named = plan.listing.has_splits and not plan.listing.has_unnamed_splits
    is_exact = is_named or tree.etl.split_fractions.train in (0, 1)
    about = "" if is_exact else "about "
    status: Status = "fail"
    try:
        row_shares(setup, num_rows if is_exact else plan.num_images)
        # All images together are enough.
        status = "warn"
        yield Finding("ok", subject, f"{about}{row_shares(setup, num_rows)}")
    except UsageError as error:
        yield Finding(status, subject, f"{about}{found_by(error)}", error.fix)


def _shares(setup: Setup) -> str:
    from train.planning.checks import row_shares
    from train.readers import reader_of

    num_rows, reader = setup.of_dataset.manifest.splits["train"].num_rows, reader_of(setup.config)
    if reader.follows_plan:
        return str(row_shares(setup, num_rows))
    return reader.limits(setup.config, setup.of_dataset) or f"{num_rows:,} rows"
