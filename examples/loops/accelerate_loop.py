"""A loop of Hugging Face Accelerate; it resumes at the step after its last checkpoint, with any number of processes.

    accelerate launch --cpu --num_processes 2 examples/loops/accelerate_loop.py DATASET@1

The loader is not prepared: it reads the rows of its own rank. Accelerate saves its state with the other ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.nn.functional import cross_entropy

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="with its version, which all ranks must share: DATASET@1")
parser.add_argument("--checkpoint", type=Path, default=Path("accelerate"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop-after", type=int, help="end after so many steps, to try how it resumes")
args = parser.parse_args()

accelerator = Accelerator(cpu=True)
dataset = shardmill.open_dataset(args.dataset)
# Rank and world size are those of Accelerate's process group.
loader = dataset.torch_loader("train", global_batch_size=32, seed=0)

set_seed(0)
height, width, channels = dataset.manifest.normalize.image_shape_HWC
net = nn.Sequential(
    nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
    nn.Linear(8 * (height // 4) * (width // 4), len(dataset.class_names)),
)  # fmt: skip
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01))
accelerator.register_for_checkpointing(loader)
if args.checkpoint.exists():
    accelerator.load_state(str(args.checkpoint))

steps_done = 0
while loader.epoch < args.epochs and steps_done != args.stop_after:
    for batch in loader:
        batch = batch.to(accelerator.device)
        # Rows of padding have weight 0. The mean is over the real rows of all ranks; DDP divides by their number.
        num_real = accelerator.reduce(batch.weights.sum())
        losses = cross_entropy(model(batch.images / 255), batch.labels, reduction="none")
        loss = (losses * batch.weights).sum() * accelerator.num_processes / num_real
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"epoch {batch.epoch} step {batch.step} loss of rank 0 {loss.item():.4f}", flush=True)
        accelerator.save_state(str(args.checkpoint))
        steps_done += 1
        if steps_done == args.stop_after:
            break
accelerator.print(f"weights {sum(float(each.detach().double().abs().sum()) for each in net.parameters()):.6f}")
accelerator.end_training()
