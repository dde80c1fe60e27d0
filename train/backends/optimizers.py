"""The optimizers that shardmill names, built in every framework that has them."""

from __future__ import annotations

import train.backends.keras.optimizers as in_keras
import train.backends.torch.state as in_torch
from train.optimizers import Optimizer

# The decays of the recipes that made them common: ResNet's (arXiv:1512.03385), and those of ConvNeXt, DeiT and Swin.
SGD = Optimizer(keras=in_keras.sgd, torch=in_torch.sgd, momentum=0.9, weight_decay=1e-4)
ADAM = Optimizer(keras=in_keras.adam, torch=in_torch.adam)
ADAMW = Optimizer(keras=in_keras.adamw, torch=in_torch.adamw, weight_decay=0.05)
