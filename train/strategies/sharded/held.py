"""What a rank of each sharded strategy holds: the module is placed as on a rank, with shapes alone, and counted.

Not a rule such as 1/N: a weight whose rows the ranks do not divide is padded, and one that tensor parallelism leaves
whole is whole on every rank.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from train.config import TrainConfig
from train.contracts.mesh import Mesh
from train.strategies.held import Held, holds_all
from train.strategies.sharded.placement import DeviceMeshes, check_layers, divide_layers, place_on
from train.strategies.sharded.zero1 import ShardedUpdates

if TYPE_CHECKING:
    from train.backends.torch.layout import Box


def held_on(mesh: Callable[[TrainConfig], Mesh]) -> Callable[[TrainConfig, Any], Held]:
    """`Strategy.held` of ranks that hold one module together, along the axes of `mesh`."""

    def held(config: TrainConfig, module: Any) -> Held:
        from train.backends.torch.layout import ShardedTensors, boxes_when_placed

        axes = mesh(config)
        check_layers(mesh)(config, module)
        meshes, layout = DeviceMeshes.of(axes), ShardedTensors(axes.num_ranks, _exchange_nothing)
        is_bfloat16 = config.mixed_precision == "bfloat16"
        boxes = boxes_when_placed(module, partial(place_on, meshes, is_bfloat16), layout)
        if meshes.tensor is not None:
            module = copy.deepcopy(module)
            divide_layers(meshes.tensor, module)
        gathered = 0 if meshes.fsdp is None else _gathered_bytes(module, layout.local, 2 if is_bfloat16 else 4)
        # Without FSDP a step adds up all gradients as one flat tensor.
        flat = _num_bytes(boxes.values()) if meshes.fsdp is None else 0
        return Held(boxes, boxes, module, gathered, flat)

    return held


def held_by_zero1(config: TrainConfig, module: Any) -> Held:
    """`Strategy.held`: the whole model, and the optimizer state of some rows of each weight."""
    whole, num_ranks = holds_all(config, module), Mesh.of(config).num_ranks
    of_ranks = [
        {name: layout.state_box(box) for name, box in whole.weights.items()}
        for layout in (ShardedUpdates(rank, num_ranks) for rank in range(num_ranks))
    ]
    most = max(of_ranks, key=lambda boxes: _num_bytes(boxes.values()))
    # All gradients as one flat tensor; then the rows of every rank, and this one's twice.
    update_bytes = 2 * _num_bytes(whole.weights.values()) + (2 * _num_bytes(most.values()) if num_ranks > 1 else 0)
    return Held(whole.weights, most, module, update_bytes=update_bytes)


def _gathered_bytes(module: Any, local: Callable[[Any], Any], bytes_per_element: int) -> int:
    """Weights outside the blocks for a whole step; of the largest block the weights, those of the next one, which are
    gathered meanwhile, and the gradients before each rank keeps its shard of their sum."""
    from train.backends.torch.blocks import blocks_of

    def num_elements(parameters: Iterable[Any]) -> int:
        return sum(local(each).numel() for each in parameters)

    blocks = [num_elements(block.parameters()) for block in blocks_of(module)]
    outside, largest = num_elements(module.parameters()) - sum(blocks), max(blocks, default=0)
    return bytes_per_element * (outside + 3 * largest)


def _num_bytes(boxes: Iterable[Box]) -> int:
    """Of float32, which weights are."""
    return 4 * sum(math.prod(box.shape) for box in boxes)


def _exchange_nothing(tensor: Any) -> None:
    return
