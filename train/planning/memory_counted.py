"""Counts the memory of a training whose ranks share the model: from shapes, because no host may hold all of it."""

from __future__ import annotations

import math

from shardmill.words import size_of
from train.config import TrainConfig
from train.planning.host_memory import GPU_FRAMEWORK_BYTES, HOST_FRAMEWORK_BYTES, Limit
from train.planning.memory_fit import HALF
from train.planning.memory_record import MemoryRecord
from train.planning.state_bytes import StateBytes


def counted_record(limit: Limit, whole: StateBytes, config: TrainConfig) -> MemoryRecord:
    """The record of a rank that would have the whole model, as a measurement of it would find."""
    # A host also has the copy of the state from which a checkpoint is written.
    always = GPU_FRAMEWORK_BYTES + whole.state if limit.on_gpu else HOST_FRAMEWORK_BYTES + 2 * whole.state
    share = HALF if config.mixed_precision in ("bfloat16", "float16") else 1
    recomputes = whole.recomputed_image > 0
    return MemoryRecord(
        device=limit.device,
        rank_bytes=limit.rank_bytes,
        host_bytes=limit.host_bytes,
        on_gpu=limit.on_gpu,
        fixed_bytes=always + whole.step,
        image_bytes=math.ceil(share * whole.image),
        to_bfloat16=False,
        recomputed_fixed_bytes=always + whole.recomputed_step if recomputes else 0,
        recomputed_image_bytes=math.ceil(share * whole.recomputed_image),
        state_bytes=whole.state,
        why_not_recomputed=whole.why_not_recomputed,
        note=_without_activations(whole) if whole.why_not_stepped else "",
    )


def _without_activations(whole: StateBytes) -> str:
    return (
        f"activations are not counted ({whole.why_not_stepped}), nor measured: this host has less memory free than the "
        f"{size_of(whole.state)} of the whole model's state"
    )
