"""The section `gate` of the config: what decides about publishing, not about training."""

from __future__ import annotations

from pydantic import Field

from shardmill.section import Section


class GateConfig(Section):
    """What a new model must show before it becomes the current one."""

    min_accuracy: float = Field(default=0.0, ge=0, le=1)
    """Floor for top-1 accuracy on the evaluation split; for labels that are one class an image."""
    metric_limit: float = Field(default=0.0, ge=0)
    """What a model must reach by the figure of its kind of labels: accuracy, or mean average precision (several classes
    an image), at least; mean absolute error (numbers) at most. 0: no bound."""
    max_regression: float = Field(default=0.01, ge=0, le=1)
    """How far that figure may fall behind the current model's on the same split; of an error, as a share of it."""
