"""Counts the memory of a training step from shapes: it is computed without numbers, on PyTorch's device `meta`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from shardmill.values import Batch
from train.backends.torch.recompute import Recomputed
from train.backends.torch.runtime import import_torch
from train.backends.torch.sample_draws import SampleDraws
from train.config import TrainConfig

NUM_IMAGES = (2, 4)
"""What more images need follows from two steps; of a single image there are no statistics."""


def step_bytes(config: TrainConfig, classifier: Any, image_shape_HWC: tuple[int, int, int]) -> tuple[int, int]:
    """-> (bytes for any number of images, bytes for each image) that a step has at its peak, beside weights and
    gradients. Activations are kept or recomputed as `config` says. `classifier`: see train/backends/torch/model.py.

    Raises whatever a module raises that computes with the numbers of its tensors.
    """
    few, more = (_peak_of_step(config, classifier, (number, *image_shape_HWC)) for number in NUM_IMAGES)
    of_image = (more - few) // (NUM_IMAGES[1] - NUM_IMAGES[0])
    return max(0, few - NUM_IMAGES[0] * of_image), of_image


def _peak_of_step(config: TrainConfig, classifier: Any, shape_NHWC: tuple[int, int, int, int]) -> int:
    torch, num_images = import_torch(), shape_NHWC[0]
    draws, recomputed = SampleDraws(config, classifier.model, False), Recomputed(config, classifier.model, False)
    # Of a batch, dropout reads the sample ids.
    batch = Batch(np.zeros(0, np.uint8), np.zeros(0), np.ones(num_images, np.float32), np.arange(num_images), 0, 0)
    live = LiveBytes(classifier)
    with _fused_attention(), live.counted(), draws.of(batch):
        images_NHWC = torch.empty(shape_NHWC, dtype=torch.uint8, device="meta")
        with recomputed.forward(torch.empty(num_images, device="meta")):
            outputs_NK = classifier(images_NHWC).float()
        torch.log_softmax(outputs_NK, 1).sum().backward()
    return live.peak


class LiveBytes:
    """The memory of all tensors that exist at a time, without the parameters of `module` and their gradients."""

    def __init__(self, module: Any) -> None:
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}
        """By the address of a storage that is counted."""
        self._kept: list[Any] = []
        self._parameters = [each for each in module.parameters() if each.requires_grad]
        for tensor in (*module.parameters(), *module.buffers()):
            self._leave_out(tensor)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """What the block computes, with the backward pass in it."""
        torch = import_torch()
        from torch.utils._python_dispatch import TorchDispatchMode

        count = self._count

        class Counting(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                torch.utils._pytree.tree_map_only(torch.Tensor, count, result)
                return result

        hooks = [each.register_post_accumulate_grad_hook(self._forget_gradient) for each in self._parameters]
        try:
            with Counting():
                yield
        finally:
            for hook in hooks:
                hook.remove()
            for each in self._parameters:
                each.grad = None

    def _count(self, tensor: Any) -> None:
        storage = _storage_of(tensor)
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes:
            return
        self._sizes[key] = size
        self.now += size
        self.peak = max(self.peak, self.now)
        # A storage keeps its Python object for as long as it lives.
        weakref.finalize(storage, self._drop, key)

    def _drop(self, key: int) -> None:
        self.now -= self._sizes.pop(key, 0)

    def _leave_out(self, tensor: Any) -> None:
        storage = _storage_of(tensor)
        self._kept.append(storage)
        self.now -= self._sizes.get(storage._cdata, 0)
        self._sizes[storage._cdata] = 0

    def _forget_gradient(self, parameter: Any) -> None:
        """Gradients are counted as such, whether they exist yet or not."""
        self._leave_out(parameter.grad)


def _storage_of(tensor: Any) -> Any:
    """Of a `DTensor`, that of this rank's elements."""
    return getattr(tensor, "_local_tensor", tensor).untyped_storage()


@contextmanager
def _fused_attention() -> Iterator[None]:
    """Inside it attention is computed as on devices, which do not keep the weights of attention; `meta` would."""
    torch = import_torch()
    functional = torch.nn.functional
    plain: Callable[..., Any] = functional.scaled_dot_product_attention

    def fused(
        query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *causal: Any, **how: Any
    ) -> Any:
        if attn_mask is not None or dropout_p or query.dim() != 4:
            return plain(query, key, value, attn_mask, dropout_p, *causal, **how)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value)[0]

    functional.scaled_dot_product_attention = fused
    try:
        yield
    finally:
        functional.scaled_dot_product_attention = plain
