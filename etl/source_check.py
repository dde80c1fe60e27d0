"""What a build would reject: every source image is read and decoded as in a build, and nothing is written."""

from __future__ import annotations

from dataclasses import dataclass, replace

from etl.config import EtlTree
from etl.engines import EngineSettings
from etl.engines.local import run_locally
from etl.finished import Finished
from etl.limits import Limit, broken_limit
from etl.plan import plan_build
from etl.version_warnings import lost_by_decoding
from shardmill.dataset.rejection_log import RejectionLog
from shardmill.dataset.unit_result import count_notes
from shardmill.jobs.observer import Observer


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """The outcome of every listed input, as a build would record it."""

    num_listed: int
    num_accepted: int
    finished: Finished
    limit: Limit | None
    """The limit of the config that would end the build."""

    @property
    def rejections(self) -> RejectionLog:
        """In the order of their keys."""
        return self.finished.rejections

    @property
    def by_reason(self) -> dict[str, int]:
        """How many were rejected for each reason, the most frequent first."""
        return {str(reason): times for reason, times in self.rejections.by_reason.most_common()}

    @property
    def by_note(self) -> dict[str, int]:
        """How many accepted images have each note, by name."""
        return count_notes(self.finished.results)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a build would say at its end of images that are worth less than they could be."""
        return tuple(lost_by_decoding(self.by_note))


def check_source_images(tree: EtlTree, *, run_id: str, observer: Observer) -> SourceCheck:
    """List, read and decode everything on this machine, whatever `etl.engine` says, and store nothing.

    Raises UsageError (2) or StorageError (4) as a build would before its first image, or if the source fails.
    """
    plan = plan_build(tree, run_id=run_id, observer=observer)
    num_images = {unit.index: unit.num_images for unit in plan.units}
    finished = Finished(plan.listing)
    num_done = 0
    settings = EngineSettings(tree.spark, tree.etl.num_workers)
    for result in run_locally(plan.units, replace(plan.task, is_check=True), settings) if plan.units else ():
        finished.add(result)
        num_done += num_images[result.unit_index]
        observer.event("etl.progress", {"num_done": num_done, "num_images": plan.num_images})
    return SourceCheck(
        num_listed=plan.build.num_listed,
        num_accepted=sum(part.num_rows for result in finished.results for part in result.splits),
        finished=finished,
        limit=broken_limit(tree.etl, finished.rejections, plan.build.num_listed),
    )
