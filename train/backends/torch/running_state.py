"""Finds running state in a chain of blocks, such as a counter in a buffer: no rank that has some of them shares it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from shardmill.values import Batch
from train.backends.torch.runtime import device, import_torch

if TYPE_CHECKING:
    from train.backends.torch.passes import Parts


def changing_buffer(parts: Parts, blocks: Sequence[Any], images_NHWC: Any) -> str:
    """Compute the images twice as in training. -> where a buffer changes each time, in words; empty if none does.

    One that the first pass fills, and the second leaves as it is, does not count. Buffers and generators are afterwards
    as they were.
    """
    torch = import_torch()
    places = [
        (number, module, name, buffer)
        for number, block in enumerate(blocks, 1)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    if not places:
        return ""
    num_images = len(images_NHWC)
    # Of a batch, dropout reads the sample ids.
    batch = Batch(np.zeros(0, np.uint8), np.zeros(0), np.ones(num_images, np.float32), np.arange(num_images), 0, 0)

    def after_a_pass() -> list[Any]:
        with parts.draws.of(batch), parts.precision.computing():
            values = parts.classifier.inputs_of(images_NHWC)
            for block in blocks:
                values = block(values)
        return [module._buffers[name].clone() for _, module, name, _ in places]

    before = [buffer.clone() for *_, buffer in places]
    parts.classifier.train()
    with torch.no_grad(), torch.random.fork_rng([] if device().type == "cpu" else [device()]):
        first, second = after_a_pass(), after_a_pass()
        for (_, module, name, buffer), values in zip(places, before, strict=True):
            module._buffers[name] = buffer.copy_(values)
    found = (place for place, *both in zip(places, first, second, strict=True) if not torch.equal(*both))
    for number, module, name, _ in found:
        return f"the buffer {name!r} of a {type(module).__name__}, in block {number} of {len(blocks)}"
    return ""
