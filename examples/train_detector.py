"""Trains a detector of torchvision (SSDlite, from random weights) on a dataset with boxes: a loop of 30 lines.

    shardmill etl pets/annotations/instances_train.json --set dataset.uri=pets-dataset --set etl.resize_mode=pad
    python examples/train_detector.py pets-dataset --steps 20

It prints the loss of each step. For a useful detector, start from torchvision's weights and train for epochs.
"""

from __future__ import annotations

import argparse
import itertools

import torch
from torchvision.models.detection import ssdlite320_mobilenet_v3_large

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="with boxes that have classes (docs/boxes.md)")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--batch-size", type=int, default=4)
args = parser.parse_args()

torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
dataset = shardmill.open_dataset(args.dataset)
# Class 0 is the background.
model = ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None, num_classes=1 + len(dataset.class_names)).to(
    device
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

augment = shardmill.AugmentOptions(images="photographs", random_crop_padding=8)
loader = dataset.torch_loader("train", global_batch_size=args.batch_size, augment=augment, device=device)
batches = itertools.chain.from_iterable(loader for _ in itertools.count())
for step, batch in enumerate(itertools.islice(batches, args.steps)):
    # Padding has no boxes and weight 0; a detector takes a list of images, so it is left out.
    rows = batch.weights.nonzero().flatten().tolist()
    images = [batch.images[row].float() / 255 for row in rows]
    targets = [{"boxes": boxes.sides, "labels": 1 + boxes.labels} for boxes in (batch["boxes"][row] for row in rows)]
    losses = model(images, targets)
    loss = torch.stack(list(losses.values())).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
