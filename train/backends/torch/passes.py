"""How a PyTorch model computes on a rank: forward and backward pass of a microbatch, and its outputs.

`TorchLearner` computes by `WholeModel`, unless a strategy places parts of the model on other ranks, too: those of a
pipeline compute by `train/backends/torch/stages.py`.

Shape legend: N batch, H height, W width, C channels, K outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from train.backends.torch.runtime import device, import_torch

if TYPE_CHECKING:
    from shardmill.values import Batch
    from train.backends.torch.precision import Precision
    from train.backends.torch.recompute import Recomputed
    from train.backends.torch.sample_draws import SampleDraws

Objective = Callable[[Any, Any], Any]
"""(outputs_NK, their places in the microbatch) -> what the backward pass differentiates: their addend to the loss of
the global batch. It counts what it is called with."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a learner computes with."""

    classifier: Any
    """uint8 images_NHWC -> outputs_NK; its `inputs_of` -> what the module is given."""
    image_shape_HWC: tuple[int, int, int]
    draws: SampleDraws
    recomputed: Recomputed
    precision: Precision


class Passes(Protocol):
    """Both passes, and outputs without them."""

    def differentiate(
        self, batch: Batch, weights_N: Any, objective: Objective, before_backward: Callable[[], None]
    ) -> None:
        """Add the gradient of `objective` to what is at the weights. `weights_N`: those of `batch`, on the device."""
        ...

    def outputs(self, images_NHWC: Any) -> Any:
        """uint8 images -> float32 outputs_NK of all of them, without a gradient."""
        ...


MakePasses = Callable[[Parts], Passes]


class WholeModel:
    """One forward and one backward pass, by all of the model."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def differentiate(
        self, batch: Batch, weights_N: Any, objective: Objective, before_backward: Callable[[], None]
    ) -> None:
        parts = self._parts
        with parts.draws.of(batch):
            images_NHWC = on_device(batch.images_NHWC)
            with parts.precision.computing(), parts.recomputed.forward(weights_N):
                outputs_NK = parts.classifier(images_NHWC).float()
            loss = objective(outputs_NK, slice(None))
            before_backward()
            loss.backward()

    def outputs(self, images_NHWC: Any) -> Any:
        return self._parts.classifier(images_NHWC).float()


def on_device(array: Any) -> Any:
    """A NumPy array as a tensor."""
    return import_torch().from_numpy(array).to(device(), non_blocking=True)
