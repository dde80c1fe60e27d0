"""The gate's decision and the outcome of a candidate: values shared by gate, promotion and records."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from train.contracts.values import METRICS

Decision = Literal["promoted", "kept", "already_current", "chosen", "rolled_back"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Candidate and current export on the same samples."""

    candidate_figure: float
    current_figure: float
    """Value of the labels' metric (train/labels.py)."""
    num_samples: int
    on: str = ""
    """The samples, if not all of the candidate's evaluation."""


@dataclass(frozen=True, slots=True)
class Incomparable:
    """Why the two cannot be compared."""

    reason: str
    is_damaged: bool = False
    """No machine can load the current export, so replacing it loses nothing."""


@dataclass(frozen=True, slots=True)
class GateDecision:
    """The decision on a candidate by the gate, or by a person."""

    decision: Decision
    reason: str
    candidate_figure: float | None = None
    current_figure: float | None = None
    metric: str = METRICS["class"].name
    """Name of the metric: a field of `Evaluation`."""
    is_passed: bool = True
    """Whether the gate is passed; with `--require`, False is an error."""


@dataclass(frozen=True, slots=True)
class Promotion:
    """The outcome of a candidate."""

    models_uri: str
    gate: GateDecision
    previous: int | None
    """The export that was current before."""
    current: int | None
    """The export that is current now."""
    is_published: bool = False
    """The gate let it pass in this run: in this call, or in an earlier try of the same run."""
    registered: str | None = None
    """The current export at the model registry, `models:/NAME/VERSION`; empty if that failed, None without one."""
