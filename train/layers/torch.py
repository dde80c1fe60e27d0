"""`SampleDropout` for a PyTorch module, as a user's model imports it."""

from __future__ import annotations

import torch

from train.layers.sample_bits import ELEMENTS_OF_WORD, DropRate, keys_here, low_bits, words_of


class SampleDropout(torch.nn.Module):
    """Dropout that does not depend on ranks: the first axis is the batch, and each sample has a mask of its own.

    The mask of a sample is a function of (`train.seed`, epoch, sample id, place of the module among those of the
    model): `train/layers/sample_bits.py` has the formula and its source. Element e of a sample, the last axis running
    fastest, is dropped by the sixteen bits e of its words. What is kept is divided by the share that is kept, so
    `rate`, from 0 to less than 1, is that of `torch.nn.Dropout`. In `eval()` it is the identity.

    A module that is called twice in a forward pass drops the same elements twice; give each place its own.
    `forward` raises UsageError in training outside a training step of shardmill.
    """

    place: int | None = None
    """Among the model's, which training tells it."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate
        self._drops = DropRate(rate)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if not self.training or self._drops.is_zero:
            return inputs
        keys_N, num_elements = keys_here(self.place, inputs.shape)
        counters_W = torch.arange(-(-num_elements // ELEMENTS_OF_WORD), device=inputs.device)
        words_NW = words_of(keys_N.to(inputs.device), self.place or 0, counters_W, _shift_right)
        bits_NE = words_NW.view(torch.int16)[:, :num_elements]
        is_kept = (bits_NE >= self._drops.smallest_kept).reshape(inputs.shape)
        return torch.where(is_kept, inputs * self._drops.scale, 0.0)

    def extra_repr(self) -> str:
        return f"rate={self.rate}"


def _shift_right(words: torch.Tensor, num_bits: int) -> torch.Tensor:
    return (words >> num_bits) & low_bits(num_bits)
