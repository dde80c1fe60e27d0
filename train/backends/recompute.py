"""The error of activation checkpointing for a model without parts to recompute.

Of a block only its inputs are kept for the backward pass, which computes the rest a second time: less memory, more
time, the same gradients.
"""

from __future__ import annotations

from shardmill.errors import UsageError


def nothing_to_recompute(model: str, expected: str) -> UsageError:
    """`model`: what `train.model` names."""
    return UsageError(
        f"train.memory.activation_checkpointing: train.model = {model!r} has no part that can be recomputed",
        f"expected {expected}",
        "set train.memory.activation_checkpointing = 'off'",
    )
