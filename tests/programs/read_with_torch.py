"""Reads the dataset argv[1] by `torch_loader`, as a script does with the base wheel and PyTorch; prints versions."""

import sys

import numpy
import pyarrow
import torch

import shardmill

dataset = shardmill.open_dataset(sys.argv[1])
loader = dataset.torch_loader("train", global_batch_size=16, seed=1)
batches = list(loader)
assert all(isinstance(batch.images, torch.Tensor) and batch.images.dtype == torch.uint8 for batch in batches)
ids = torch.cat([batch.sample_ids[batch.weights > 0] for batch in batches]).tolist()
assert len(ids) == len(set(ids)) == dataset.manifest.splits["train"].num_rows == loader.samples_per_epoch
loader.load_state_dict({**loader.state_dict(), "epoch": 0, "step": 2})
assert torch.equal(next(iter(loader)).images, batches[2].images)
loader.close()
print(sys.version_info[:2], torch.__version__, numpy.__version__, pyarrow.__version__)
