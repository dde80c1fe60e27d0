"""The outcome of one update, as a backend reports it and as the progress of a training adds it up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """The outcome of one update, equal on every rank."""

    loss: float
    num_correct: float
    """Samples whose class is right; of several classes an image the share that is, summed; 0 for numbers."""
    gradient_norm: float
    """Global norm before clipping."""
    is_applied: bool
    """False if loss or gradients were not finite, which is a fault; nothing was changed then."""
    overflowed: bool = False
    """The gradients of a scaled loss (float16) were not finite: no fault, as the next ones have a smaller scale; no
    weight was changed."""
