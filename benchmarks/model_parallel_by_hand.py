"""Training steps of sharded models as PyTorch's own guides write them; `benchmarks/model_parallel.py` compares ours.

Each takes a whole vision transformer of `train.models.vit_torch`, in the process group that is open, and returns the
module as this rank holds it, with a step: Adam, cross-entropy, no clipping.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from shardmill.values import Batch

Step = Callable[[Batch], float]
MEAN, STD = 120.0, 60.0
MICROBATCHES = 8


def fsdp(model: Any) -> tuple[nn.Module, Any, Step]:
    """https://docs.pytorch.org/tutorials/intermediate/FSDP_tutorial.html"""
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model, *_step(model)


def tensor_parallel(model: Any) -> tuple[nn.Module, Any, Step]:
    """https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html"""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plan = {
        "attention.query": ColwiseParallel(),
        "attention.key": ColwiseParallel(),
        "attention.value": ColwiseParallel(),
        "attention.out": RowwiseParallel(),
        "fc1": ColwiseParallel(),
        "fc2": RowwiseParallel(),
    }
    for block in model.blocks:
        parallelize_module(block, mesh, plan)
    return model, *_step(model)


class Stage(nn.Module):
    """Some blocks in a row; the first stage has the embedding, too, and the last one norm and head."""

    def __init__(self, model: Any, index: int, count: int) -> None:
        super().__init__()
        num_blocks = len(model.blocks)
        self.blocks = model.blocks[index * num_blocks // count : (index + 1) * num_blocks // count]
        self.embedding = model.embedding if index == 0 else nn.Identity()
        self.norm, self.head = (model.norm, model.head) if index == count - 1 else (None, None)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        tokens = self.blocks(self.embedding(inputs))
        return tokens if self.norm is None or self.head is None else self.head(self.norm(tokens).mean(1))


def pipeline(model: Any) -> tuple[nn.Module, Any, Step]:
    """https://docs.pytorch.org/tutorials/intermediate/pipelining_tutorial.html"""
    from torch import distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, count = dist.get_rank(), dist.get_world_size()
    module = Stage(model, rank, count)
    optimizer = torch.optim.Adam(module.parameters(), 1e-3)
    stage = PipelineStage(module, rank, count, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.cross_entropy)

    def step(batch: Batch) -> float:
        optimizer.zero_grad()
        losses: list[torch.Tensor] = []
        if rank == 0:
            images = (torch.from_numpy(batch.images_NHWC).float() - MEAN) / STD
            schedule.step(images.permute(0, 3, 1, 2))
        elif rank == count - 1:
            schedule.step(target=torch.from_numpy(batch.labels_N), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        loss = torch.stack(losses).mean() if losses else torch.zeros(())
        dist.all_reduce(loss)
        return loss.item()

    return module, optimizer, step


def _step(model: nn.Module) -> tuple[Any, Step]:
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def step(batch: Batch) -> float:
        images = (torch.from_numpy(batch.images_NHWC).float() - MEAN) / STD
        loss = F.cross_entropy(model(images.permute(0, 3, 1, 2)), torch.from_numpy(batch.labels_N))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return optimizer, step


def state_bytes(model: nn.Module, optimizer: Any) -> int:
    """Weights and optimizer on this rank."""
    tensors: list[Any] = [*model.parameters()]
    tensors += [each for state in optimizer.state.values() for each in state.values() if torch.is_tensor(each)]
    local = [each.to_local() if hasattr(each, "to_local") else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


BY_HAND: dict[str, Callable[[Any], tuple[nn.Module, Any, Step]]] = {
    "torch_fsdp": fsdp,
    "tensor_parallel": tensor_parallel,
    "pipeline_parallel": pipeline,
}
