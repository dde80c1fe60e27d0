"""How the ranks of a strategy hold one PyTorch module together: what plans and `auto` ask a strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from train.config import TrainConfig
    from train.strategies.held import Held


def takes_any(config: TrainConfig, learner: Any) -> None:
    """`SharedModel.check_learner` of ranks that can share any module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedModel:
    """Facts of a strategy whose ranks hold parts of an `nn.Module`, or of its optimizer's state."""

    axes: tuple[str, ...]
    """The axes of `train.mesh` that it has beside `data`. If sizes are left open, the first has all ranks that the
    others leave (`train.contracts.mesh.Mesh.along`)."""
    held: Callable[[TrainConfig, Any], Held]
    """(config, module whose tensors have shapes and no numbers) -> what the rank that holds most has of it. Called in a
    process that stands for one rank of as many as there are, and exchanges nothing
    (train/backends/torch/imagined_ranks.py). Raises as `check_learner` does."""
    check_learner: Callable[[TrainConfig, Any], None] = takes_any
    """Raises UsageError for a learner whose module its ranks cannot divide; called by the process that tries a model
    (train/planning/trial_build.py). `join` refuses the same, for a training that nobody has tried."""
    is_for_large_models: bool = False
    """`auto` chooses it if one device does not hold the model: of several such, in the order of the registry, the first
    whose ranks do."""
