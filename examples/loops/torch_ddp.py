"""A plain loop of PyTorch's DistributedDataParallel, which resumes at the step after its last checkpoint.

    torchrun --nproc-per-node 2 examples/loops/torch_ddp.py DATASET@1

Started again, with any number of processes up to `num_streams`, it continues with the next step: no sample of the epoch
is left out, and none comes twice.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="with its version, which all ranks must share: DATASET@1")
parser.add_argument("--checkpoint", type=Path, default=Path("loop.pt"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--global-batch-size", type=int, default=32)
parser.add_argument("--stop-after", type=int, help="end after so many steps, to try how it resumes")
args = parser.parse_args()

dist.init_process_group("gloo")
dataset = shardmill.open_dataset(args.dataset)
# Rank and world size are those of the process group.
loader = dataset.torch_loader("train", global_batch_size=args.global_batch_size, seed=0, num_streams=8)

torch.manual_seed(0)
height, width, channels = dataset.manifest.normalize.image_shape_HWC
net = nn.Sequential(
    nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
    nn.Linear(8 * (height // 4) * (width // 4), len(dataset.class_names)),
)  # fmt: skip
model = DistributedDataParallel(net)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
if args.checkpoint.exists():
    saved = torch.load(args.checkpoint, weights_only=True)
    net.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    loader.load_state_dict(saved["loader"])

steps_done = 0
while loader.epoch < args.epochs and steps_done != args.stop_after:
    for batch in loader:
        # Rows of padding have weight 0. The mean is over the real rows of all ranks; DDP divides by their number.
        num_real = batch.weights.sum()
        dist.all_reduce(num_real)
        losses = cross_entropy(model(batch.images / 255), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() * dist.get_world_size() / num_real
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"epoch {batch.epoch} step {batch.step} loss of rank 0 {loss.item():.4f}", flush=True)
            # The loader's state is the same on every rank.
            state = {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            torch.save(state, args.checkpoint)
        steps_done += 1
        if steps_done == args.stop_after:
            break
if dist.get_rank() == 0:
    print(f"weights {sum(float(each.double().abs().sum()) for each in net.parameters()):.6f}")
dist.destroy_process_group()
