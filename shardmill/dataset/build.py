"""Facts of a build that the driver knows before its units run; the commit adds their results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardmill.dataset.manifest import Operation, SourceRef
from shardmill.options import NormalizeOptions
from shardmill.values import PredictedBy

if TYPE_CHECKING:
    from shardmill.dataset.rejection_log import RejectionLog


@dataclass(frozen=True, slots=True)
class Build:
    """Facts of a build that the driver knows before its units run."""

    run_id: str
    source: SourceRef
    num_listed: int
    list_rejections: RejectionLog
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
    """For an append: the sources of existing images."""
    predicted_by: PredictedBy | None = None
    """For predictions: what makes them."""
