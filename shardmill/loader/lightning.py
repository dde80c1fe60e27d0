"""What a loader asks of Lightning's trainer at its first batch: whether a checkpoint has a position for it.

A module that reads `trainer.estimated_stepping_batches`, as every OneCycleLR does, makes the trainer iterate its
loaders before it has read the checkpoint, and it then leaves their positions unused. Nothing here imports Lightning.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from shardmill.errors import UsageError

_PACKAGES = ("pytorch_lightning", "lightning")


def unused_state(loader: object, *, is_placed: bool) -> Mapping[str, Any] | None:
    """The state that a trainer has read for this loader and not loaded; None if there is none, or no trainer.

    Raises UsageError if the trainer has done steps before, and nothing has placed the loader.
    """
    trainer = _trainer() if any(name in sys.modules for name in _PACKAGES) else None
    if trainer is None:
        return None
    states = getattr(trainer.fit_loop, "_combined_loader_states_to_load", None) or []
    loaders = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "flattened", None) or []
    stateful = [each for each in loaders if hasattr(each, "state_dict") and hasattr(each, "load_state_dict")]
    for place, (each, state) in enumerate(zip(stateful, states, strict=False)):
        if each is loader and state is not None:
            left = [*states[:place], None, *states[place + 1 :]]
            trainer.fit_loop._combined_loader_states_to_load = left if any(left) else []
            return state
    if trainer.global_step > 0 and not is_placed:
        raise UsageError(
            f"a new loader in a Lightning trainer that has done {trainer.global_step} steps",
            "expected its position, or batches that were trained on come again",
            "return the same loader from train_dataloader each time, or call loader.seek(epoch, step)",
        )
    return None


def _trainer() -> Any:
    """The trainer whose training asks for a batch in this thread; None if there is none, or for an evaluation."""
    frame = sys._getframe(2)
    while frame is not None:
        loop: Any = frame.f_locals.get("self")
        name = type(loop).__name__
        if name in ("_TrainingEpochLoop", "_EvaluationLoop") and type(loop).__module__.startswith(_PACKAGES):
            return loop.trainer if name == "_TrainingEpochLoop" else None
        frame = frame.f_back
    return None
