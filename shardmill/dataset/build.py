"""What the driver knows of a build before its units ran; the commit adds what they produced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardmill.dataset.manifest import Operation, SourceRef
from shardmill.dataset.unit_result import UnitResult
from shardmill.ids import key_bytes
from shardmill.options import NormalizeOptions
from shardmill.values import Rejection


@dataclass(frozen=True, slots=True)
class Build:
    """What the driver knows of a build before its units ran."""

    run_id: str
    source: SourceRef
    num_listed: int
    list_rejections: tuple[Rejection, ...]
    """Inputs refused by the listing; they are in no unit."""
    class_names: tuple[str, ...]
    columns: dict[str, str]
    formats: tuple[str, ...]
    normalize: NormalizeOptions
    normalization_fingerprint: str
    decoder_id: str
    config: dict[str, Any]
    config_fingerprint: str
    operation: Operation = "full"
    other_sources: tuple[SourceRef, ...] = ()
    """For an append: whose images are there already."""

    def all_rejections(self, results: Sequence[UnitResult]) -> list[Rejection]:
        """Every refused input, of the listing and of the units, in the order of the keys' bytes."""
        rejections = [*self.list_rejections, *(rejection for result in results for rejection in result.rejections)]
        return sorted(rejections, key=lambda rejection: key_bytes(rejection.key))
