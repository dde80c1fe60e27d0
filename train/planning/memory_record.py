"""The record of a training's memory, measured or counted before its first step."""

from __future__ import annotations

from shardmill.section import Section


class MemoryRecord(Section):
    """The measurements before a training's first step. A resume uses these numbers, and does not measure again."""

    device: str
    rank_bytes: int
    host_bytes: int
    """Value as in `train.planning.host_memory.Limit`."""
    on_gpu: bool
    fixed_bytes: int
    """Memory of a rank for any batch size, without its input."""
    image_bytes: int
    """Per image that is computed at a time, in the precision that the config asked for."""
    to_bfloat16: bool
    """`train.mixed_precision` was `auto`, and became bfloat16."""
    recomputed_fixed_bytes: int = 0
    recomputed_image_bytes: int = 0
    """Both with `train.memory.activation_checkpointing`; 0 if that was not measured."""
    state_bytes: int = 0
    """Of `fixed_bytes`: weights, gradients and optimizer of a rank with the whole model; 0 if that is not known."""
    why_not_recomputed: str = ""
    """Why the model, or what it is trained with, does not have it."""
    note: str = ""
    """How a model that ranks share was measured, if it could not be counted from shapes; for people."""
