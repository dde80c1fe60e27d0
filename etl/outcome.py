"""What a build has come to, and the part of a run's summary that says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from etl.checks.drift import recorded_drift
from etl.config import EtlTree
from shardmill.dataset.manifest import Manifest
from shardmill.jobs.run_files import StageRecord, dataset_section
from shardmill.stores import open_store
from shardmill.values import DatasetPin

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
    def images_per_second(self) -> float:
        """Images that this build itself read, per second; 0 if there was nothing to do."""
        return self.num_images_read / max(self.seconds, 1e-9)


def stage_record(outcome: BuildOutcome, tree: EtlTree) -> StageRecord:
    """Return the part of a run's summary that the ETL adds."""
    drift = recorded_drift(open_store(outcome.pin.uri), tree.etl, outcome.manifest)
    return StageRecord(
        stage="etl",
        status="skipped" if outcome.skipped else "done",
        sections={
            "dataset": dataset_section(outcome.pin, outcome.manifest),
            "etl": work_done(outcome),
            "drift": None if drift is None else drift.model_dump(mode="json"),
        },
    )


def work_done(outcome: BuildOutcome) -> dict[str, Any]:
    """What a build did, for a run's summary."""
    return {name: getattr(outcome, name) for name in _WORK}
