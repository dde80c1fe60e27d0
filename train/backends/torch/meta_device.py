"""PyTorch's device `meta`, on which tensors have shapes and no values: a model is placed on ranks, and counted, there.

One rank builds the model materialized. All place it on `meta`, which takes neither memory nor an exchange; then each
has memory for its shards alone, and is given their values. A machine without the memory, or without the other ranks,
counts the same way what a rank would hold, and what a step would need at its peak.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np

from shardmill.errors import ShardmillError
from shardmill.values import Batch
from train.backends.model_spec import ModelSpec
from train.backends.torch.model import classifier_of, freeze, start_keras_if_imported
from train.backends.torch.passes import SampleDraws
from train.backends.torch.recompute import Recomputed
from train.backends.torch.runtime import import_torch
from train.backends.torch.state import new_optimizer, state_tensors
from train.checkpoints.shards import Shard
from train.config import TrainConfig
from train.models.user import build_named, no_module


def move_to_meta(module: Any) -> dict[str, Any]:
    """Move the parameters of a module to `meta`. -> its parameters as they were, by name."""
    torch = import_torch()
    taken = dict(module.named_parameters())
    _replace(
        module,
        {
            id(each): torch.nn.Parameter(torch.empty_like(each, device="meta"), each.requires_grad)
            for each in taken.values()
        },
    )
    return taken


def materialize(module: Any, device: Any) -> None:
    """Memory on `device` for whatever is on `meta`; its values are left to chance."""
    torch = import_torch()
    given: dict[int, Any] = {}
    for each in (*module.parameters(), *module.buffers()):
        if each.device.type == "meta":
            memory = torch.empty_like(each, device=device)
            is_parameter = isinstance(each, torch.nn.Parameter)
            given[id(each)] = torch.nn.Parameter(memory, each.requires_grad) if is_parameter else memory
    _replace(module, given)


def _replace(module: Any, by_id: Mapping[int, Any]) -> None:
    """A tensor that stands at two places stays one."""
    for each in module.modules():
        for name, tensor in [*each._parameters.items(), *each._buffers.items()]:
            if id(tensor) in by_id:
                # Some modules note what is set (recurrent layers).
                setattr(each, name, by_id[id(tensor)])


def meta_copy(module: Any) -> Any:
    """A copy on `meta`, as ranks place it."""
    copied = copy.deepcopy(module)
    move_to_meta(copied)
    return copied


def meta_module(config: TrainConfig, spec: ModelSpec) -> Any:
    """What `train.model` names, on PyTorch's device `meta`, with `train.freeze` applied.

    A factory that computes with values builds its module materialized first. Raises UsageError if it does not build,
    and for a Keras model.
    """
    torch = import_torch()
    start_keras_if_imported(config)
    make = partial(build_named, config, spec.image_shape_HWC, spec.labels.num_outputs)
    try:
        with torch.device("meta"):
            module = make()
    except ShardmillError:
        module = make()
    if not isinstance(module, torch.nn.Module) or hasattr(module, "trainable_variables"):
        raise no_module(config)
    module = module.to("meta").train()
    if any(isinstance(each, torch.nn.UninitializedParameter) for each in module.parameters()):
        with torch.no_grad():
            module(torch.zeros((2, spec.image_shape_HWC[2], *spec.image_shape_HWC[:2]), device="meta"))
    freeze(config, module, False)
    return module


def meta_classifier(module: Any, spec: ModelSpec) -> Any:
    """`module` as a step calls it: uint8 images_NHWC -> outputs_NK."""
    return classifier_of(module, is_keras=False, spec=spec).to("meta").train()


def optimizer_bytes(config: TrainConfig, module: Any, shapes: Mapping[str, tuple[int, ...]]) -> int:
    """The optimizer's state of trainable weights by name, of which it updates elements of these shapes.

    Raises UsageError for an optimizer that PyTorch does not have.
    """
    torch = import_torch()
    named = {name: weight for name, weight in module.named_parameters() if name in shapes}
    updated = [
        torch.nn.Parameter(torch.empty(shapes[name], dtype=each.dtype, device="meta")) for name, each in named.items()
    ]
    optimizer = new_optimizer(config, module, list(named.values()), updated)
    return sum(tensor.nbytes for tensor in state_tensors(optimizer, updated))


@contextmanager
def fake_process_group(num_ranks: int) -> Iterator[None]:
    """Inside it this process is rank 0 of so many, by PyTorch's process group `fake`: exchanges return at once, and
    their values mean nothing."""
    import torch.distributed as dist

    # PyTorch has it for its own tests; importing it registers the group.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def send_first_values(
    values: Mapping[str, Any], of_ranks: Sequence[Sequence[Shard]], mine: Sequence[Any], rank: int
) -> None:
    """Fill this rank's tensors, `mine`, whose boxes are `of_ranks[rank]`.

    Rank 0, which has the whole arrays, sends each rank one box after the other; those of other ranks are on `meta`.
    """
    import torch
    import torch.distributed as dist

    def receive(tensor: Any) -> None:
        received = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dist.recv(received, 0)
        tensor.copy_(received)

    with torch.no_grad():
        for to, shards in enumerate(of_ranks):
            for place, shard in enumerate(shards):
                if rank not in (0, to) or 0 in shard.shape:
                    continue
                if rank != 0:
                    receive(mine[place])
                    continue
                box = values[shard.name].detach()[shard.slices].contiguous()
                if to == 0:
                    mine[place].copy_(box)
                else:
                    dist.send(box, to)


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

        # Gradients are counted as such, whether they exist yet or not.
        hooks = [
            each.register_post_accumulate_grad_hook(lambda parameter: self._leave_out(parameter.grad))
            for each in self._parameters
        ]
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
