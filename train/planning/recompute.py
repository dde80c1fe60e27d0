"""Checks which trainings support `train.memory.activation_checkpointing`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.errors import UsageError
from train.backends import BACKENDS
from train.strategies import STRATEGIES

if TYPE_CHECKING:
    from train.config import TrainConfig


def why_not_recompute(config: TrainConfig) -> str:
    """Name the other setting that prevents `train.memory.activation_checkpointing`; empty if none does.

    `config`: one without `auto` for strategy and backend.
    """
    if not STRATEGIES[config.strategy].recomputes:
        return f"train.strategy = {config.strategy!r}"
    if config.sync_batch_norm and not BACKENDS[config.backend].recomputes_sync_batch_norm:
        return f"train.sync_batch_norm = true with the backend {config.backend}"
    return ""


def check_recompute(config: TrainConfig) -> None:
    """Raises UsageError for what cannot be combined; nothing is imported that trains."""
    other = why_not_recompute(config)
    if config.memory.activation_checkpointing == "on" and other:
        raise UsageError(
            f"train.memory.activation_checkpointing = 'on' with {other}",
            "recomputing a block would read variables, or sum moments over ranks, twice",
            "use only one of the two",
        )
