"""`shardmill etl --dry-run`: list the source and plan its work units; stores no image, writes nothing."""

from __future__ import annotations

import dataclasses
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import load_pipeline, require
from pipeline.output.progress import RunProgress
from shardmill.jobs.observer import SilentObserver
from shardmill.words import counted, reasons

if TYPE_CHECKING:
    from etl.later_runs.changes import Changes
    from etl.plan import BuildPlan
    from pipeline.cli_options import Common


@dataclass(frozen=True, slots=True)
class DryRun:
    """The plan with which a build would start."""

    num_listed: int
    num_images: int
    """Number of inputs that the listing accepted as images."""
    num_rejected: int
    """Refused by the listing alone."""
    by_reason: dict[str, int]
    class_names: tuple[str, ...]
    latest_version: int | None
    """Latest version of the dataset, if there is one."""
    num_unchanged: int
    """Number of its rows that would be reused."""
    num_removed: int
    """Number of its rows that would be removed: their inputs are gone, have changed, or are rebuilt with all others."""
    num_to_compare: int
    """Number of its rows whose inputs would be read to compare their bytes, and reused if equal."""
    num_to_process: int
    """Images that work units would read."""
    stored_as: str
    """Shape and encoding of each stored image, and why they have that size if the config does not say it."""
    num_units: int
    """Work units that would run. Those that an interrupted run has finished are among them."""
    plan_digest: str
    """Equal listings and configs give an equal digest, on any machine."""
    driver_peak_rss_bytes: int
    seconds: float

    def document(self) -> dict[str, Any]:
        """The document of `--json`."""
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        """The rows for people."""
        return [
            (
                "inputs",
                f"{self.num_listed:,} listed, {counted(self.num_images, 'image')}, {self.num_rejected:,} rejected",
            ),
            ("rejected", reasons(self.by_reason) or "none"),
            ("classes", f"{len(self.class_names):,}"),
            ("dataset", self._beside_latest()),
            ("images", f"stored as {self.stored_as}"),
            ("to process", f"{counted(self.num_to_process, 'image')} in {counted(self.num_units, 'work unit')}"),
            ("plan digest", self.plan_digest),
            ("driver", f"{self.driver_peak_rss_bytes / 1e6:,.0f} MB peak memory, {self.seconds:.1f} s"),
        ]

    def _beside_latest(self) -> str:
        if self.latest_version is None:
            return "no version yet"
        if not self.num_unchanged + self.num_to_compare and self.num_to_process:
            return f"version {self.latest_version}; no row of it can be reused"
        compared = f", {self.num_to_compare:,} are compared by content" if self.num_to_compare else ""
        return (
            f"version {self.latest_version}: {self.num_unchanged:,} rows are reused{compared}, {self.num_removed:,} "
            "are removed"
        )


def dry_run(source_or_config: str, common: Common, *, replace_source: bool = False) -> DryRun:
    """Raises what the ETL would raise for this source, config and dataset before its first work unit."""
    from etl.checks.limits import check_limits, check_redecoded, check_vanished
    from etl.checks.listing import check_same_source, current_version, inferred_facts, inferred_warnings
    from etl.config import EtlTree
    from etl.plan import plan_build, plan_changes

    started = time.monotonic()
    tree = load_pipeline(source_or_config, common.overrides, common.workdir)
    require(tree, "source", "dataset")
    with RunProgress(SilentObserver(), num_epochs=0) as progress:
        plan = plan_build(tree.part(EtlTree), run_id="dry-run", observer=progress)
        for warning in inferred_warnings(plan, current_version(plan)):
            progress.say(f"etl: WARNING: {warning}")
        check_same_source(plan, replace_source=replace_source)
        check_limits(plan, plan.build.list_rejections, keeps_ledger=False)
        work, changes = plan_changes(plan, SilentObserver())
        if not replace_source:
            check_vanished(plan, changes)
        for warning in check_redecoded(plan, changes):
            progress.say(f"etl: WARNING: {warning}")
    num_staying = _num_staying(plan, changes)
    num_to_compare = 0 if changes is None or plan.is_append else changes.num_to_compare
    return DryRun(
        num_listed=plan.build.num_listed,
        num_images=plan.num_images,
        num_rejected=len(plan.listing.rejections),
        by_reason=plan.listing.num_rejected_by_reason,
        class_names=plan.build.class_names,
        latest_version=plan.parent_version or None,
        num_unchanged=num_staying,
        num_removed=(plan.parent.counts.accepted if plan.parent is not None else 0) - num_staying - num_to_compare,
        num_to_compare=num_to_compare,
        num_to_process=work.num_images,
        stored_as=str(inferred_facts(plan)["image"]),
        num_units=len(work.units),
        plan_digest=plan.digest,
        driver_peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=time.monotonic() - started,
    )


def _num_staying(plan: BuildPlan, changes: Changes | None) -> int:
    """Rows of the latest version that the next one would hold as they are; an append keeps all."""
    if plan.parent is None:
        return 0
    if plan.is_append:
        return plan.parent.counts.accepted
    return changes.num_unchanged if changes is not None else 0
