"""A LightningModule on a loader of shardmill; it resumes in the middle of an epoch, without a batch lost or repeated.

    python examples/loops/lightning_fit.py DATASET@1

The trainer saves the loader's state in its checkpoints, because that has a `state_dict`, and loads it on a resume.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.nn.functional import cross_entropy

import shardmill

parser = argparse.ArgumentParser()
parser.add_argument("dataset", help="with its version, which all ranks must share: DATASET@1")
parser.add_argument("--checkpoints", type=Path, default=Path("lightning"))
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--stop-after", type=int, default=-1, help="end after so many steps, to try how it resumes")
args = parser.parse_args()
dataset = shardmill.open_dataset(args.dataset)


class Net(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        height, width, channels = dataset.manifest.normalize.image_shape_HWC
        self.net = nn.Sequential(
            nn.Conv2d(channels, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(),
            nn.Linear(8 * (height // 4) * (width // 4), len(dataset.class_names)),
        )  # fmt: skip

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        # Rows of padding have weight 0.
        losses = cross_entropy(self.net(batch["images"] / 255), batch["labels"], reduction="none")
        loss = (losses * batch["weights"]).sum() / batch["weights"].sum()
        ids = batch["sample_ids"][batch["weights"] > 0].tolist()
        print(f"epoch {self.current_epoch} step {batch_idx} loss {loss:.4f} ids {sorted(ids)}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)

    def train_dataloader(self):
        return dataset.torch_loader("train", global_batch_size=32, seed=0)


pl.seed_everything(0)
last = args.checkpoints / "last.ckpt"
trainer = pl.Trainer(
    max_epochs=args.epochs, max_steps=args.stop_after, accelerator="cpu", devices=1, logger=False,
    enable_progress_bar=False, enable_model_summary=False,
    callbacks=[ModelCheckpoint(args.checkpoints, save_last=True, save_top_k=0, every_n_train_steps=1)],
)  # fmt: skip
trainer.fit(Net(), ckpt_path=last if last.exists() else None)
