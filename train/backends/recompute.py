"""`train.memory.activation_checkpointing`: which trainings can have it, and what is said of a model that cannot.

Of a block only what goes into it is kept for the backward pass, which computes the rest a second time: less memory,
more time, the same gradients.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardmill.errors import UsageError

if TYPE_CHECKING:
    from train.config import TrainConfig


def why_not_recompute(config: TrainConfig) -> str:
    """What, beside `train.memory.activation_checkpointing`, keeps a training from it; empty if nothing does.

    `config`: one without `auto` for strategy and backend.
    """
    if config.strategy == "parameter_server":
        return f"train.strategy = {config.strategy!r}"
    if config.backend == "keras" and config.sync_batch_norm:
        return "train.sync_batch_norm = true on TensorFlow"
    return ""


def check_recompute(config: TrainConfig) -> None:
    """Raises UsageError for what cannot be combined; nothing is imported that trains."""
    other = why_not_recompute(config)
    if config.memory.activation_checkpointing == "on" and other:
        raise UsageError(
            f"train.memory.activation_checkpointing = 'on' with {other}",
            "recomputing a block would read variables, or sum moments over ranks, a second time",
            "use only one of the two",
        )


def nothing_to_recompute(model: str, expected: str) -> UsageError:
    """`model`: what `train.model` names."""
    return UsageError(
        f"train.memory.activation_checkpointing: train.model = {model!r} has no part that could be recomputed",
        f"expected {expected}",
        "set train.memory.activation_checkpointing = 'off'",
    )
