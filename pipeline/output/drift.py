"""The output of `shardmill drift`: how far a version is from another one, and whether that is too far."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from pipeline.output.printing import Rows
from shardmill.data_faults.drift import AspectDrift, Drift, amount_words
from shardmill.dataset.dataset import Dataset
from shardmill.errors import DriftLimitExceeded, ShardmillError
from shardmill.jobs.run_files import StageRecord, dataset_section, failed_stage


@dataclass(frozen=True, slots=True)
class DriftComparison:
    """A version beside an older one, or beside nothing if it is the first."""

    dataset: Dataset
    against_uri: str
    drift: Drift | None
    limit: float

    @property
    def title(self) -> str:
        pin = self.dataset.pin
        return f"{pin.uri}@{pin.version}" + ("" if self.drift is None else f" against {self._against}")

    @property
    def _against(self) -> str:
        assert self.drift is not None
        version = f"@{self.drift.against_version}"
        return version if self.against_uri == self.dataset.pin.uri else self.against_uri + version

    def document(self) -> dict[str, Any]:
        """The document of --json."""
        drift = self.drift.model_dump(mode="json") if self.drift is not None else {}
        return {
            "uri": self.dataset.pin.uri,
            "version": self.dataset.pin.version,
            "against_uri": self.against_uri if drift else None,
            "against_version": drift.get("against_version"),
            "amount": drift.get("amount"),
            "max_drift": self.limit,
            "ok": not self.is_above,
            "aspects": drift.get("aspects", []),
        }

    def rows(self) -> Rows:
        """One row for each aspect: how far it has drifted, and what has moved."""
        if self.drift is None:
            return [("nothing to compare", f"version {self.dataset.pin.version} is the first", "")]
        return [_row(each) for each in self.drift.aspects]

    @property
    def is_above(self) -> bool:
        return self.drift is not None and self.drift.amount > self.limit

    def raise_if_above(self) -> None:
        """Raise DriftLimitExceeded (7) for a drift beyond the limit."""
        if self.drift is None or not self.is_above:
            return
        named = f"{self.dataset.pin.uri}@{self.dataset.pin.version}"
        is_same = self.against_uri == self.dataset.pin.uri
        rows = f"`shardmill inspect {shlex.quote(named)} --diff {self.drift.against_version}` lists the rows; "
        raise DriftLimitExceeded(
            f"{named} has drifted by {amount_words(self.drift.amount)} from {self._against}: "
            f"{self.drift.words_above(self.limit)}",
            f"the limit (etl.max_drift, --max-drift) is {self.limit:g}",
            f"{rows if is_same else ''}use another version, or a higher limit if the change is meant",
            detail={"drift": self.drift.model_dump(mode="json")},
        )

    def record(self) -> StageRecord:
        """The record of the stage. A drift beyond the limit fails it without raising: a table is printed first."""
        try:
            self.raise_if_above()
        except ShardmillError as error:
            return failed_stage("drift", error)
        drift = self.drift.model_dump(mode="json") if self.drift is not None else None
        section = dataset_section(self.dataset.pin, self.dataset.manifest)
        return StageRecord(stage="drift", sections={"dataset": section, "drift": drift})


def _row(found: AspectDrift) -> tuple[str, ...]:
    amount = "not compared" if found.amount is None else amount_words(found.amount)
    return found.aspect.words, amount, found.why_not or found.moves
