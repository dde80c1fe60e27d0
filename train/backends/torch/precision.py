"""`train.mixed_precision` for a PyTorch model: the precision of the forward pass, and float16's loss scale.

A scale keeps small gradients from vanishing in float16. It follows from the gradients that were summed over all ranks,
so that all ranks have the same one; `torch.amp.GradScaler` would lower it to 0, and does not tell what it skipped.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from train.backends.torch.runtime import device, import_torch

# As Keras's LossScaleOptimizer has them: the first scale, and the updates without an overflow before it is doubled.
FIRST_SCALE = 2.0**15
NUM_UPDATES_TO_DOUBLE = 2000
# An overflow at the smallest cannot come from the scale.
SMALLEST_SCALE = 1.0
# Gradients that are all 0 never overflow.
LARGEST_SCALE = 2.0**24


class Precision:
    """`name`: the value of `train.mixed_precision`."""

    def __init__(self, name: str) -> None:
        torch = import_torch()
        self._dtype = {"off": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
        self._scales = name == "float16"
        # Not on a GPU: each step asks for them.
        self._scale = torch.tensor(FIRST_SCALE, dtype=torch.float32)
        self._num_updates = torch.zeros((), dtype=torch.int64)

    def computing(self) -> AbstractContextManager[None]:
        """Around a forward pass."""
        return nullcontext() if self._dtype is None else import_torch().autocast(device().type, dtype=self._dtype)

    def objective(self, loss: Any) -> Any:
        """Return the value to differentiate in place of the loss."""
        return loss * float(self._scale) if self._scales else loss

    def unscaled(self, gradients: list[Any]) -> list[Any]:
        """The loss's own gradients, from those of the objective."""
        return [each / float(self._scale) for each in gradients] if self._scales else gradients

    def lower(self) -> bool:
        """Gradients of a finite loss have overflowed: halve the scale. False if that is not the reason."""
        if not self._scales or float(self._scale) <= SMALLEST_SCALE:
            return False
        self._scale.copy_((self._scale / 2).clamp(min=SMALLEST_SCALE))
        self._num_updates.zero_()
        return True

    def after_update(self) -> None:
        """Gradients were finite: after many of such updates in a row the scale is doubled."""
        if not self._scales:
            return
        self._num_updates += 1
        if int(self._num_updates) == NUM_UPDATES_TO_DOUBLE:
            self._scale.copy_((self._scale * 2).clamp(max=LARGEST_SCALE))
            self._num_updates.zero_()

    def begin(self) -> None:
        """Forget all, as a fresh optimizer has."""
        self._scale.fill_(FIRST_SCALE)
        self._num_updates.zero_()

    def state(self) -> list[Any]:
        """The tensors that a resumed training needs."""
        return [self._scale, self._num_updates] if self._scales else []
