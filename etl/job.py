"""Build a dataset version: list the source, plan work units, run them, commit. Also `spark-submit etl/job.py`.

spark-submit etl/job.py --config FILE [--set SECTION.NAME=VALUE]... [--workdir DIR --run-id ID] [--replace-source]
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # spark-submit puts this file's folder first, where `config` or `plan` would hide other people's modules.
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    from shardmill.applications import put_applications_first

    put_applications_first()

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from etl.checks.data_faults import fault_warnings
from etl.checks.facts import (
    check_classes,
    check_same_source,
    emptied_splits,
    inferred_facts,
    inferred_warnings,
    is_up_to_date,
)
from etl.checks.limits import check_limits
from etl.checks.redecoded import check_redecoded
from etl.checks.vanished import check_vanished
from etl.checks.version_warnings import version_warnings
from etl.commit import commit_results
from etl.config import EtlTree
from etl.engines import ENGINES, EngineSettings
from etl.engines.auto import engine_that_runs
from etl.later_runs.carry import Copy
from etl.listing.grouping import Group
from etl.outcome import BuildOutcome, stage_record
from etl.plan import BuildPlan, plan_again, plan_build, plan_changes
from etl.units.finished import Finished
from etl.units.pending import clear_pending, kept_results
from etl.units.units import ListingPlace
from shardmill.dataset.card import refresh_card
from shardmill.dataset.leases import writing
from shardmill.dataset.ledger import RejectionLog, read_rejections
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.versions import pin_of, read_manifest_bytes, record_if_missing
from shardmill.errors import CommitConflict
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import load_tree
from shardmill.jobs.observer import RETRIED, WARNING, Observer, SilentObserver
from shardmill.jobs.run_record import RunRecord, job_parser, run_job
from shardmill.row_mapping import RowMapping

# Each is a version that another writer made, so that all of them together always get on.
_MAX_LOST_COMMITS = 1_000
SUMMARY_SECTIONS = ("dataset", "etl")
"""Sections that the ETL adds to a run's summary."""


def build_dataset(
    tree: EtlTree,
    *,
    run_id: str,
    observer: Observer | None = None,
    replace_source: bool = False,
    check_labels: Callable[[RowSchema], None] | None = None,
    before_work: Callable[[RowSchema], object] | None = None,
    mapping: RowMapping | None = None,
) -> BuildOutcome:
    """The whole ETL. Raises UsageError (2), StorageError (4), CommitConflict (6) or RejectLimitExceeded (7), or
    DriftLimitExceeded (7).

    `mapping`: what to store in place of pixels. `replace_source` allows another source than the latest version's.
    `check_labels` is given if a training follows: what it raises for the labels that the listing tells, and UsageError
    for a listing that no classifier can learn, is raised before any work. So is what `before_work` raises, if there is.
    """
    started_seconds, observer = time.monotonic(), observer or SilentObserver()
    with ENGINES[tree.etl.engine].opened(_settings(tree)):
        plan = plan_build(tree, run_id=run_id, observer=observer, group=_group_on_engine(tree), mapping=mapping)
        return _build(plan, tree, observer, check_labels, before_work, started_seconds, replace_source=replace_source)


def _build(
    plan: BuildPlan,
    tree: EtlTree,
    observer: Observer,
    check_labels: Callable[[RowSchema], None] | None,
    before_work: Callable[[RowSchema], object] | None,
    started_seconds: float,
    *,
    replace_source: bool,
) -> BuildOutcome:
    # What the listing alone refuses may be too much already.
    observer.event("etl.listed", {"listed": plan.build.num_listed, "images": plan.num_images, "units": len(plan.units)})
    check_same_source(plan, replace_source=replace_source)
    check_limits(plan, plan.build.list_rejections)
    if plan.task.mapping is None:
        observer.event("etl.inferred", inferred_facts(plan))
    else:
        observer.event("etl.predicting", inferred_facts(plan))
    if check_labels is not None:
        check_classes(plan)
        check_labels(plan.row_schema)
    _warn(observer, inferred_warnings(plan))

    # Skip all of it if the latest version was made from the same listing and config.
    parent = plan.parent
    if parent is not None and is_up_to_date(plan, parent):
        check_limits(plan, RejectionLog(plan.listing.folder, read_rejections(plan.store, parent)))
        record_if_missing(plan.store, parent.version)
        _warn(observer, version_warnings(plan.store, parent))
        # An earlier run may have been killed just behind its commit.
        _warn(observer, refresh_card(plan.store, parent))
        clear_pending(plan.store, plan.units, parent.version)
        observer.event("etl.unchanged", {"version": parent.version})
        return _outcome(plan, tree, parent, time.monotonic() - started_seconds)

    # Build what the latest version lacks, and commit it.
    if before_work is not None:
        called = time.monotonic()
        before_work(plan.row_schema)
        # No work of the ETL.
        started_seconds += time.monotonic() - called
    return _build_on_latest(plan, tree, observer, started_seconds, replace_source=replace_source)


def _build_on_latest(
    plan: BuildPlan, tree: EtlTree, observer: Observer, started_seconds: float, *, replace_source: bool
) -> BuildOutcome:
    """From the units to the commit; an append that loses the race begins again with the winner's version."""
    retries: list[int] = []
    num_lost = 0
    while True:
        try:
            return _commit_once(plan, tree, observer, retries, started_seconds, replace_source=replace_source)
        except CommitConflict:
            num_lost += 1
            behind = plan_again(plan, tree) if plan.is_append and num_lost < _MAX_LOST_COMMITS else plan
            # Nobody has won: `gc` is at work, or the lease has lapsed.
            if behind.parent_version == plan.parent_version:
                raise
        # An append goes behind the winner; its finished units are kept.
        plan = behind
        observer.event("etl.rebased", {"version": plan.parent_version, "num_lost": num_lost})


