"""Provides the random bits that `SampleDropout` layers use in each step, for a PyTorch module or a Keras model on
PyTorch.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from shardmill.values import Batch
from train.backends.torch.runtime import device, import_torch
from train.config import TrainConfig
from train.layers.sample_bits import drawing, number_layers, sample_keys


class SampleDraws:
    """The random bits of one model's layers; without such layers, a step has no extra cost."""

    def __init__(self, config: TrainConfig, model: Any, is_keras: bool) -> None:
        self._seed = config.seed
        self._num_layers = _number(model, is_keras)

    def of(self, batch: Batch) -> AbstractContextManager[None]:
        """Around the forward and the backward pass of `batch`."""
        keys_N = self.keys(batch)
        return nullcontext() if keys_N is None else drawing(keys_N)

    def keys(self, batch: Batch) -> Any:
        """What `drawing` takes for the samples of `batch`; None if no layer draws."""
        if not self._num_layers:
            return None
        keys_N = sample_keys(self._seed, batch.epoch, batch.sample_ids_N)
        return import_torch().from_numpy(keys_N).to(device())


def _number(model: Any, is_keras: bool) -> int:
    if is_keras:
        from train.backends.keras.build import number_sample_dropouts

        return number_sample_dropouts(model)
    from train.layers.torch import SampleDropout

    return number_layers(module for module in model.modules() if isinstance(module, SampleDropout))
