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

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from etl.checks.limits import check_limits, check_redecoded, check_vanished, drift_of
from etl.checks.listing import (
    check_classes,
    check_same_source,
    current_version,
    emptied_splits,
    inferred_facts,
    inferred_warnings,
)
from etl.checks.version import fault_warnings, version_warnings
from etl.commit import commit_results
from etl.config import EtlTree
from etl.engines import ENGINES, Engine, EngineSettings, engine_that_runs
from etl.plan import BuildPlan, latest_manifest, plan_build, plan_changes
from etl.units.results import Finished, clear_pending, kept_results
from shardmill.dataset.card import refresh_card
from shardmill.dataset.leases import writing
from shardmill.dataset.ledger import RejectionLog, read_rejections
from shardmill.dataset.manifest import Manifest
from shardmill.dataset.versions import pin_of, read_manifest_bytes, record_if_missing
from shardmill.errors import CommitConflict, ShardmillError
from shardmill.formats.rows import RowSchema
from shardmill.jobs.config import load_tree
from shardmill.jobs.observer import RETRIED, WARNING, Observer, SilentObserver
from shardmill.jobs.run_files import StageRecord, dataset_section
from shardmill.jobs.run_record import RunRecord, job_parser, run_job
from shardmill.jobs.spark import spark_application
from shardmill.row_mapping import RowMapping
from shardmill.stores import open_store
from shardmill.values import DatasetPin

if TYPE_CHECKING:
    import pyarrow as pa

    from etl.listing.grouping import GroupBy
    from etl.units.units import CopyUnit, UnitTask
    from shardmill.dataset.build import UnitResult

# Each is a version that another writer made, so that all of them together always get on.
_MAX_LOST_COMMITS = 1_000
SUMMARY_SECTIONS = ("dataset", "etl")
"""Sections that the ETL adds to a run's summary."""
_WORK = ("engine", "seconds", "images_per_second", "num_units", "num_units_kept", "num_task_retries", "published")


@dataclass(frozen=True, slots=True)
class BuildOutcome:
    """The version that holds the source's images now."""

    pin: DatasetPin
    manifest: Manifest
    skipped: bool
    """True if the latest version was made from the same inputs and config already."""
    published: bool
    """True if this run made the version, in this attempt or an earlier one."""
    engine: str
    """The engine that ran the units; of `auto`, the one that it chose."""
    num_units: int
    num_units_kept: int
    """Units that an earlier, interrupted run had finished."""
    num_task_retries: int
    """Attempts at units that ended too early, and were followed by another one."""
    num_images_read: int
    """Images in the other units; 0 if nothing was left to do."""
    seconds: float

    @property
    def work(self) -> dict[str, Any]:
        """What a build did, for a run's summary."""
        return {name: getattr(self, name) for name in _WORK}

    @property
    def images_per_second(self) -> float:
        """Images that this build itself read, per second; 0 if there was nothing to do."""
        return self.num_images_read / max(self.seconds, 1e-9)


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
    started_seconds, observer, retries = time.monotonic(), observer or SilentObserver(), list[int]()
    engine, settings = ENGINES[tree.etl.engine], EngineSettings(tree.spark, tree.etl.num_workers)

    def group(asked: GroupBy) -> Iterator[pa.Table]:
        return engine.group_rows(asked, settings)

    def copy(units: Sequence[CopyUnit], task: UnitTask) -> Iterator[UnitResult]:
        return engine.copy_rows(units, task, settings)

    def warn(messages: Iterable[str], event: str = "etl.warning") -> None:
        for message in messages:
            observer.event(event, {WARNING: message})

    def outcome(manifest: Manifest, kept: frozenset[int] | None = None) -> BuildOutcome:
        """`kept`: the units of which an earlier run had left results; None if the build was skipped."""
        num_images = 0 if kept is None else sum(unit.num_images for unit in plan.units if unit.index not in kept)
        return BuildOutcome(
            pin=pin_of(plan.store, manifest.version, read_manifest_bytes(plan.store, manifest.version)),
            manifest=manifest,
            skipped=kept is None,
            published=manifest.run_id == run_id,
            engine=engine_that_runs(tree.etl.engine, num_images, settings),
            num_units=len(plan.units),
            num_units_kept=len(kept or ()),
            num_task_retries=sum(retries),
            num_images_read=num_images,
            seconds=time.monotonic() - started_seconds,
        )

    with engine.opened(settings):
        # List and plan. What the listing alone refuses may be too much already.
        plan = plan_build(tree, run_id=run_id, observer=observer, group=group, mapping=mapping)
        listed = {"listed": plan.build.num_listed, "images": plan.num_images, "units": len(plan.units)}
        observer.event("etl.listed", {**listed, "dataset": plan.store.uri, **_rejected(plan.build.list_rejections)})
        check_same_source(plan, replace_source=replace_source)
        check_limits(plan, plan.build.list_rejections)
        if mapping is None:
            observer.event("etl.inferred", inferred_facts(plan))
        else:
            observer.event("etl.predicting", inferred_facts(plan))
        if check_labels is not None:
            check_classes(plan)
            check_labels(plan.row_schema)
        current = current_version(plan)
        warn(inferred_warnings(plan, current))

        # Skip all of it if the latest version was made from the same listing and config.
        if current is not None:
            check_limits(plan, RejectionLog(plan.listing.folder, read_rejections(plan.store, current)))
            record_if_missing(plan.store, current.version)
            warn(version_warnings(plan.store, current))
            # An earlier run may have been killed just behind its commit.
            warn(refresh_card(plan.store, current))
            clear_pending(plan.store, plan.units, current)
            observer.event("etl.unchanged", _version_facts(current))
            return outcome(current)

        if before_work is not None:
            called = time.monotonic()
            before_work(plan.row_schema)
            # No work of the ETL.
            started_seconds += time.monotonic() - called

        # From the units to the commit. An append that loses the race goes behind the winner; its finished units are
        # kept.
        for num_lost in itertools.count(1):
            # The lease keeps `gc` away from what no manifest names yet, and from the parent's shards. One under which a
            # race was lost may have lapsed: what it protected is looked at again under another one.
            try:
                with writing(plan.store, f"etl, run {run_id},") as lease:
                    # Leave out what the latest version holds already.
                    plan, changes = plan_changes(plan, observer)
                    if not replace_source:
                        check_vanished(plan, changes)
                    warn(check_redecoded(plan, changes))

                    # Keep what an interrupted run has finished, and run the rest.
                    counting = replace(settings, count_retries=retries.append)
                    finished, kept = _run_units(plan, engine, counting, observer)

                    # Commit: the limits, the accounting, then one manifest.
                    manifest = commit_results(plan, finished, changes, lease.check, group, copy)
                break
            except CommitConflict:
                may_follow = plan.is_append and num_lost < _MAX_LOST_COMMITS
                behind = plan.behind(latest_manifest(plan.store)) if may_follow else plan
                # Nobody has won: `gc` is at work, or the lease has lapsed.
                if behind.parent_version == plan.parent_version:
                    raise
                plan = behind
                observer.event("etl.rebased", {"version": plan.parent_version, "num_lost": num_lost})

        # What the images themselves tell.
        warn([*emptied_splits(plan, manifest), *version_warnings(plan.store, manifest)])
        warn(fault_warnings(plan.rows, manifest), "etl.faults")
        warn(refresh_card(plan.store, manifest))
        if manifest.version == plan.parent_version:
            observer.event("etl.nothing_new", _version_facts(manifest))
        else:
            observer.event("etl.committed", {**_version_facts(manifest), "content_digest": manifest.content_digest})
        return outcome(manifest, kept)


