"""Commits the results of all units as a version: checks limits, keeps rows of the parent, resolves duplicates, writes
one manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from etl.checks.duplicates import resolve_duplicates
from etl.checks.limits import check_boxes_left, check_drift, check_limits
from etl.later_runs.carry import Copy, append, carry, changes_nothing
from etl.later_runs.changes import with_same_content
from etl.listing.grouping import Group, group_here
from etl.units.copy_rows import RowCopier
from etl.units.results import clear_pending, kept_results
from shardmill.dataset.commit import commit_version
from shardmill.dataset.index import has_all_files

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.plan import BuildPlan
    from etl.units.results import Finished
    from etl.units.units import CopyUnit, UnitTask
    from shardmill.dataset.build import Build, UnitResult
    from shardmill.dataset.manifest import Manifest


def commit_results(
    plan: BuildPlan,
    finished: Finished,
    changes: Changes | None = None,
    check_lease: Callable[[], object] = lambda: None,
    group: Group = group_here,
    copy: Copy | None = None,
) -> Manifest:
    """Commit what all units produced, and what `changes` left of the parent; then clear the units' pending records.

    `check_lease` may still refuse, when all files are written and only the manifest is not. `group` brings rows of
    equal bytes together, `copy`, which changes need, makes shards with what stays of older ones.
    If no new version came of it, the records stay, unless `changes` asks to read again: the same listing (of touched
    files, say) is not processed again.
    """
    if changes is not None:
        changes = with_same_content(changes, plan.work, finished.results)
        finished.rejections.add(changes.refused_before.marked())
    check_limits(plan, finished.rejections)
    build, results, manifest = plan.build, finished.results, None
    copier = RowCopier(plan.rows, plan.task.config)
    if changes is not None and plan.parent is not None:
        beside = _beside_parent(plan, plan.parent, changes, finished, copier, copy)
        if beside is None:
            manifest = plan.parent
        else:
            build, results = beside

    def check(draft: Manifest) -> None:
        check_boxes_left(draft)
        check_drift(plan.store, plan.task.config, draft)
        check_lease()

    if manifest is None:
        rejections = finished.rejections
        resolved = resolve_duplicates(results, rejections, plan.task.config, copier, group)
        manifest = commit_version(plan.store, build, resolved.results, rejections, resolved.counts, plan.parent, check)
    # The commit itself may find the parent again, if what was read again is a copy that is dropped, say.
    if manifest.version > plan.parent_version or (changes is not None and changes.rereads):
        clear_pending(plan.store, plan.units, manifest)
    return manifest


def _beside_parent(
    plan: BuildPlan, parent: Manifest, changes: Changes, finished: Finished, copier: RowCopier, copy: Copy | None
) -> tuple[Build, list[UnitResult]] | None:
    """Return the rows to commit: the remaining rows of the parent, and the new ones; None if that equals the parent."""
    build, results = plan.build, finished.results
    if plan.is_append:
        added = append(parent, build, changes, finished, plan.listing, copier)
        finished.rejections.add(added.refused_before.others())
        build, results, changes = added.build, added.results, added.changes
        has_its_rows = not any(result.splits for result in results)
    else:
        # Rows of a lost shard are not among the changes; if their sources are gone as well, nothing else tells of them.
        has_its_rows = changes_nothing(plan.rows, changes, results) and has_all_files(plan.store, parent)
    same_ledger = finished.rejections.digest == parent.ledger_digest
    if has_its_rows and same_ledger and build.class_names == parent.class_names:
        return None

    def copy_missing(units: Sequence[CopyUnit], task: UnitTask) -> Iterator[UnitResult]:
        """But for what an interrupted run has copied already."""
        assert copy is not None, "changes need it"
        kept = list(kept_results(plan.store, units))
        yield from kept
        done = {result.unit_index for result in kept}
        missing = [unit for unit in units if unit.index not in done]
        if missing:
            yield from copy(missing, task)

    return build, [*carry(parent, changes, copier, plan.task, copy_missing), *results]
