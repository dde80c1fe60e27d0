"""`shardmill etl --dry-run`: list the source and plan its work units; reads no image, writes nothing."""

from __future__ import annotations

import dataclasses
import resource
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.config import load_pipeline, require
from pipeline.progress import RunProgress
from shardmill.jobs.observer import SilentObserver

if TYPE_CHECKING:
    from pipeline.cli_options import Common


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a build would start with."""

    num_listed: int
    num_images: int
    """Inputs that work units would read."""
    num_rejected: int
    """Refused by the listing alone."""
    by_reason: dict[str, int]
    class_names: tuple[str, ...]
    num_units: int
    plan_digest: str
    """Equal listings and configs give an equal digest, on any machine."""
    driver_peak_rss_bytes: int
    seconds: float

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return dataclasses.asdict(self)

    def rows(self) -> list[tuple[str, ...]]:
        """What a person reads."""
        reasons = ", ".join(f"{reason} {count:,}" for reason, count in self.by_reason.items())
        return [
            ("inputs", f"{self.num_listed:,} listed, {self.num_images:,} to process, {self.num_rejected:,} rejected"),
            ("rejected", reasons or "none"),
            ("classes", f"{len(self.class_names):,}"),
            ("work units", f"{self.num_units:,}"),
            ("plan digest", self.plan_digest),
            ("driver", f"{self.driver_peak_rss_bytes / 1e6:,.0f} MB at its peak, {self.seconds:.1f} s"),
        ]


def dry_run(source_or_config: str, common: Common) -> DryRun:
    """Raises what the ETL would raise for this source and config before its first work unit."""
    from etl.checks import inferred_warnings
    from etl.config import EtlTree
    from etl.plan import plan_build

    started = time.monotonic()
    tree = load_pipeline(source_or_config, common.overrides, common.workdir)
    require(tree, "source", "dataset")
    with RunProgress(SilentObserver(), num_epochs=0) as progress:
        plan = plan_build(tree.part(EtlTree), run_id="dry-run", observer=progress)
        for warning in inferred_warnings(plan):
            progress.say(f"etl: WARNING: {warning}")
    return DryRun(
        num_listed=plan.build.num_listed,
        num_images=plan.num_images,
        num_rejected=len(plan.listing.rejections),
        by_reason=plan.listing.num_rejected_by_reason,
        class_names=plan.build.class_names,
        num_units=len(plan.units),
        plan_digest=plan.digest,
        driver_peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        seconds=time.monotonic() - started,
    )