def _commit_once(
    plan: BuildPlan,
    tree: EtlTree,
    observer: Observer,
    retries: list[int],
    started_seconds: float,
    *,
    replace_source: bool,
) -> BuildOutcome:
    """The units of `plan` that are missing, and the commit. Raises CommitConflict if another writer was first."""
    # The lease keeps `gc` away from what no manifest names yet, and from the parent's shards. One under which a race
    # was lost may have lapsed: what it protected is looked at again under another one.
    with writing(plan.store, f"etl, run {plan.build.run_id},") as lease:
        # Leave out what the latest version holds already.
        changed = plan_changes(plan, observer)
        plan, changes = changed or (plan, None)
        if not replace_source:
            check_vanished(plan, changes)
        _warn(observer, check_redecoded(plan, changes))

        # Keep what an interrupted run has finished, and run the rest.
        finished, kept = run_units(plan, tree, observer, retries.append)

        # Commit: the limits, the accounting, then one manifest.
        manifest = commit_results(plan, finished, changes, lease.check, _group_on_engine(tree), _copy_on_engine(tree))
    _warn(observer, [*emptied_splits(plan, manifest), *version_warnings(plan.store, manifest)])
    _warn(observer, fault_warnings(plan.rows, manifest), "etl.faults")
    _warn(observer, refresh_card(plan.store, manifest))
    observer.event("etl.committed", {"version": manifest.version, "content_digest": manifest.content_digest})
    return _outcome(plan, tree, manifest, time.monotonic() - started_seconds, kept, sum(retries))


def _outcome(
    plan: BuildPlan, tree: EtlTree, manifest: Manifest, seconds: float, kept: frozenset[int] | None = None,
    num_task_retries: int = 0,
) -> BuildOutcome:  # fmt: skip
    """`kept`: the units of which an earlier run had left results; None if the build was skipped."""
    num_images = 0 if kept is None else sum(unit.num_images for unit in plan.units if unit.index not in kept)
    return BuildOutcome(
        pin=pin_of(plan.store, manifest.version, read_manifest_bytes(plan.store, manifest.version)),
        manifest=manifest,
        skipped=kept is None,
        published=manifest.run_id == plan.build.run_id,
        engine=engine_that_runs(tree.etl.engine, num_images, _settings(tree)),
        num_units=len(plan.units),
        num_units_kept=len(kept or ()),
        num_task_retries=num_task_retries,
        num_images_read=num_images,
        seconds=seconds,
    )


def run_units(
    plan: BuildPlan, tree: EtlTree, observer: Observer, count_retries: Callable[[int], object]
) -> tuple[Finished, frozenset[int]]:
    """Return the results of all units, and the positions of those that an earlier run had finished."""
    finished = Finished(plan.listing, kept_results(plan.store, plan.units))
    kept = frozenset(result.unit_index for result in finished.results)
    missing = [unit for unit in plan.units if unit.index not in kept]
    if kept:
        observer.event("etl.units_kept", {"kept": len(kept), "missing": len(missing)})
    num_images = {unit.index: unit.num_images for unit in plan.units}
    num_done = sum(num_images[place] for place in kept)
    observer.event("etl.progress", {"num_done": num_done, "num_images": plan.num_images})
    engine, settings, num_retried = ENGINES[tree.etl.engine], replace(_settings(tree), count_retries=count_retries), 0
    for result in engine.run_units(missing, plan.task, settings) if missing else ():
        finished.add(result)
        num_retried += result.retried_requests
        num_done += num_images[result.unit_index]
        observer.event("etl.progress", {"num_done": num_done, "num_images": plan.num_images})
    if num_retried:
        observer.event("etl.requests_retried", {RETRIED: num_retried})
    return finished, kept


def _group_on_engine(tree: EtlTree) -> Group:
    return lambda group: ENGINES[tree.etl.engine].group_rows(group, _settings(tree))


def _copy_on_engine(tree: EtlTree) -> Copy:
    copy = ENGINES[tree.etl.engine].copy_rows
    # None of these units reads the listing.
    return lambda units, task: copy(units, replace(task, listing=ListingPlace("", ())), _settings(tree))


def _settings(tree: EtlTree) -> EngineSettings:
    return EngineSettings(tree.spark, tree.etl.num_workers)


def _warn(observer: Observer, messages: Iterable[str], event: str = "etl.warning") -> None:
    for message in messages:
        observer.event(event, {WARNING: message})


def main() -> int:
    """The command line of `spark-submit etl/job.py`; returns the exit code."""
    parser = job_parser("Build a dataset version.")
    parser.add_argument("--replace-source", action="store_true", help="allow the images to come from another source")
    arguments = parser.parse_args()

    def job(run: RunRecord, observer: Observer) -> None:
        tree = load_tree(EtlTree, arguments.config, tuple(arguments.set))
        run.stage(
            "etl",
            lambda: build_dataset(tree, run_id=run.run_id, observer=observer, replace_source=arguments.replace_source),
            lambda outcome: stage_record(outcome, tree),
        )

    return run_job(job, arguments.workdir, arguments.run_id, sections=SUMMARY_SECTIONS, debug=arguments.debug)


if __name__ == "__main__":
    sys.exit(main())
