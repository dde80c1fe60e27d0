"""Detects that validation is no better than guessing although the training has learned, and warns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from train.contracts.values import EpochRecord

if TYPE_CHECKING:
    from shardmill.dataset.manifest import Manifest, SplitInfo

# Fewer validation samples say nothing.
MIN_SAMPLES = 30
NUM_STANDARD_ERRORS = 2
# Of the way from guessing to no mistake: what a training must have gone to have learned anything.
LEARNED_SHARE = 0.1
# Labels that are numbers: what must be left at most of the first epoch's loss.
LEARNED_LOSS = 0.5


@dataclass(frozen=True, slots=True)
class Chance:
    """Metrics of a model that knows class frequencies and ignores the images."""

    train_accuracy: float
    validation_figure: float
    """Validation figure of guessing; figures within two standard errors (`validation_limit`) are not better."""
    validation_limit: float

    @classmethod
    def of(cls, manifest: Manifest) -> Chance | None:
        """Compute the chance figures. None without enough validation samples, or if any guess would be right there."""
        validation, kind = manifest.splits.get("validation"), manifest.row_schema.label_kind
        if validation is None or validation.num_rows < MIN_SAMPLES:
            return None
        if kind not in ("class", "multi_label"):
            return cls(0.0, 0.0, 0.0)
        shares, trained = _shares(validation), _shares(manifest.splits["train"])
        if kind == "class":
            figure, accuracy = max(shares), max(trained)
        else:
            occurring = [share for share in shares if share] or [1.0]
            figure = math.fsum(occurring) / len(occurring)
            accuracy = math.fsum(max(share, 1 - share) for share in trained) / len(trained)
        limit = figure + NUM_STANDARD_ERRORS * math.sqrt(figure * (1 - figure) / validation.num_rows)
        return cls(accuracy, figure, limit) if limit < 1 else None

    def is_all(self, history: Sequence[EpochRecord]) -> bool:
        """Whether the last epoch's validation is no better; for numbers, than the training before its first epoch."""
        validation = history[-1].validation
        if validation is None:
            return False
        if not validation.metric.higher_is_better:
            return validation.loss >= history[0].train_loss
        return validation.figure <= self.validation_limit

    def has_learned(self, history: Sequence[EpochRecord]) -> bool:
        """Whether the training is better than that by far."""
        first, last = history[0], history[-1]
        if last.train_accuracy is None:
            return last.train_loss <= LEARNED_LOSS * first.train_loss
        return last.train_accuracy >= self.train_accuracy + LEARNED_SHARE * (1 - self.train_accuracy)

    def told(self, history: Sequence[EpochRecord]) -> str:
        """Describe for people that the last epoch's validation is no better."""
        last = history[-1]
        assert last.validation is not None
        metric = last.validation.metric
        if last.train_accuracy is None:
            guess, reached = (
                f"the loss {history[0].train_loss:.4g} of the first epoch",
                f"a loss of {last.train_loss:.4g}",
            )
            found = f"loss {last.validation.loss:.4g}"
        else:
            guess, reached = f"guessing ({self.validation_figure:.4f})", f"an accuracy of {last.train_accuracy:.4f}"
            found = f"{metric.words} {last.validation.figure:.4f}"
        return (
            f"the validation {found} after epoch {last.epoch + 1} is no better than {guess}, although the training "
            f"has reached {reached}: moving statistics of batch norms may lag behind (more epochs, smaller batches or "
            "a smaller momentum), or the model has overfitted"
        )


def _shares(split: SplitInfo) -> list[float]:
    return [count / split.num_rows for count in split.class_counts]