def _run_units(
    plan: BuildPlan, engine: Engine, settings: EngineSettings, observer: Observer
) -> tuple[Finished, frozenset[int]]:
    """Return the results of all units, and the positions of those that an earlier run had finished."""
    finished = Finished(plan.listing, kept_results(plan.store, plan.units))
    kept = frozenset(result.unit_index for result in finished.results)
    missing = [unit for unit in plan.units if unit.index not in kept]
    if kept:
        observer.event("etl.units_kept", {"kept": len(kept), "missing": len(missing)})
    num_images = {unit.index: unit.num_images for unit in plan.units}
    num_done, num_retried = sum(num_images[place] for place in kept), 0

    def report() -> None:
        num_rejected = len(finished.rejections) - len(plan.build.list_rejections)
        ended = {
            "accepted": finished.num_accepted,
            "unchanged": num_done - finished.num_accepted - num_rejected,
            **_rejected(finished.rejections),
            "written_bytes": finished.written_bytes,
        }
        observer.event("etl.progress", {"num_done": num_done, "num_images": plan.num_images, **ended})

    report()
    for result in engine.run_units(missing, plan.task, settings) if missing else ():
        finished.add(result)
        num_retried += result.retried_requests
        num_done += num_images[result.unit_index]
        report()
    if num_retried:
        observer.event("etl.requests_retried", {RETRIED: num_retried})
    return finished, kept


def _rejected(rejections: RejectionLog) -> dict[str, int]:
    return {f"rejected_{reason}": number for reason, number in sorted(rejections.by_reason.items())}


def _version_facts(manifest: Manifest) -> dict[str, int | float]:
    """The fields of an event about the latest version; `committed`: in seconds since 1970."""
    committed = datetime.fromisoformat(manifest.created_at).timestamp()
    return {"version": manifest.version, "images": manifest.counts.accepted, "committed": committed}


def stage_record(outcome: BuildOutcome, tree: EtlTree) -> StageRecord:
    """Return the part of a run's summary that the ETL adds."""
    drift = None
    # A build that has looked and found nothing new has drifted from nothing.
    if outcome.published or outcome.skipped:
        # A damaged older manifest must not fail a committed version; `verify` reports that.
        with suppress(ShardmillError):
            drift = drift_of(open_store(outcome.pin.uri), tree.etl, outcome.manifest)
    return StageRecord(
        stage="etl",
        status="skipped" if outcome.skipped else "done",
        sections={
            "dataset": dataset_section(outcome.pin, outcome.manifest),
            "etl": outcome.work,
            "drift": None if drift is None else drift.model_dump(mode="json"),
        },
    )


def main() -> int:
    """The command line of `spark-submit etl/job.py`; returns the exit code."""
    parser = job_parser("Build a dataset version.")
    parser.add_argument("--replace-source", action="store_true", help="allow the images to come from another source")
    arguments = parser.parse_args()

    @spark_application()
    def job(run: RunRecord, observer: Observer) -> None:
        tree = load_tree(EtlTree, arguments.config, tuple(arguments.set))
        run.name_dataset(tree.dataset.uri)
        run.stage(
            "etl",
            lambda: build_dataset(tree, run_id=run.run_id, observer=observer, replace_source=arguments.replace_source),
            lambda outcome: stage_record(outcome, tree),
        )

    return run_job(
        job, arguments.workdir, arguments.run_id, command="etl", sections=SUMMARY_SECTIONS, debug=arguments.debug
    )


if __name__ == "__main__":
    sys.exit(main())
