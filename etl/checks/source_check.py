"""Finds what a build would reject: reads and decodes every source image as a build does, and writes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from etl.checks.limits import Limit, broken_limit
from etl.checks.listing import inferred_facts, inferred_warnings
from etl.checks.version import lost_by_decoding
from etl.config import EtlTree
from etl.engines import EngineSettings
from etl.engines.local import run_locally
from etl.plan import plan_build
from etl.sources.listed import SPLITS
from etl.units.results import Finished
from shardmill.dataset.build import SplitSums, count_notes
from shardmill.dataset.ledger import RejectionLog
from shardmill.dataset.statistics import SizeCounts, add_sizes
from shardmill.jobs.observer import FieldValue, Observer
from shardmill.words import name_some


@dataclass(frozen=True, slots=True)
class SourceCheck:
    """The outcome of every listed input, as a build would record it."""

    num_listed: int
    class_names: tuple[str, ...]
    inferred: Mapping[str, FieldValue]
    """Fields of the event `etl.inferred`, which a build reports about its listing before any work."""
    inferred_warnings: tuple[str, ...]
    """Warnings of that listing."""
    accepted: tuple[SplitSums, ...]
    """Sums of the accepted images, for each split that has any."""
    finished: Finished
    limit: Limit | None
    """The limit of the config that would end the build."""

    @property
    def num_accepted(self) -> int:
        return sum(part.num_rows for part in self.accepted)

    @property
    def by_split(self) -> dict[str, int]:
        """Number of accepted images per split."""
        return {part.split: part.num_rows for part in self.accepted}

    @property
    def by_class(self) -> dict[str, int]:
        """Number of accepted images per class; empty if labels are not classes."""
        counts: Counter[str] = Counter()
        for part in self.accepted:
            counts.update(dict(zip(self.class_names, part.class_counts, strict=False)))
        return dict(counts)

    @property
    def described_classes(self) -> str:
        """The classes as a build names them, and how many images each has."""
        names = tuple(f"{name} {times:,}" for name, times in self.by_class.items())
        return f"{len(names):,}: {name_some(names)}" if names else str(self.inferred["classes"])

    @property
    def sizes(self) -> SizeCounts:
        """The accepted images by the size of their source, upright."""
        return add_sizes(part.sizes for part in self.accepted).source

    @property
    def rejections(self) -> RejectionLog:
        """Return the rejections in the order of their keys."""
        return self.finished.rejections

    @property
    def by_reason(self) -> dict[str, int]:
        """Number of rejections per reason, the most frequent first."""
        return {str(reason): times for reason, times in self.rejections.by_reason.most_common()}

    @property
    def by_note(self) -> dict[str, int]:
        """Number of accepted images with each note, by name."""
        return count_notes(self.finished.results)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings that a build would give: about its listing, and about accepted images of reduced quality."""
        return (*self.inferred_warnings, *lost_by_decoding(self.by_note))


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
    sums: dict[str, SplitSums] = {}
    for part in (part for result in finished.results for part in result.splits):
        sums[part.split] = sums[part.split].plus(part) if part.split in sums else part
    return SourceCheck(
        num_listed=plan.build.num_listed,
        class_names=plan.build.class_names,
        inferred=inferred_facts(plan),
        inferred_warnings=tuple(inferred_warnings(plan)),
        accepted=tuple(sums[split] for split in SPLITS if split in sums),
        finished=finished,
        limit=broken_limit(tree.etl, finished.rejections, plan.build.num_listed),
    )
