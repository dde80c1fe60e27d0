"""The values that the report page shows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardmill.data_quality.drift import Drift
    from shardmill.data_quality.quality import SuspectImage
    from shardmill.dataset.statistics import ImageSizes
    from shardmill.jobs.run_files import StageRecord
    from shardmill.values import Rejection
    from train.contracts.values import EpochRecord, Evaluation


@dataclass(frozen=True, slots=True)
class Picture:
    """One thumbnail: PNG bytes, or empty if nothing could be decoded."""

    caption: str
    tip: str
    png: bytes = b""
    is_small: bool = False


@dataclass(frozen=True, slots=True)
class MistakenImage:
    """An image of the evaluation that the model took for another class."""

    sample_id: int
    split: str
    given_label: str
    prediction: str
    probability: float


@dataclass(frozen=True, slots=True)
class RejectedGroup:
    """All inputs that were refused for one reason, and a few of them to look at."""

    reason: str
    count: int
    examples: tuple[tuple[Picture, Rejection], ...]


@dataclass(frozen=True, slots=True)
class SuspectGroup:
    """All images with one fault, and a few of them to look at, the worst first."""

    fault: str
    count: int
    examples: tuple[tuple[Picture, SuspectImage], ...]


@dataclass(frozen=True, slots=True)
class ReportData:
    """All values that the page shows."""

    run_id: str
    summary: dict[str, Any]
    config_toml: str = ""
    stages: tuple[StageRecord, ...] = ()
    class_names: tuple[str, ...] = ()
    class_counts: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Counts by split, in the order of `class_names`."""
    empty_classes: tuple[str, ...] = ()
    sizes: ImageSizes | None = None
    channel_mean: tuple[float, ...] = ()
    """Over the train split, on the 0..255 scale, like the deviation."""
    channel_std: tuple[float, ...] = ()
    samples: tuple[Picture, ...] = ()
    num_listed: int = 0
    rejected: tuple[RejectedGroup, ...] = ()
    notes: dict[str, int] = field(default_factory=dict)
    """Accepted with care: number of samples by note."""
    suspects: tuple[SuspectGroup, ...] = ()
    num_not_searched: int = 0
    """Images that are too many to search for faults while a report is written."""
    telltales: tuple[str, ...] = ()
    """Properties of whole images that tell the classes apart, a sentence each."""
    drift: Drift | None = None
    """Also that for which a version was refused."""
    history: tuple[EpochRecord, ...] = ()
    evaluation: Evaluation | None = None
    mistakes: tuple[tuple[Picture, MistakenImage], ...] = ()
    """The most confident ones of the evaluation."""
